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
    /// `(token id, log-probability)` of the most likely tokens in order of decreasing probability,
    /// and of increasing id for equal ones. Contains the requested number of tokens, or fewer if
    /// fewer have a probability above 0. The token itself is included only if it is one of them.
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
    Ok(RawRow::new(logits, best, top).of(token, logits))
}

/// What is needed of a row of raw logits after sampling has overwritten it.
#[derive(Debug)]
pub(super) struct RawRow {
    /// Natural logarithm of the sum of the exponentials of all logits.
    log_sum: f64,
    /// As [`TokenLogprob::top`].
    top: Vec<(u32, f32)>,
}

impl RawRow {
    /// `best` is the token with the largest logit, and `top` the number of most likely tokens.
    pub(super) fn new(logits: &[f32], best: u32, top: usize) -> Self {
        let largest = logits[best as usize];
        let sum = select::sum_by(logits, |logit| exp_at_most_one(logit - largest));
        let log_sum = f64::from(largest) + sum.ln();
        let top = select::largest(logits, top)
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
            top: self.top,
        }
    }
}

fn log_probability(logit: f32, log_sum: f64) -> f32 {
    // Rounding may move the value slightly above 0 if the probability is close to 1.
    (f64::from(logit) - log_sum).min(0.0) as f32
}
