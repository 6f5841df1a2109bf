//! Passes over a row of logits: the best, the k best, a draw. Plain functions on slices, for the
//! files of sampling only.
//!
//! A vocabulary has up to a quarter of a million tokens, and a batch samples one row a sequence.
//! So nothing here sorts a whole row unless the request's top-p truly needs it.

use std::cmp::Ordering;

use super::exp::exp_at_most_one;
use super::{SamplingError, SamplingParams};

/// Elements that are compared or summed side by side; the compiler makes vectors of them.
const LANES: usize = 16;
/// Elements a block of weights has: a draw finds its block by the blocks' sums, then the token.
const BLOCK: usize = 1024;
/// How many of the likeliest tokens top-p looks at first; it goes on with 16 times as many.
const TOP_P_FIRST: usize = 256;

/// The token with the largest logit; of equal ones the lowest id.
pub(super) fn best(logits: &[f32]) -> Result<u32, SamplingError> {
    let largest = max(logits);
    // NaN compares false, so one test finds both kinds of bad logits.
    if !all(logits, |logit| logit < f32::INFINITY) {
        let (token, &value) = logits
            .iter()
            .enumerate()
            .find(|(_, logit)| logit.is_nan() || **logit == f32::INFINITY)
            .expect("one was just seen");
        return Err(SamplingError::BadLogit { token: token as u32, value });
    }
    if largest == f32::NEG_INFINITY {
        return Err(SamplingError::NoCandidate { vocab_size: logits.len() });
    }
    let token = logits.iter().position(|&logit| logit == largest).expect("it is one of them");
    Ok(token as u32)
}

/// The largest of some numbers, NaN aside; minus infinity of none.
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

/// True if all values hold; looks at all of them, so that it is a vector loop.
fn all(values: &[f32], holds: impl Fn(f32) -> bool) -> bool {
    values.iter().fold(true, |so_far, &value| so_far & holds(value))
}

/// The sum of a weight over the row, in an order fixed by the row's length.
pub(super) fn sum_by(logits: &[f32], weight: impl Fn(f32) -> f32) -> f64 {
    logits.chunks(BLOCK).map(|block| block_sum(block, &weight)).sum()
}

/// At most [`BLOCK`] weights of at most 1 each: single precision holds their sum.
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

/// Likeliest first, of equal ones the lowest id first.
fn likelier(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // No logit is NaN here, so any two compare.
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}

/// The `count` largest logits with their tokens, largest first, of equal ones the lowest id
/// first; minus infinity is left out. One pass, in memory of the order of `count`.
pub(super) fn largest(logits: &[f32], count: usize) -> Vec<(f32, u32)> {
    if count == 0 {
        return Vec::new();
    }
    let full = count.saturating_mul(2).saturating_add(LANES);
    let mut kept: Vec<(f32, u32)> = Vec::with_capacity(full.min(logits.len()));
    // What a logit must exceed to be among them. A later equal one has a higher id, so it loses.
    let mut bar = f32::NEG_INFINITY;
    for (index, chunk) in logits.chunks(LANES).enumerate() {
        if all(chunk, |logit| logit <= bar) {
            continue;
        }
        for (lane, &logit) in chunk.iter().enumerate() {
            if logit > bar {
                kept.push((logit, (index * LANES + lane) as u32));
            }
        }
        if kept.len() >= full - LANES {
            kept.select_nth_unstable_by(count - 1, likelier);
            kept.truncate(count);
            bar = kept[count - 1].0;
        }
    }
    kept.sort_unstable_by(likelier);
    kept.truncate(count);
    kept
}

/// Draws a token: temperature, top-k, top-p, min-p, and the place in what they leave where
/// `uniform`, in `[0, 1)`, points. `best` is the largest logit's token; all logits are below
/// infinity.
pub(super) fn draw(logits: &[f32], best: u32, params: &SamplingParams, uniform: f64) -> u32 {
    let largest_logit = logits[best as usize];
    // Relative to the best, so that nothing overflows however low the temperature. The division
    // cannot give NaN: the best itself is 0 / temperature, the others are below 0.
    let weight = |logit: f32| exp_at_most_one((logit - largest_logit) / params.temperature);
    let top_k = params.top_k.filter(|&count| count < logits.len());
    if top_k.is_none() && params.top_p >= 1.0 {
        // The best weighs 1, so min-p is a bar on the weight itself.
        let weight_kept = |logit: f32| {
            let weight = weight(logit);
            if weight >= params.min_p { weight } else { 0.0 }
        };
        return draw_of_row(logits, weight_kept, uniform).unwrap_or(best);
    }
    let mut candidates = match top_k {
        Some(count) => weigh(largest(logits, count), weight),
        None => nucleus_of_row(logits, params.top_p, weight),
    };
    if top_k.is_some() && params.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
        let count = nucleus_len(&candidates, f64::from(params.top_p) * total);
        candidates.truncate(count.unwrap_or(candidates.len()));
    }
    let min_p = f64::from(params.min_p);
    let likely = candidates.iter().take_while(|(weight, _)| *weight >= min_p).count();
    candidates.truncate(likely);
    let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
    let mut left = uniform * total;
    for &(weight, token) in &candidates {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Rounding let the draw run past the end: the last one that can be drawn at all.
    candidates.iter().rev().find(|(weight, _)| *weight > 0.0).map_or(best, |&(_, token)| token)
}

/// Draws over the whole row without making a list of it: finds the block by sums, then the token.
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

/// The fewest likeliest tokens of the row that hold the share `top_p` of its weight. Looks at ever
/// more of the likeliest until they do: a model that is sure of itself needs a few dozen.
fn nucleus_of_row(logits: &[f32], top_p: f32, weight: impl Fn(f32) -> f32) -> Vec<(f64, u32)> {
    let needed = f64::from(top_p) * sum_by(logits, &weight);
    let mut looked_at = TOP_P_FIRST;
    loop {
        let mut candidates = weigh(largest(logits, looked_at), &weight);
        let count = nucleus_len(&candidates, needed);
        if count.is_some() || looked_at >= logits.len() {
            candidates.truncate(count.unwrap_or(candidates.len()));
            return candidates;
        }
        looked_at *= 16;
    }
}

/// How many of the sorted candidates it takes to weigh `needed`; `None` if all of them do not.
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
