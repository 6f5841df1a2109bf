//! Functions that select tokens from a row of logits: the largest, the k largest, and a random
//! draw. Used by the other files of this module.
//!
//! A vocabulary has up to a quarter of a million tokens, and every step samples one row per
//! sequence. Therefore a whole row is never sorted, unless the request's top-p needs all of it.

use std::cmp::Ordering;

use super::exp::exp_at_most_one;
use super::{SamplingError, SamplingParams};

/// Number of independent accumulators in a loop, so that the compiler can vectorize it.
const LANES: usize = 16;
/// Number of weights that are summed as one block. A draw first finds the block, then the token.
const BLOCK: usize = 1024;
/// Number of most likely tokens that top-p considers first. It is multiplied by 16 until the tokens
/// suffice.
const TOP_P_FIRST: usize = 256;

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
fn block_sum(block: &[f32], weight: &impl Fn(f32) -> f32) -> f64 {
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

/// Applies temperature, top-k, top-p and min-p, and draws a token from the rest by inverting the
/// cumulative distribution at `uniform`, which is in `[0, 1)`. `best` is the token with the largest
/// logit. All logits are below infinity.
pub(super) fn draw(logits: &[f32], best: u32, params: &SamplingParams, uniform: f64) -> u32 {
    if let Some(count) = params.top_k.filter(|&count| count < logits.len()) {
        return draw_of_largest(largest(logits, count), params, uniform).unwrap_or(best);
    }
    let weight = weight(logits[best as usize], params);
    if params.top_p >= 1.0 {
        // The best token has the weight 1, so min-p is a lower bound of the weight itself.
        let weight_kept = |logit: f32| {
            let weight = weight(logit);
            if weight >= params.min_p { weight } else { 0.0 }
        };
        return draw_of_row(logits, weight_kept, uniform).unwrap_or(best);
    }
    let candidates = nucleus_of_row(logits, params.top_p, weight);
    draw_of_candidates(candidates, params.min_p, uniform).unwrap_or(best)
}

/// As [`draw`], of the k largest logits that top-k keeps, as [`largest`] returns them. `None` if there
/// are none.
pub(super) fn draw_of_largest(
    largest: Vec<(f32, u32)>,
    params: &SamplingParams,
    uniform: f64,
) -> Option<u32> {
    let &(largest_logit, _) = largest.first()?;
    let mut candidates = weigh(largest, weight(largest_logit, params));
    if params.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
        let count = nucleus_len(&candidates, f64::from(params.top_p) * total);
        candidates.truncate(count.unwrap_or(candidates.len()));
    }
    draw_of_candidates(candidates, params.min_p, uniform)
}

/// The weights of logits relative to the largest one, so that nothing overflows at low temperatures.
/// The division never returns NaN: the difference is 0 for the largest logit and negative otherwise.
fn weight(largest_logit: f32, params: &SamplingParams) -> impl Fn(f32) -> f32 {
    let temperature = params.temperature;
    move |logit| exp_at_most_one((logit - largest_logit) / temperature)
}

/// Applies min-p to the most likely candidates, the first of which has the weight 1, and draws one of
/// the rest. `None` if all weights are 0.
fn draw_of_candidates(mut candidates: Vec<(f64, u32)>, min_p: f32, uniform: f64) -> Option<u32> {
    let min_p = f64::from(min_p);
    let likely = candidates.iter().take_while(|(weight, _)| *weight >= min_p).count();
    candidates.truncate(likely);
    let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
    let mut left = uniform * total;
    for &(weight, token) in &candidates {
        left -= weight;
        if left < 0.0 {
            return Some(token);
        }
    }
    // Rounding moved the draw past the end: return the last token with a weight above 0.
    candidates.iter().rev().find(|(weight, _)| *weight > 0.0).map(|&(_, token)| token)
}

/// Draws from the whole row without a list of candidates: finds the block by the blocks' sums, then
/// the token in the block. Returns `None` if all weights are 0.
fn draw_of_row(logits: &[f32], weight: impl Fn(f32) -> f32, uniform: f64) -> Option<u32> {
    let sums: Vec<f64> = logits.chunks(BLOCK).map(|block| block_sum(block, &weight)).collect();
    let mut left = uniform * sums.iter().sum::<f64>();
    let mut last_block = None;
    for (index, &sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        last_block = Some(index);
        if left < sum {
            break;
        }
        left -= sum;
    }
    let start = last_block? * BLOCK;
    let mut last = None;
    for (offset, &logit) in logits[start..].iter().take(BLOCK).enumerate() {
        let weight = f64::from(weight(logit));
        if weight > 0.0 {
            last = Some((start + offset) as u32);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

fn weigh(logits: Vec<(f32, u32)>, weight: impl Fn(f32) -> f32) -> Vec<(f64, u32)> {
    logits.into_iter().map(|(logit, token)| (f64::from(weight(logit)), token)).collect()
}

/// The smallest set of most likely tokens that has the share `top_p` of the row's total weight. It
/// considers more and more of the most likely tokens until they suffice; with a confident model a
/// few dozen do.
fn nucleus_of_row(logits: &[f32], top_p: f32, weight: impl Fn(f32) -> f32) -> Vec<(f64, u32)> {
    let needed = f64::from(top_p) * sum_by(logits, &weight);
    let mut considered = TOP_P_FIRST;
    loop {
        let mut candidates = weigh(largest(logits, considered), &weight);
        let count = nucleus_len(&candidates, needed);
        if count.is_some() || considered >= logits.len() {
            candidates.truncate(count.unwrap_or(candidates.len()));
            return candidates;
        }
        considered *= 16;
    }
}

/// How many of the sorted candidates have a total weight of at least `needed`; `None` if all of
/// them together have less.
fn nucleus_len(candidates: &[(f64, u32)], needed: f64) -> Option<usize> {
    let mut sum = 0.0;
    candidates
        .iter()
        .position(|(weight, _)| {
            sum += weight;
            sum >= needed
        })
        .map(|index| index + 1)
}
