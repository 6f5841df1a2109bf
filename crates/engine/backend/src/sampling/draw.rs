//! A random draw from a row of logits.

use super::exp::exp_at_most_one;
use super::select::{BLOCK, best, block_sum, largest, sum_by};
use super::{SamplingError, SamplingParams};

/// Which token is chosen of a row of logits: what [`SamplingParams`] say about it, and a random
/// number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// See [`SamplingParams::temperature`].
    pub temperature: f32,
    /// See [`SamplingParams::top_k`].
    pub top_k: Option<usize>,
    /// See [`SamplingParams::top_p`].
    pub top_p: f32,
    /// See [`SamplingParams::min_p`].
    pub min_p: f32,
    /// Uniform in `[0, 1)`. It chooses among the tokens that are kept by their cumulative
    /// probability, in order of decreasing probability if top-k or top-p has an effect, else in
    /// order of their ids.
    pub uniform: f64,
}

impl Draw {
    /// Number of most likely tokens among which top-p looks first. It is multiplied by 16 until the
    /// tokens suffice.
    pub const TOP_P_FIRST: usize = 256;

    /// The draw of the most likely token.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, uniform: 0.0 };

    pub(super) fn new(params: &SamplingParams, uniform: f64) -> Self {
        let &SamplingParams { temperature, top_k, top_p, min_p, .. } = params;
        Self { temperature, top_k, top_p, min_p, uniform }
    }

    /// The token that is chosen of `logits`, `[vocab_size]`. Among equally likely ones, greedy
    /// sampling and top-k prefer lower ids. A token whose logit is minus infinity is never chosen.
    ///
    /// # Errors
    /// [`SamplingError::BadLogit`], [`SamplingError::NoCandidate`].
    pub fn of(&self, logits: &[f32]) -> Result<u32, SamplingError> {
        Ok(self.of_valid(logits, best(logits)?))
    }

    /// As [`Draw::of`], of a row that was checked to be valid. `best` is the token with the largest
    /// logit.
    pub(super) fn of_valid(&self, logits: &[f32], best: u32) -> u32 {
        if self.temperature == 0.0 {
            return best;
        }
        let weight = weight(logits[best as usize], self.temperature);
        let drawn = if let Some(count) = self.top_k.filter(|&count| count < logits.len()) {
            let mut candidates = softmax_weights(largest(logits, count), weight);
            if self.top_p < 1.0 {
                let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
                let count = nucleus_len(&candidates, f64::from(self.top_p) * total);
                candidates.truncate(count.unwrap_or(candidates.len()));
            }
            self.of_candidates(candidates)
        } else if self.top_p < 1.0 {
            self.of_candidates(nucleus_of_row(logits, self.top_p, weight))
        } else {
            // The best token has the weight 1, so min-p is a lower bound of the weight itself.
            let weight_kept = |logit: f32| {
                let weight = weight(logit);
                if weight >= self.min_p { weight } else { 0.0 }
            };
            draw_of_row(logits, weight_kept, self.uniform)
        };
        drawn.unwrap_or(best)
    }

    /// Applies min-p to the most likely candidates, the first of which has the weight 1, and draws
    /// one of the rest. `None` if all weights are 0.
    fn of_candidates(&self, mut candidates: Vec<(f64, u32)>) -> Option<u32> {
        let min_p = f64::from(self.min_p);
        let likely = candidates.iter().take_while(|(weight, _)| *weight >= min_p).count();
        candidates.truncate(likely);
        let total: f64 = candidates.iter().map(|(weight, _)| weight).sum();
        let mut left = self.uniform * total;
        for &(weight, token) in &candidates {
            left -= weight;
            if left < 0.0 {
                return Some(token);
            }
        }
        // Rounding moved the draw past the end: return the last token with a weight above 0.
        candidates.iter().rev().find(|(weight, _)| *weight > 0.0).map(|&(_, token)| token)
    }
}

/// The weights of logits relative to the largest one, so that nothing overflows at low
/// temperatures. The division never returns NaN: the difference is 0 for the largest logit and
/// negative otherwise.
fn weight(largest_logit: f32, temperature: f32) -> impl Fn(f32) -> f32 {
    move |logit| exp_at_most_one((logit - largest_logit) / temperature)
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

/// Pairs each token with the softmax weight of its logit. The weights are not normalized.
fn softmax_weights(logits: Vec<(f32, u32)>, weight: impl Fn(f32) -> f32) -> Vec<(f64, u32)> {
    logits.into_iter().map(|(logit, token)| (f64::from(weight(logit)), token)).collect()
}

/// The smallest set of most likely tokens that has the share `top_p` of the row's total weight. It
/// considers more and more of the most likely tokens until they suffice; with a confident model a
/// few dozen do.
fn nucleus_of_row(logits: &[f32], top_p: f32, weight: impl Fn(f32) -> f32) -> Vec<(f64, u32)> {
    let needed = f64::from(top_p) * sum_by(logits, &weight);
    let mut considered = Draw::TOP_P_FIRST;
    loop {
        let mut candidates = softmax_weights(largest(logits, considered), &weight);
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
