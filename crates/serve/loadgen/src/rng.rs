//! Seeded random draws that are the same on every machine and in every release, so that a seed
//! names a workload. Not for cryptography.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A generator whose whole sequence is determined by its seed.
#[derive(Clone, Debug)]
pub struct SeededRng(ChaCha8Rng);

impl SeededRng {
    /// A generator that starts from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A whole number from `low` to `high`, both included; `low` if the range is empty.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        let span = high.saturating_sub(low) as u64 + 1;
        // The high half of a 64 x 64 bit product: uniform up to a bias of span / 2^64.
        low + ((u128::from(self.0.next_u64()) * u128::from(span)) >> 64) as usize
    }

    /// A number from 0 (included) to 1 (not included).
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Seconds between two arrivals of a Poisson process with `per_second` arrivals a second on
    /// average.
    pub fn wait_seconds(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.unit()).ln() / per_second
    }

    /// `count` token ids below `vocab_size`.
    pub fn tokens(&mut self, count: usize, vocab_size: usize) -> Vec<u32> {
        (0..count).map(|_| self.between(0, vocab_size.saturating_sub(1)) as u32).collect()
    }

    /// Puts the items in a random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.between(0, index));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a seed keeps its meaning between releases: the first draws are those recorded here.
    #[test]
    fn the_sequence_of_a_seed_is_fixed() {
        let mut rng = SeededRng::new(1_234_567);
        let first: Vec<usize> = (0..4).map(|_| rng.between(0, 999_999)).collect();
        assert_eq!(first, [268_315, 814_454, 99_852, 572_276]);
    }

    /// Goal: ranges include both ends, and no draw leaves them.
    #[test]
    fn ranges_include_both_ends() {
        let mut rng = SeededRng::new(7);
        let mut seen = [false; 5];
        for _ in 0..1_000 {
            let drawn = rng.between(3, 7);
            assert!((3..=7).contains(&drawn), "{drawn}");
            seen[drawn - 3] = true;
            let unit = rng.unit();
            assert!((0.0..1.0).contains(&unit), "{unit}");
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(rng.between(9, 9), 9);
        assert_eq!(rng.between(9, 3), 9);
    }

    /// Goal: shuffling keeps the items.
    #[test]
    fn shuffling_keeps_the_items() {
        let mut items: Vec<u32> = (0..100).collect();
        SeededRng::new(3).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert!(items.into_iter().eq(0..100));
    }
}
