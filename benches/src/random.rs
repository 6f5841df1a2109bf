//! Draws that are the same on every machine: workloads are a function of their seed.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A source of draws.
#[derive(Clone, Debug)]
pub struct Dice(ChaCha8Rng);

impl Dice {
    /// A source that the seed determines.
    #[must_use]
    pub fn new(seed: u64) -> Dice {
        Dice(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A whole number from `low` to `high`, both included; `low` for an empty range.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        let span = high.saturating_sub(low) as u64 + 1;
        // The high half of a 64 x 64 product: uniform up to a bias of span / 2^64.
        low + ((u128::from(self.0.next_u64()) * u128::from(span)) >> 64) as usize
    }

    /// A number from 0 (included) to 1 (not included).
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A wait between two arrivals of a Poisson process with so many arrivals a second.
    pub fn wait_seconds(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.unit()).ln() / per_second
    }

    /// So many token ids below `vocab_size`.
    pub fn tokens(&mut self, count: usize, vocab_size: usize) -> Vec<u32> {
        (0..count).map(|_| self.between(0, vocab_size.saturating_sub(1)) as u32).collect()
    }

    /// Brings the items into a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.between(0, index));
        }
    }
}
