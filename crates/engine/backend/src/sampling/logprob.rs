//! Log-probabilities (natural logarithms) of the model's own distribution, that is, of the logits
//! before bias, penalties and temperature. vLLM calls them raw log-probabilities.

use super::exp::exp_at_most_one;
use super::{SamplingError, select};

/// The log-probabilities of one token and of the most likely tokens at its position.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TokenLogprob {
    /// The sampled token, or a token of the prompt.
    pub token_id: u32,
    /// Natural logarithm of the token's probability: at most 0, and minus infinity if the
    /// probability is 0.
    pub logprob: f32,
    /// The token's place among all tokens in order of decreasing probability: 1 for the most likely
    /// one. Equally likely tokens have the same rank.
    pub rank: u32,
    /// `(token id, log-probability)` of the most likely tokens in order of decreasing probability,
    /// and of increasing id for equal ones. Contains the requested number of tokens, or fewer if
    /// fewer have a probability above 0. The token itself is included only if it is one of them.
    /// If the request names tokens ([`SamplingParams::logprob_ids`](super::SamplingParams)), these
    /// are listed instead, whatever their probability.
    pub top: Vec<(u32, f32)>,
}

/// The log-probability of a prompt token. `logits`, `[vocab_size]`, is the row of the previous
/// position, and `top` is the number of most likely tokens to return.
///
/// # Errors
/// [`SamplingError::BadLogit`], [`SamplingError::NoCandidate`].
pub fn prompt_logprob(
    logits: &[f32],
    token: u32,
    top: usize,
) -> Result<TokenLogprob, SamplingError> {
    let best = select::best(logits)?;
    Ok(RawRow::new(logits, best, top, &[]).of(token, logits))
}

/// The part of a row of raw logits that is needed after sampling has overwritten the row.
#[derive(Debug)]
pub(super) struct RawRow {
    /// Natural logarithm of the sum of the exponentials of all logits.
    log_sum: f64,
    /// As [`TokenLogprob::top`].
    top: Vec<(u32, f32)>,
}

impl RawRow {
    /// `best` is the token with the largest logit, and `top` the number of most likely tokens. If
    /// there are `ids`, these tokens are listed instead.
    pub(super) fn new(logits: &[f32], best: u32, top: usize, ids: &[u32]) -> Self {
        let largest = logits[best as usize];
        let sum = select::sum_by(logits, |logit| exp_at_most_one(logit - largest));
        let log_sum = f64::from(largest) + sum.ln();
        let listed = match ids {
            [] => select::largest(logits, top),
            ids => named(logits, ids),
        };
        let top = listed
            .into_iter()
            .map(|(logit, token)| (token, log_probability(logit, log_sum)))
            .collect();
        Self { log_sum, top }
    }

    /// The log-probability of `token`. `logits` are the raw logits that `self` was created from.
    pub(super) fn of(self, token: u32, logits: &[f32]) -> TokenLogprob {
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        TokenLogprob {
            token_id: token,
            logprob: log_probability(logit, self.log_sum),
            rank: 1 + logits.iter().map(|&other| u32::from(other > logit)).sum::<u32>(),
            top: self.top,
        }
    }
}

/// The logits of the tokens with these ids, in order of decreasing logit and of increasing id.
fn named(logits: &[f32], ids: &[u32]) -> Vec<(f32, u32)> {
    let logit = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let mut listed: Vec<(f32, u32)> = ids.iter().map(|&id| (logit(id), id)).collect();
    listed.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    listed.dedup_by_key(|&mut (_, id)| id);
    listed
}

fn log_probability(logit: f32, log_sum: f64) -> f32 {
    // Rounding may move the value slightly above 0 if the probability is close to 1.
    (f64::from(logit) - log_sum).min(0.0) as f32
}
