//! The numbers that are added to the scores of attention by distance.

use stolon_checkpoint::encoder::{EncoderConfig, ScoreBias};
use stolon_kernels::RelativeBias;

/// The numbers of all heads and distances.
#[derive(Debug)]
pub(super) struct BiasTable {
    /// As [`RelativeBias::new`] expects it.
    values: Vec<f32>,
    /// Maximum number of positions of a text.
    reach: usize,
}

impl BiasTable {
    /// The table of a model, if it has one. `learned` is `[buckets, heads]`.
    pub(super) fn new(config: &EncoderConfig, learned: Option<&[f32]>) -> Option<Self> {
        let bias = config.score_bias?;
        let (heads, reach) = (config.heads, config.max_positions);
        let mut values = Vec::with_capacity(heads * RelativeBias::head_len(reach));
        let middle = (RelativeBias::head_len(reach) / 2) as isize;
        for head in 0..heads {
            for index in 0..RelativeBias::head_len(reach) as isize {
                let distance = index - middle;
                let value = match bias {
                    ScoreBias::Alibi => -slope(head, heads) * distance.unsigned_abs() as f64,
                    ScoreBias::Buckets { count, distance_max } => {
                        let bucket = bucket(distance, count, distance_max);
                        learned.map_or(0.0, |values| f64::from(values[bucket * heads + head]))
                    }
                };
                values.push((value * std::f64::consts::LOG2_E) as f32);
            }
        }
        Some(Self { values, reach })
    }

    pub(super) fn view(&self) -> RelativeBias<'_> {
        RelativeBias::new(&self.values, self.reach)
    }
}

/// The bucket of a position at `distance` after the query, as in T5: half of the buckets for each
/// direction, and half of those for single distances. The others grow with the logarithm.
fn bucket(distance: isize, count: usize, distance_max: usize) -> usize {
    let half = count / 2;
    let first = if distance > 0 { half } else { 0 };
    let (distance, exact) = (distance.unsigned_abs(), half / 2);
    if distance < exact {
        return first + distance;
    }
    // In f32, as in transformers, because the results are rounded down.
    let log = |value: f32| value.ln();
    let share = log(distance as f32 / exact as f32) / log(distance_max as f32 / exact as f32);
    first + (exact + (share * (half - exact) as f32) as usize).min(half - 1)
}

/// The slope of a head: powers of two for a power of two of heads, and those between them for the
/// others (Press et al., 2021).
fn slope(head: usize, heads: usize) -> f64 {
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let power = |index: usize, heads: usize| (-8.0 * (index + 1) as f64 / heads as f64).exp2();
    if head < whole { power(head, whole) } else { power(2 * (head - whole), 2 * whole) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: buckets are those of T5 with 32 buckets up to the distance 128.
    #[test]
    fn buckets_are_those_of_t5() {
        let buckets = |distances: &[isize]| -> Vec<usize> {
            distances.iter().map(|&distance| bucket(distance, 32, 128)).collect()
        };
        assert_eq!(buckets(&[0, -1, -7, -8, -15, -16, -127, -500]), [0, 1, 7, 8, 9, 10, 15, 15]);
        assert_eq!(buckets(&[1, 7, 8, 16, 128]), [17, 23, 24, 26, 31]);
    }

    /// Goal: slopes are those of the paper for 8 and for 12 heads.
    #[test]
    fn slopes_are_those_of_the_paper() {
        let slopes = |heads: usize| -> Vec<f64> { (0..heads).map(|h| slope(h, heads)).collect() };
        assert_eq!(slopes(8)[..3], [0.5, 0.25, 0.125]);
        assert_eq!(slopes(12)[7..10], [1.0 / 256.0, 0.5f64.sqrt(), 0.125f64.sqrt()]);
    }
}
