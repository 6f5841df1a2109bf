//! The block budget: how many blocks the running requests will need at most.

use super::blocks_for;

/// The number of blocks that a request holds from now until its end. The request is running or is
/// about to be admitted. The model assumes that each running request generates one token per step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockDemand {
    /// Number of its tokens now, computed or not.
    pub(crate) tokens: usize,
    /// Number of blocks it holds now.
    pub(crate) held: usize,
    /// Number of tokens that it is still expected to generate, at least 1.
    pub(crate) expected: usize,
    /// Number of steps after which it has certainly ended; `None` if it may make no progress,
    /// because it is stalled by a slow consumer.
    pub(crate) steps: Option<usize>,
    /// Number of its first blocks that other requests may still hold after its end.
    pub(crate) shared: usize,
}

impl BlockDemand {
    /// Number of blocks to reserve now, for the tokens it has.
    pub(crate) fn now(&self, block_size: usize) -> usize {
        blocks_for(block_size, self.tokens).saturating_sub(self.held)
    }

    /// Number of blocks it holds at its end. The last generated token is never computed, so it
    /// needs no position.
    fn total(&self, block_size: usize) -> usize {
        blocks_for(block_size, self.tokens + self.expected.saturating_sub(1)).max(self.held)
    }
}

/// The maximum number of blocks that requests will hold together at any future time, beyond those
/// they hold now.
///
/// Each request takes a block whenever its tokens fill the last one, and releases its blocks at its
/// end, so blocks that several requests need one after another are counted once. Time is divided
/// into intervals of as many steps as a block has positions. A block counts as taken from the start
/// of an interval and as released after its end, so the result is never too small as long as all
/// requests make progress. The idea to estimate memory at the expected ends of requests is from
/// Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025).
pub(crate) fn peak(block_size: usize, demands: impl IntoIterator<Item = BlockDemand>) -> usize {
    // For each interval: the number of requests that start to take one block per interval, the
    // number of requests that have taken their last block, and the number of released blocks.
    let mut changes: Vec<[usize; 3]> = vec![[0; 3]];
    let mut taken = 0;
    for demand in demands {
        let total = demand.total(block_size);
        let now = demand.now(block_size);
        taken += now;
        let later = total - (demand.held + now).min(total);
        let free = (demand.held + now) * block_size - demand.tokens;
        let first = free / block_size;
        let end = demand.steps.map(|steps| steps.div_ceil(block_size).max(first + later));
        let last = end.unwrap_or(first + later);
        changes.resize(changes.len().max(last + 1), [0; 3]);
        changes[first][0] += 1;
        changes[first + later][1] += 1;
        if let Some(end) = end {
            changes[end][2] += total.saturating_sub(demand.shared);
        }
    }
    let mut most = taken;
    let (mut taking, mut released) = (0, 0);
    for [begin, done, ended] in changes {
        taking = taking + begin - done;
        released += ended;
        taken += taking;
        most = most.max(taken.saturating_sub(released));
    }
    most
}

/// What limits the length of an answer, in tokens, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerLimit {
    /// The request's own `max_tokens`. Clients set it near the length that they expect.
    Requested(usize),
    /// The request sets none. This number, all that context and pool can hold, says nothing about
    /// the expected length.
    Open(usize),
}

/// Predicts how many tokens requests generate: a share of `max_tokens` if the request sets it, and
/// a common length otherwise. Both move toward the lengths of finished requests, and grow after a
/// preemption, because then too few tokens were predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DecodeForecast {
    /// Expected share of `max_tokens`, from 0.05 to 1.
    share: f64,
    /// Expected number of tokens of a request without `max_tokens`, from 1 to 1,000,000.
    length: f64,
    /// Expected square of the share of `max_tokens`.
    share_square: f64,
    /// Expected square of the number of tokens of a request without `max_tokens`.
    length_square: f64,
}

impl Default for DecodeForecast {
    fn default() -> DecodeForecast {
        let (share, length) = (0.5, 256.0);
        let (share_square, length_square) = (share * share, length * length);
        DecodeForecast { share, length, share_square, length_square }
    }
}

impl DecodeForecast {
    /// Expected number of tokens that a request still generates after `done`, at least 1.
    pub(crate) fn remaining(self, limit: AnswerLimit, done: usize) -> usize {
        let (expected, max_tokens) = match limit {
            AnswerLimit::Requested(max) => ((max as f64 * self.share).ceil() as usize, max),
            AnswerLimit::Open(max) => (self.length.ceil() as usize, max),
        };
        expected.saturating_sub(done).clamp(1, max_tokens.saturating_sub(done).max(1))
    }

    /// Quantile of the number of tokens that a request still generates after `done`, at least 1:
    /// the share `quantile` of all requests, from 0 to 1, generates fewer. If all answers are
    /// equally long, it equals [`DecodeForecast::remaining`]. If an answer may end after any token,
    /// the number of tokens so far says nothing about the number left, which is distributed
    /// exponentially. In between, the variance of the lengths tells how much either counts.
    pub(crate) fn likely(self, limit: AnswerLimit, done: usize, quantile: f64) -> usize {
        let (mean, square, max_tokens) = match limit {
            AnswerLimit::Requested(max) => {
                let max_tokens = max as f64;
                (self.share * max_tokens, self.share_square * max_tokens * max_tokens, max)
            }
            AnswerLimit::Open(max) => (self.length, self.length_square, max),
        };
        let variation = (square / (mean * mean) - 1.0).clamp(0.0, 1.0);
        let memoryless = -mean * (1.0 - quantile).max(1e-9).ln();
        let left = (mean - done as f64).max(0.0) * (1.0 - variation) + memoryless * variation;
        (left.round() as usize).clamp(1, max_tokens.saturating_sub(done).max(1))
    }

    /// Learns from a finished request, which generated `used` tokens.
    pub(crate) fn finished(&mut self, limit: AnswerLimit, used: usize) {
        match limit {
            AnswerLimit::Requested(max_tokens) => {
                let share = used as f64 / max_tokens.max(1) as f64;
                self.share = (0.9 * self.share + 0.1 * share).clamp(0.05, 1.0);
                self.share_square = 0.9 * self.share_square + 0.1 * share * share;
            }
            AnswerLimit::Open(_) => {
                let used = used as f64;
                self.length = (0.9 * self.length + 0.1 * used).clamp(1.0, 1e6);
                self.length_square = 0.9 * self.length_square + 0.1 * used * used;
            }
        }
    }

    /// Learns from a preemption that too few tokens were predicted.
    pub(crate) fn preempted(&mut self) {
        self.share = (self.share * 1.25).min(1.0);
        self.length = (self.length * 1.25).min(1e6);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A request with `tokens` tokens, of which `matched` are cached, that makes progress in each
    /// step.
    fn demand(tokens: usize, matched: usize, expected: usize) -> BlockDemand {
        let steps = Some(expected);
        BlockDemand { tokens, held: matched / 16, expected, steps, shared: matched / 16 }
    }

    #[test]
    fn cached_blocks_are_not_charged() {
        assert_eq!(demand(100, 0, 29).now(16), 7);
        assert_eq!(peak(16, [demand(100, 0, 29)]), 8);
        assert_eq!(demand(100, 96, 29).now(16), 1);
        assert_eq!(peak(16, [demand(100, 96, 29)]), 2);
    }

    #[test]
    fn a_full_hit_takes_no_block_until_it_generates() {
        assert_eq!(peak(16, [demand(96, 96, 1)]), 0);
        assert_eq!(peak(16, [demand(96, 96, 2)]), 1);
    }

    #[test]
    fn demands_add_up_only_while_requests_overlap() {
        let at = |done: usize| BlockDemand {
            tokens: 32 + done,
            held: blocks_for(16, 32 + done),
            expected: 160 - done,
            steps: Some(160 - done),
            shared: 2,
        };
        assert_eq!(peak(16, [at(0), at(0)]), 20);
        // The second request ends when the first is half done, and releases ten blocks.
        assert_eq!(peak(16, [at(0), at(80)]), 10);
        // A stalled request may keep its blocks indefinitely.
        assert_eq!(peak(16, [at(0), BlockDemand { steps: None, ..at(80) }]), 15);
    }

    #[test]
    fn blocks_that_are_held_ahead_are_filled_before_others_are_taken() {
        // It takes a fourth block after 28 tokens.
        let ahead = BlockDemand { tokens: 20, held: 3, expected: 30, steps: None, shared: 0 };
        let short = BlockDemand { tokens: 1, held: 1, expected: 2, steps: Some(16), shared: 0 };
        assert_eq!(peak(16, [ahead]), 1);
        assert_eq!(peak(16, [ahead, short]), 0);
    }

    proptest! {
        /// Goal: in no step do requests hold more than the predicted peak, and the peak is never
        /// larger than the sum of what each will take.
        #[test]
        fn requests_never_hold_more_than_the_predicted_peak(
            block_size in 1usize..20,
            shapes in prop::collection::vec((1usize..60, 0usize..6, 1usize..80, 0usize..3), 1..8),
        ) {
            let demands: Vec<BlockDemand> = shapes.iter().map(|&(tokens, ahead, expected, shared)| {
                let held = (tokens / block_size + ahead).saturating_sub(2);
                let (steps, shared) = (Some(expected), shared.min(held));
                BlockDemand { tokens, held, expected, steps, shared }
            }).collect();
            let predicted = peak(block_size, demands.iter().copied());
            let each = |demand: &BlockDemand| demand.total(block_size) - demand.held;
            prop_assert!(predicted <= demands.iter().map(each).sum());
            for step in 0..100 {
                let held = |demand: &BlockDemand| -> isize {
                    let begun = demand.held as isize;
                    if step >= demand.expected {
                        return demand.shared as isize - begun;
                    }
                    let needed = blocks_for(block_size, demand.tokens + step);
                    (needed as isize - begun).max(0)
                };
                let held: isize = demands.iter().map(held).sum();
                prop_assert!(held <= predicted as isize, "step {step}: {held} of {predicted}");
            }
        }
    }

    #[test]
    fn the_forecast_learns_both_ways_and_stays_in_range() {
        use AnswerLimit::{Open, Requested};
        let mut forecast = DecodeForecast::default();
        assert_eq!(forecast.remaining(Requested(100), 0), 50);
        for _ in 0..100 {
            forecast.finished(Requested(100), 1);
        }
        assert_eq!(forecast.remaining(Requested(100), 0), 5);
        for _ in 0..100 {
            forecast.preempted();
        }
        assert_eq!(forecast.remaining(Requested(100), 0), 100);
        assert_eq!(forecast.remaining(Requested(100), 100), 1);
        assert_eq!(forecast.remaining(Requested(1), 0), 1);
        // The number of tokens that a request without `max_tokens` could generate has no influence
        // on the forecast.
        assert_eq!(forecast.remaining(Open(100), 0), 100);
        for _ in 0..200 {
            forecast.finished(Open(100_000), 20);
        }
        assert_eq!(forecast.remaining(Open(100_000), 0), 21);
        assert_eq!(forecast.remaining(Open(100_000), 50), 1);
        assert_eq!(forecast.remaining(Requested(100), 0), 100);
    }

    /// Goal: the rest of an answer is the common length minus the generated tokens if all answers
    /// are equally long, and varies as much as the lengths do if an answer may end after any token.
    #[test]
    fn what_is_left_varies_as_lengths_do() {
        use AnswerLimit::{Open, Requested};
        let mut equal = DecodeForecast::default();
        (0..200).for_each(|_| equal.finished(Open(1_000), 100));
        for quantile in [0.0, 0.5, 1.0] {
            let left = [0, 60, 100, 500].map(|done| equal.likely(Open(1_000), done, quantile));
            assert_eq!(left, [100, 40, 1, 1]);
        }
        let mut memoryless = DecodeForecast::default();
        for n in 0..2_000 {
            // Exponentially distributed, with a mean of 100.
            let quantile = (f64::from(n * 7 % 20) + 0.5) / 20.0;
            memoryless.finished(Open(1_000), (-100.0 * quantile.ln()) as usize);
        }
        for done in [0, 60, 200] {
            let left =
                [0.1, 0.5, 0.9].map(|quantile| memoryless.likely(Open(1_000), done, quantile));
            assert!(left[0] < 40 && (40..140).contains(&left[1]) && left[2] > 140, "{left:?}");
        }
        assert_eq!(memoryless.likely(Requested(100), 99, 0.9), 1);
        assert_eq!(memoryless.likely(Requested(1), 0, 1.0), 1);
    }
}
