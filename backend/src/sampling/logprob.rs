//! Log-probabilities of the model's own distribution: the logits before bias, penalties and
//! temperature (what vLLM calls raw). Natural logarithms.

use super::exp::exp_at_most_one;
use super::{SamplingError, select};

/// A token's log-probability, and the likeliest tokens' beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token sampled, or the prompt's.
    pub token_id: u32,
    /// Natural logarithm of its probability: at most 0; minus infinity for an impossible token.
    pub logprob: f32,
    /// `(token id, log-probability)` of the most likely tokens, likeliest first, of equal ones
    /// the lowest id first. As many as asked for, or fewer when fewer are possible at all. The
    /// token itself is among them only if it is so likely.
    pub top: Vec<(u32, f32)>,
}

/// The log-probability of a prompt's token, from `logits`, `[vocab_size]`, the row of the position
/// before it. `top` is how many of the likeliest tokens to tell.
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

/// What is kept of a row of raw logits until the token is known.
#[derive(Debug)]
pub(super) struct RawRow {
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
    top: Vec<(u32, f32)>,
}

impl RawRow {
    /// `best` is the largest logit's token.
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

    /// The log-probability of `token`; `logits` are the raw ones this was made of.
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
    // Rounding may leave a certain token a hair above 0.
    (f64::from(logit) - log_sum).min(0.0) as f32
}
