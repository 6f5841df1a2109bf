//! Whether a request fits: the blocks there are, and the most that will be taken at any time.

use super::blocks_for;

/// Blocks as they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Nobody's.
    pub(crate) free: usize,
    /// Cached, and held by nobody.
    pub(crate) evictable: usize,
}

impl Capacity {
    /// Blocks that could be had now.
    pub(crate) fn available(self) -> usize {
        self.free + self.evictable
    }
}

/// A running request's way to its end, or that of one which is to run, in blocks and in steps. In
/// a step everything that runs generates one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Course {
    /// Tokens it has, those included that are still to be computed.
    pub(crate) tokens: usize,
    /// Blocks it holds.
    pub(crate) held: usize,
    /// Tokens that it is expected to generate yet; at least 1.
    pub(crate) expected: usize,
    /// Steps after which it has ended for certain; `None` where it may stand still.
    pub(crate) steps: Option<usize>,
    /// How many of its first blocks others may hold beyond its end.
    pub(crate) shared: usize,
}

impl Course {
    /// Blocks to reserve before it goes on: those of the tokens it has.
    pub(crate) fn now(&self, block_size: usize) -> usize {
        blocks_for(block_size, self.tokens).saturating_sub(self.held)
    }

    /// Blocks it holds in the end. The last token generated is never computed, so it takes no
    /// place.
    fn total(&self, block_size: usize) -> usize {
        blocks_for(block_size, self.tokens + self.expected.saturating_sub(1)).max(self.held)
    }
}

/// The most blocks that requests will have taken together at any time to come, beyond those they
/// hold now.
///
/// Each takes a block when its tokens fill the last one, and gives its own back at its end: what
/// many need one after another is there for all of them. Time is counted in as many steps
/// as a block has tokens; blocks are counted as taken in the first of them and as given back after
/// the last, so the result is never too small while all get on. Estimating memory at the
/// coming ends of requests follows Gong et al., "Past-Future Scheduler for LLM Serving under SLA
/// Guarantees" (ASPLOS 2025).
pub(crate) fn peak(block_size: usize, courses: impl IntoIterator<Item = Course>) -> usize {
    // By block of steps: how many begin to take one in each, how many have taken their last, and the
    // blocks given back.
    let mut changes: Vec<[usize; 3]> = vec![[0; 3]];
    let mut taken = 0;
    for course in courses {
        let total = course.total(block_size);
        let now = course.now(block_size);
        taken += now;
        let later = total - (course.held + now).min(total);
        let free = (course.held + now) * block_size - course.tokens;
        let first = free / block_size;
        let end = course.steps.map(|steps| steps.div_ceil(block_size).max(first + later));
        let last = end.unwrap_or(first + later);
        changes.resize(changes.len().max(last + 1), [0; 3]);
        changes[first][0] += 1;
        changes[first + later][1] += 1;
        if let Some(end) = end {
            changes[end][2] += total.saturating_sub(course.shared);
        }
    }
    let mut most = taken;
    let (mut taking, mut given) = (0, 0);
    for [begin, done, returned] in changes {
        taking = taking + begin - done;
        given += returned;
        taken += taking;
        most = most.max(taken.saturating_sub(given));
    }
    most
}

/// How much of their `max_tokens` requests really use, learnt from those that finished: bold
/// when they stop early, careful after a preemption.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DecodeForecast {
    /// Expected share of `max_tokens`, above 0, at most 1.
    share: f64,
}

impl Default for DecodeForecast {
    fn default() -> DecodeForecast {
        DecodeForecast { share: 0.5 }
    }
}

impl DecodeForecast {
    /// Tokens to expect of a request that generated `done` of `max_tokens`: at least one more.
    pub(crate) fn remaining(self, max_tokens: usize, done: usize) -> usize {
        let expected = (max_tokens as f64 * self.share).ceil() as usize;
        expected.saturating_sub(done).clamp(1, max_tokens.saturating_sub(done).max(1))
    }

    /// Learns from a request that finished.
    pub(crate) fn finished(&mut self, max_tokens: usize, used: usize) {
        let share = used as f64 / max_tokens.max(1) as f64;
        self.share = (0.9 * self.share + 0.1 * share).clamp(0.05, 1.0);
    }

    /// Learns that it promised too little.
    pub(crate) fn preempted(&mut self) {
        self.share = (self.share * 1.25).min(1.0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A request with `tokens`, `matched` of them cached, that runs alone to its end.
    fn course(tokens: usize, matched: usize, expected: usize) -> Course {
        let steps = Some(expected);
        Course { tokens, held: matched / 16, expected, steps, shared: matched / 16 }
    }

    #[test]
    fn cached_blocks_are_not_charged() {
        assert_eq!(course(100, 0, 29).now(16), 7);
        assert_eq!(peak(16, [course(100, 0, 29)]), 8);
        assert_eq!(course(100, 96, 29).now(16), 1);
        assert_eq!(peak(16, [course(100, 96, 29)]), 2);
    }

    #[test]
    fn a_full_hit_takes_no_block_until_it_generates() {
        assert_eq!(peak(16, [course(96, 96, 1)]), 0);
        assert_eq!(peak(16, [course(96, 96, 2)]), 1);
    }

    #[test]
    fn what_goes_together_adds_up_and_what_goes_in_turn_does_not() {
        let at = |done: usize| Course {
            tokens: 32 + done,
            held: blocks_for(16, 32 + done),
            expected: 160 - done,
            steps: Some(160 - done),
            shared: 2,
        };
        assert_eq!(peak(16, [at(0), at(0)]), 20);
        // The other ends after half of the way and gives ten blocks back.
        assert_eq!(peak(16, [at(0), at(80)]), 10);
        // One whose reader is slow may keep its blocks for ever.
        assert_eq!(peak(16, [at(0), Course { steps: None, ..at(80) }]), 15);
    }

    proptest! {
        /// Goal: step by step, requests never hold more than was foretold, and never less is
        /// foretold than by counting all that each will take.
        #[test]
        fn nobody_takes_more_than_was_foretold(
            block_size in 1usize..20,
            shapes in prop::collection::vec((1usize..60, 0usize..6, 1usize..80, 0usize..3), 1..8),
        ) {
            let courses: Vec<Course> = shapes.iter().map(|&(tokens, ahead, expected, shared)| {
                let held = (tokens / block_size + ahead).saturating_sub(2);
                Course { tokens, held, expected, steps: Some(expected), shared: shared.min(held) }
            }).collect();
            let foretold = peak(block_size, courses.iter().copied());
            let each = |course: &Course| course.total(block_size) - course.held;
            prop_assert!(foretold <= courses.iter().map(each).sum());
            for step in 0..100 {
                let held = |course: &Course| -> isize {
                    let begun = course.held as isize;
                    if step >= course.expected {
                        return course.shared as isize - begun;
                    }
                    let needed = blocks_for(block_size, course.tokens + step);
                    (needed as isize - begun).max(0)
                };
                let held: isize = courses.iter().map(held).sum();
                prop_assert!(held <= foretold as isize, "step {step}: {held} of {foretold}");
            }
        }
    }

    #[test]
    fn the_forecast_learns_both_ways_and_stays_in_range() {
        let mut forecast = DecodeForecast::default();
        assert_eq!(forecast.remaining(100, 0), 50);
        for _ in 0..100 {
            forecast.finished(100, 1);
        }
        assert_eq!(forecast.remaining(100, 0), 5);
        for _ in 0..100 {
            forecast.preempted();
        }
        assert_eq!(forecast.remaining(100, 0), 100);
        assert_eq!(forecast.remaining(100, 100), 1);
        assert_eq!(forecast.remaining(1, 0), 1);
    }
}
