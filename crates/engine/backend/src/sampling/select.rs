//! The largest logits of a row, and sums over all of them. Used by the other files of this module.
//!
//! A vocabulary has up to a quarter of a million tokens, and every step samples one row per
//! sequence. Therefore a whole row is never sorted, unless the request's top-p needs all of it.

use std::cmp::Ordering;

use super::SamplingError;

/// Number of independent accumulators in a loop, so that the compiler can vectorize it.
const LANES: usize = 16;
/// Number of weights that are summed as one block.
pub(super) const BLOCK: usize = 1024;

/// The token with the largest logit; among equal logits, the one with the lowest id.
pub(super) fn best(logits: &[f32]) -> Result<u32, SamplingError> {
    let largest = max(logits);
    // A comparison with NaN is false, so this one test finds both NaN and infinity.
    if !all(logits, |logit| logit < f32::INFINITY) {
        let (token, &value) = logits
            .iter()
            .enumerate()
            .find(|(_, logit)| logit.is_nan() || **logit == f32::INFINITY)
            .expect("the test above found such a logit");
        return Err(SamplingError::BadLogit { token: token as u32, value });
    }
    if largest == f32::NEG_INFINITY {
        return Err(SamplingError::NoCandidate { vocab_size: logits.len() });
    }
    let token = logits
        .iter()
        .position(|&logit| logit == largest)
        .expect("the maximum is an element of the row");
    Ok(token as u32)
}

/// The largest value, ignoring NaN; minus infinity for an empty slice.
fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// Whether `predicate` is true for all values. It does not stop early, so that the compiler can
/// vectorize the loop.
fn all(values: &[f32], predicate: impl Fn(f32) -> bool) -> bool {
    values.iter().fold(true, |so_far, &value| so_far & predicate(value))
}

/// The sum of the weights of all logits. The order of the additions depends only on the length.
pub(super) fn sum_by(logits: &[f32], weight: impl Fn(f32) -> f32) -> f64 {
    logits.chunks(BLOCK).map(|block| block_sum(block, &weight)).sum()
}

/// The sum of at most [`BLOCK`] weights. The weights are at most 1, so sums per lane in single
/// precision are accurate enough.
pub(super) fn block_sum(block: &[f32], weight: &impl Fn(f32) -> f32) -> f64 {
    let (chunks, rest) = block.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += weight(chunk[lane]);
        }
    }
    let whole: f64 = lanes.iter().map(|&lane| f64::from(lane)).sum();
    whole + rest.iter().map(|&logit| f64::from(weight(logit))).sum::<f64>()
}

/// Orders by decreasing logit, and by increasing id for equal logits.
fn by_likelihood(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // `best` has checked that no logit is NaN, so `partial_cmp` never returns `None`.
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}

/// The `count` largest logits with their tokens, in order of decreasing logit, and of increasing id
/// for equal logits. Logits of minus infinity are omitted. Takes one pass over the row and memory
/// proportional to `count`.
pub(super) fn largest(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
    if count == 0 {
        return Vec::new();
    }
    let capacity = count.saturating_mul(2).saturating_add(LANES);
    let mut kept: Vec<(f32, u32)> = Vec::with_capacity(capacity.min(logits.len()));
    // A logit must exceed this value to be kept. An equal one that comes later has a higher id and
    // is therefore not among the `count` first.
    let mut threshold = f32::NEG_INFINITY;
    for (index, chunk) in logits.chunks(LANES).enumerate() {
        if all(chunk, |logit| logit <= threshold) {
            continue;
        }
        for (lane, &logit) in chunk.iter().enumerate() {
            if logit > threshold {
                kept.push((logit, (index * LANES + lane) as u32));
            }
        }
        if kept.len() >= capacity - LANES {
            kept.select_nth_unstable_by(count - 1, by_likelihood);
            kept.truncate(count);
            threshold = kept[count - 1].0;
        }
    }
    kept.sort_unstable_by(by_likelihood);
    kept.truncate(count);
    kept
}
