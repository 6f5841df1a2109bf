//! Whether a request fits: blocks there are, blocks promised, blocks it will take.

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

/// What a request will take of the blocks available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Blocks to reserve at once: those of its uncached tokens.
    pub(crate) now: usize,
    /// Blocks it is expected to take while it generates.
    pub(crate) later: usize,
}

impl Demand {
    /// All of it.
    pub(crate) fn blocks(self) -> usize {
        self.now + self.later
    }
}

/// What a request with `tokens` to have, `matched` of them cached (whole blocks), and
/// `decode` more tokens expected will take.
pub(crate) fn demand(block_size: usize, tokens: usize, matched: usize, decode: usize) -> Demand {
    let held = matched / block_size;
    let now = blocks_for(block_size, tokens).saturating_sub(held);
    // The last token generated is never computed, so it takes no place.
    let total = blocks_for(block_size, tokens + decode.saturating_sub(1));
    Demand { now, later: total.saturating_sub(held).saturating_sub(now) }
}

/// Whether the demand fits beside what running requests were promised.
pub(crate) fn fits(capacity: Capacity, promised: usize, demand: Demand) -> bool {
    demand.blocks() + promised <= capacity.available()
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
    use super::*;

    #[test]
    fn cached_blocks_are_not_charged() {
        let cold = demand(16, 100, 0, 29);
        assert_eq!(cold, Demand { now: 7, later: 1 });
        let warm = demand(16, 100, 96, 29);
        assert_eq!(warm, Demand { now: 1, later: 1 });
    }

    #[test]
    fn a_full_hit_takes_no_block_until_it_generates() {
        assert_eq!(demand(16, 96, 96, 1), Demand { now: 0, later: 0 });
        assert_eq!(demand(16, 96, 96, 2), Demand { now: 0, later: 1 });
    }

    #[test]
    fn promises_count_against_what_is_available() {
        let capacity = Capacity { free: 3, evictable: 4 };
        assert!(fits(capacity, 5, Demand { now: 1, later: 1 }));
        assert!(!fits(capacity, 6, Demand { now: 1, later: 1 }));
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
