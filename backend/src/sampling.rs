//! Sampling: what a request may ask for, and the state that turns rows of logits into tokens.
//!
//! [`SamplingParams`] is what a request says; [`SamplerState`] is one sequence's running state,
//! owned by whoever steps that sequence and moved along with the step plan. Nothing here is
//! shared, so nothing is locked.
//!
//! The transforms run in the order of vLLM's sampler, and of transformers' where that one speaks:
//!
//! 1. log-probabilities, where asked for, are taken of the **raw** logits: the model's own
//!    distribution, before any of the following;
//! 2. logit bias;
//! 3. repetition penalty (over prompt and output), then frequency and presence penalty (over the
//!    output alone);
//! 4. temperature 0 ends here: the largest logit wins, and of equal ones the lowest id;
//! 5. temperature;
//! 6. top-k, top-p, min-p, each on what the one before left, its probabilities summing to 1 again;
//! 7. one draw.
//!
//! The draw for the n-th output token depends on the seed and n alone. So a sequence that is
//! preempted and computed again, or that shares its batch with others, says the same text.

mod draw;
mod exp;
mod logprob;
mod penalties;
mod select;
#[cfg(test)]
mod tests;

pub use logprob::{TokenLogprob, prompt_logprob};

use logprob::RawRow;
use penalties::Penalties;

/// How a request's tokens are chosen. The default is greedy, with every transform off: an
/// embedding program gets the model's most likely text unless it asks for variety.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. Finite and at least 0.
    pub temperature: f32,
    /// Keep only so many of the most likely tokens; at least 1. `None` keeps all.
    pub top_k: Option<usize>,
    /// Keep the fewest most likely tokens whose probabilities sum to at least this; above 0, at
    /// most 1. 1 keeps all.
    pub top_p: f32,
    /// Keep the tokens at least this fraction as likely as the most likely one; 0 to 1. 0 keeps
    /// all.
    pub min_p: f32,
    /// Divides a positive logit, and multiplies a negative one, of each token seen in the prompt
    /// or the output; finite and above 0. 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token seen in the output; -2 to 2. 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time it is in the output; -2 to 2. 0 is off.
    pub frequency_penalty: f32,
    /// `(token id, bias)`: added to the token's logit; -100 to 100, which bans or forces it in
    /// practice. A token named twice gets the sum.
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same text. `None` draws a fresh one for each sequence.
    pub seed: Option<u64>,
    /// Log-probabilities wanted of each token: `Some(n)` for the token's own and the `n` most
    /// likely ones', `Some(0)` for the token's own alone. At most the vocabulary.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Checks every value against its range and every id against the vocabulary.
    ///
    /// # Errors
    /// [`SamplingError::InvalidParameter`] for the first value out of its range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        let finite_at_least_zero = |value: f32| value.is_finite() && value >= 0.0;
        check(
            finite_at_least_zero(self.temperature),
            "temperature",
            "a finite number, 0 (greedy) or above",
            self.temperature,
        )?;
        if let Some(top_k) = self.top_k {
            check(top_k >= 1, "top_k", "1 or above, or none to keep all", top_k)?;
        }
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "0 to 1", self.min_p)?;
        check(
            self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
            "repetition_penalty",
            "a finite number above 0 (1 is off)",
            self.repetition_penalty,
        )?;
        let penalty_range = -2.0..=2.0;
        check(
            penalty_range.contains(&self.presence_penalty),
            "presence_penalty",
            "-2 to 2",
            self.presence_penalty,
        )?;
        check(
            penalty_range.contains(&self.frequency_penalty),
            "frequency_penalty",
            "-2 to 2",
            self.frequency_penalty,
        )?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab_size {
                let expected = format!("token ids below the vocabulary's {vocab_size}");
                return Err(SamplingError::invalid("logit_bias", expected, token));
            }
            if !(-100.0..=100.0).contains(&bias) {
                let got = format!("{bias} for token {token}");
                return Err(SamplingError::invalid("logit_bias", "biases of -100 to 100", got));
            }
        }
        if let Some(count) = self.logprobs
            && count > vocab_size
        {
            let expected = format!("at most the vocabulary's {vocab_size}");
            return Err(SamplingError::invalid("logprobs", expected, count));
        }
        Ok(())
    }

    /// True when the most likely token is taken each time: no draw, no seed needed.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}

fn check(
    holds: bool,
    name: &'static str,
    expected: &str,
    got: impl ToString,
) -> Result<(), SamplingError> {
    if holds { Ok(()) } else { Err(SamplingError::invalid(name, expected, got)) }
}

/// Why a request cannot be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is out of its range; found before any work is done.
    #[error("invalid {name}: expected {expected}, got {got}")]
    InvalidParameter {
        /// The parameter, by its field name in [`SamplingParams`].
        name: &'static str,
        /// The values it may have.
        expected: String,
        /// The value it had.
        got: String,
    },
    /// The model gave a logit that is no number or is infinite upwards: broken weights, or an
    /// overflow in a kernel. The sequence cannot go on.
    #[error("expected a finite logit for token {token}, got {value}")]
    BadLogit {
        /// The first token whose logit is bad.
        token: u32,
        /// NaN or +infinity.
        value: f32,
    },
    /// No token is left to choose: every logit is minus infinity, or there are none.
    #[error("expected at least one possible token among {vocab_size} logits, got none")]
    NoCandidate {
        /// How many logits there were.
        vocab_size: usize,
    },
}

impl SamplingError {
    fn invalid(name: &'static str, expected: impl Into<String>, got: impl ToString) -> Self {
        Self::InvalidParameter { name, expected: expected.into(), got: got.to_string() }
    }
}

/// A token chosen from one row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token's id.
    pub token: u32,
    /// Its log-probability and the most likely tokens', when the request asked for them.
    pub logprob: Option<TokenLogprob>,
}

/// One sequence's sampling state. Life:
///
/// 1. made by [`SamplerState::new`] when the sequence is admitted;
/// 2. called once for each row of logits that gives an output token; it counts that token;
/// 3. kept over a preemption: the tokens computed again are not sampled again. A state that was
///    lost is made anew and told the output so far with [`SamplerState::observe`].
#[derive(Clone, Debug)]
pub struct SamplerState {
    params: SamplingParams,
    /// The request's seed, or the fresh one drawn for it.
    seed: u64,
    /// Output tokens so far, and so the number of the next draw.
    output_len: u64,
    /// What the penalties must know of prompt and output; `None` when all of them are off.
    penalties: Option<Penalties>,
}

impl SamplerState {
    /// A state for a sequence with this prompt. `params` have passed
    /// [`SamplingParams::validate`]; ids of the prompt that are no text (above the vocabulary) are
    /// let be.
    #[must_use]
    pub fn new(params: SamplingParams, prompt_tokens: &[u32]) -> Self {
        let seed = params.seed.unwrap_or_else(draw::fresh_seed);
        let penalties = Penalties::new(&params, prompt_tokens);
        Self { params, seed, output_len: 0, penalties }
    }

    /// The seed in use: the request's, or the one drawn for it.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The parameters in use.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Counts an output token that was not sampled here: forced, or sampled by a state since lost.
    pub fn observe(&mut self, token: u32) {
        self.output_len += 1;
        if let Some(penalties) = &mut self.penalties {
            penalties.observe(token);
        }
    }

    /// Chooses the next token from `logits`, `[vocab_size]`, and counts it as output. The logits
    /// are overwritten. Minus infinity marks a token that must not be chosen.
    ///
    /// # Errors
    /// [`SamplingError::BadLogit`] and [`SamplingError::NoCandidate`]; the state is unchanged then.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, SamplingError> {
        let raw_best = select::best(logits)?;
        let raw_row = self.params.logprobs.map(|top| RawRow::new(logits, raw_best, top));
        let mut best = raw_best;
        let mut raw_logits = None;
        if self.transforms() {
            raw_logits = raw_row.is_some().then(|| logits.to_vec());
            self.transform(logits);
            best = select::best(logits)?;
        }
        let token = if self.params.is_greedy() {
            best
        } else {
            let uniform = draw::uniform(self.seed, self.output_len);
            select::draw(logits, best, &self.params, uniform)
        };
        let logprob = raw_row.map(|row| row.of(token, raw_logits.as_deref().unwrap_or(logits)));
        self.observe(token);
        Ok(Sampled { token, logprob })
    }

    /// True when bias or penalties may change a logit.
    fn transforms(&self) -> bool {
        !self.params.logit_bias.is_empty() || self.penalties.is_some()
    }

    fn transform(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if let Some(penalties) = &self.penalties {
            penalties.apply(logits);
        }
    }
}
