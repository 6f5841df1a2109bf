//! A tiny deterministic generator (SplitMix64, Steele, Lea and Flood 2014) for workloads and
//! random weights: the same seed gives the same sequence on every platform and in every release,
//! which is what makes a benchmark repeatable. Not for cryptography.

/// The generator's state: one 64-bit counter.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator whose whole sequence is determined by `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// A number in `low..=high`; `low` when the range is empty.
    pub fn in_range(&mut self, low: u64, high: u64) -> u64 {
        let span = high.saturating_sub(low).saturating_add(1);
        // The high half of a 64 x 64 product: uniform up to a bias of span / 2^64.
        low + ((u128::from(self.next_u64()) * u128::from(span)) >> 64) as u64
    }

    /// A number in `-1.0..1.0`.
    pub fn signed_unit(&mut self) -> f32 {
        // 24 bits fill an f32's significand exactly.
        (self.next_u64() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the sequence is the published one, so a seed keeps its meaning between releases.
    #[test]
    fn the_sequence_is_the_reference_one() {
        let mut rng = SplitMix64::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    /// Goal: ranges are inclusive at both ends and never left.
    #[test]
    fn ranges_are_inclusive() {
        let mut rng = SplitMix64::new(7);
        let mut seen = [false; 5];
        for _ in 0..1_000 {
            let drawn = rng.in_range(3, 7);
            assert!((3..=7).contains(&drawn), "{drawn}");
            seen[(drawn - 3) as usize] = true;
            let unit = rng.signed_unit();
            assert!((-1.0..1.0).contains(&unit), "{unit}");
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(rng.in_range(9, 9), 9);
        assert_eq!(rng.in_range(9, 3), 9);
    }
}
