//! Sampling: the parameters of a request, and the state that turns rows of logits into tokens.
//!
//! [`SamplingParams`] holds a request's parameters. [`SamplerState`] is the state of one sequence.
//! It moves with the sequence from one step plan to the next and is never shared, so it needs no
//! lock.
//!
//! A row of logits is processed in the order of vLLM's sampler, which agrees with transformers
//! where both implement a step:
//!
//! 1. If the request wants log-probabilities, they are taken from the **raw** logits, that is, from
//!    the model's own distribution before any of the following steps.
//! 2. The request's [`LogitsProcessor`] changes them, and logit bias is added.
//! 3. The repetition penalty (over prompt and output) is applied, then the frequency and presence
//!    penalties (over the output only).
//! 4. At temperature 0 the token with the largest logit is returned; among equal logits, the lowest
//!    id.
//! 5. The logits are divided by the temperature.
//! 6. Top-k, top-p and min-p are applied in this order, each to the tokens that the previous one
//!    kept, with their probabilities normalized to a sum of 1.
//! 7. One token is drawn.
//!
//! The random number for the n-th output token depends only on the seed and on n. Therefore a
//! sequence generates the same text when it is preempted and recomputed, or batched with others.

mod draw;
mod exp;
mod logprob;
mod penalties;
mod processor;
mod random;
mod regions;
mod select;
#[cfg(test)]
mod tests;

pub use draw::Draw;
pub use logprob::{TokenLogprob, prompt_logprob};
pub use processor::{LogitsProcessor, SharedProcessor};

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::regions::RegionBins;
use logprob::RawRow;
use penalties::Penalties;

/// How a request's tokens are chosen. The default is greedy, with every transform off.
///
/// In JSON, parameters may be left out. The processor is not part of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// The logits are divided by it. 0 selects greedy sampling. Finite and at least 0.
    pub temperature: f32,
    /// Keeps only this number of the most likely tokens; at least 1. `None` keeps all.
    pub top_k: Option<usize>,
    /// Keeps the smallest set of most likely tokens whose probabilities sum to at least this value;
    /// above 0 and at most 1. 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens whose probability is at least this fraction of the most likely token's
    /// probability; 0 to 1. 0 keeps all.
    pub min_p: f32,
    /// For each token that occurs in the prompt or the output, a positive logit is divided by it
    /// and a negative logit is multiplied by it; 0.01 to 100. 1 has no effect.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token that occurs in the output; -2 to 2. 0 has no effect.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each of its occurrences in the output; -2 to 2. 0
    /// has no effect.
    pub frequency_penalty: f32,
    /// `(token id, bias)` pairs. The bias, -100 to 100, is added to the token's logit. The extremes
    /// exclude or force a token in practice. Each token at most once. The sequences of a request
    /// share the list.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// The same seed leads to the same text. With `None`, each sequence gets a random seed.
    pub seed: Option<u64>,
    /// Which log-probabilities to return per token: with `Some(n)` those of the sampled token and
    /// of the `n` most likely tokens, with `None` none. At most the vocabulary size and
    /// [`SamplingParams::MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// With [`SamplingParams::logprobs`], the tokens whose log-probabilities are returned instead of
    /// those of the most likely ones. At most [`SamplingParams::MAX_LOGPROBS`] ids below the
    /// vocabulary size; empty for the most likely ones.
    pub logprob_ids: Arc<[u32]>,
    /// The caller's own change of the logits. `None` leaves them as they are.
    #[serde(skip)]
    pub processor: Option<SharedProcessor>,
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
            logit_bias: Arc::default(),
            seed: None,
            logprobs: None,
            logprob_ids: Arc::default(),
            processor: None,
        }
    }
}

impl SamplingParams {
    /// Maximum value of [`SamplingParams::logprobs`].
    pub const MAX_LOGPROBS: usize = 1024;

    /// Checks every value against its range and every id against the vocabulary.
    ///
    /// # Errors
    /// [`SamplingError::InvalidParameter`] for the first value that is out of range.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        let finite_at_least_zero = |value: f32| value.is_finite() && value >= 0.0;
        check(
            finite_at_least_zero(self.temperature),
            "temperature",
            "a finite number of at least 0 (0 is greedy)",
            self.temperature,
        )?;
        if let Some(top_k) = self.top_k {
            check(top_k >= 1, "top_k", "at least 1, or none to keep all tokens", top_k)?;
        }
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "0 to 1", self.min_p)?;
        check(
            (0.01..=100.0).contains(&self.repetition_penalty),
            "repetition_penalty",
            "0.01 to 100 (1 has no effect)",
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
        self.validate_bias(vocab_size)?;
        if let Some(count) = self.logprobs {
            let limit = vocab_size.min(SamplingParams::MAX_LOGPROBS);
            check(count <= limit, "logprobs", &format!("at most {limit}"), count)?;
        }
        let (count, limit) = (self.logprob_ids.len(), SamplingParams::MAX_LOGPROBS);
        check(count <= limit, "logprob_ids", &format!("at most {limit} token ids"), count)?;
        if let Some(id) = self.logprob_ids.iter().find(|&&id| id as usize >= vocab_size) {
            let expected = format!("token ids below the vocabulary size {vocab_size}");
            return Err(SamplingError::invalid("logprob_ids", expected, id));
        }
        Ok(())
    }

    fn validate_bias(&self, vocab_size: usize) -> Result<(), SamplingError> {
        let count = self.logit_bias.len();
        if count > vocab_size {
            let expected = format!("at most {vocab_size} entries, one per token");
            return Err(SamplingError::invalid("logit_bias", expected, count));
        }
        for &(token, bias) in self.logit_bias.iter() {
            if token as usize >= vocab_size {
                let expected = format!("token ids below the vocabulary size {vocab_size}");
                return Err(SamplingError::invalid("logit_bias", expected, token));
            }
            if !(-100.0..=100.0).contains(&bias) {
                let got = format!("{bias} for token {token}");
                return Err(SamplingError::invalid("logit_bias", "biases of -100 to 100", got));
            }
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                let got = format!("token {} more than once", pair[0]);
                Err(SamplingError::invalid("logit_bias", "each token at most once", got))
            }
            None => Ok(()),
        }
    }

    /// Whether the most likely token is always chosen, so that no random numbers are used.
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

/// Why a request's parameters were refused or its next token could not be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter is out of range. Detected before any work is done for the request.
    #[error("invalid {name}: expected {expected}, got {got}")]
    InvalidParameter {
        /// The parameter's field name in [`SamplingParams`].
        name: &'static str,
        /// The accepted values.
        expected: String,
        /// The refused value.
        got: String,
    },
    /// A logit is NaN or +infinity, because of broken weights or an overflow in a kernel. The
    /// sequence cannot continue.
    #[error("expected a finite logit for token {token}, got {value}")]
    BadLogit {
        /// The first token with such a logit.
        token: u32,
        /// The logit: NaN or +infinity.
        value: f32,
    },
    /// The request's [`LogitsProcessor`] cannot continue.
    #[error("{reason}")]
    ProcessorFailed {
        /// What was expected and what was found.
        reason: String,
    },
    /// The machine was too busy for the request's [`LogitsProcessor`]. It is not the fault of the
    /// request, which may succeed when it is sent again.
    #[error("{reason}")]
    ProcessorBusy {
        /// What could not be done.
        reason: String,
    },
    /// The request's [`LogitsProcessor`] panicked.
    #[error("the logits processor panicked: {reason}")]
    ProcessorPanicked {
        /// The panic's message.
        reason: String,
    },
    /// No token can be chosen, because every logit is minus infinity or the row is empty.
    #[error("expected a finite logit among {vocab_size} logits, got none")]
    NoCandidate {
        /// Length of the row of logits.
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
    /// The token's id, below the vocabulary size.
    pub token: u32,
    /// Log-probabilities of this token and of the most likely tokens; `None` unless the request
    /// sets [`SamplingParams::logprobs`].
    pub logprob: Option<TokenLogprob>,
}

/// The sampling state of one sequence. Its lifecycle:
///
/// 1. [`SamplerState::new`] creates it when the sequence is admitted.
/// 2. [`SamplerState::sample`] is called once per output token and counts that token.
/// 3. It is kept when the sequence is preempted, because recomputed tokens are not sampled again.
///    If it is lost, a new state continues in the same way after [`SamplerState::observe`] was
///    called with every output token so far.
#[derive(Clone, Debug)]
pub struct SamplerState {
    params: SamplingParams,
    /// The request's seed, or a random one if the request has none.
    seed: u64,
    /// Number of output tokens so far, which is also the index of the next random number.
    output_len: u64,
    /// The output tokens so far; empty if the request has no processor.
    output: Vec<u32>,
    /// Token counts for the penalties; `None` if all penalties are off.
    penalties: Option<Penalties>,
    /// The bins whose logits are at the end of each row; `None` if rows are over the vocabulary only.
    bins: Option<RegionBins>,
}

impl SamplerState {
    /// Creates the state of a sequence with the given prompt. `params` must have passed
    /// [`SamplingParams::validate`]. Token ids of the prompt outside of the vocabulary, such as
    /// placeholders of images, are ignored.
    #[must_use]
    pub fn new(params: SamplingParams, prompt_tokens: &[u32]) -> Self {
        let seed = params.seed.unwrap_or_else(random::fresh_seed);
        let penalties = Penalties::new(&params, prompt_tokens);
        Self { params, seed, output_len: 0, output: Vec::new(), penalties, bins: None }
    }

    /// The state of a sequence whose rows are for [`LogitRows::Regions`](crate::LogitRows::Regions),
    /// so that the request's processor may replace a token by a coordinate or a size.
    #[must_use]
    pub fn with_regions(self, bins: RegionBins) -> Self {
        Self { bins: Some(bins), ..self }
    }

    /// The state of the `index`-th of several answers to the same prompt. If the request has a
    /// seed, it uses that seed plus `index`, and a random one otherwise. Must be called before
    /// anything was sampled. All lists are shared, and so is the processor unless it has one for
    /// each sequence.
    #[must_use]
    pub fn choice(&self, index: u64) -> Self {
        let seed = self.params.seed.map(|seed| seed.wrapping_add(index));
        let mut choice = Self { seed: seed.unwrap_or_else(random::fresh_seed), ..self.clone() };
        if let Some(own) = choice.params.processor.as_ref().and_then(|shared| shared.for_sequence())
        {
            choice.params.processor = Some(own);
        }
        choice
    }

    /// A state that guesses the next tokens from the logits of a smaller model. It has the random
    /// numbers and the penalties of this one, so that equal logits give equal tokens at any
    /// temperature, but no processor and no log-probabilities.
    #[must_use]
    pub fn for_draft(&self) -> Self {
        let params = SamplingParams { processor: None, logprobs: None, ..self.params.clone() };
        Self { params, output: Vec::new(), bins: None, penalties: self.penalties.clone(), ..*self }
    }

    /// The seed in use: the request's, or a random one if the request has none.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The parameters in use.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Counts an output token that this state did not sample, because it was forced or because it
    /// was sampled by an earlier state that is lost.
    pub fn observe(&mut self, token: u32) {
        self.output_len += 1;
        if let Some(processor) = &self.params.processor {
            self.output.push(token);
            processor.prepare_caught(&self.output);
        }
        if let Some(penalties) = &mut self.penalties {
            penalties.observe(token);
        }
    }

    /// Chooses the next token from `logits`, a row of the backend, and counts it as output. The
    /// logits are overwritten. A token whose logit is minus infinity is never chosen.
    ///
    /// # Errors
    /// [`SamplingError::BadLogit`], [`SamplingError::NoCandidate`], and those of the processor.
    /// After an error the state is unchanged.
    ///
    /// # Panics
    /// If the row is shorter than the logits of the bins.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<Sampled, SamplingError> {
        let sampled = match self.bins {
            Some(bins) => self.choose_region(logits, bins)?,
            None => self.choose(logits)?,
        };
        self.observe(sampled.token);
        Ok(sampled)
    }

    /// Chooses the next token as [`SamplerState::sample`] does, without counting it.
    fn choose(&self, logits: &mut [f32]) -> Result<Sampled, SamplingError> {
        let raw_best = select::best(logits)?;
        let raw_row = self
            .params
            .logprobs
            .map(|top| RawRow::new(logits, raw_best, top, &self.params.logprob_ids));
        let mut best = raw_best;
        let mut raw_logits = None;
        if self.transforms() {
            raw_logits = raw_row.is_some().then(|| logits.to_vec());
            self.transform(logits)?;
            best = select::best(logits)?;
        }
        let token = self.draw().of_valid(logits, best);
        let logprob = raw_row.map(|row| row.of(token, raw_logits.as_deref().unwrap_or(logits)));
        Ok(Sampled { token, logprob })
    }

    /// The draw that chooses the next token, if nothing but the row of logits is needed for it and
    /// nothing but the token is returned; `None` if [`SamplerState::sample`] has to see the row.
    /// Whoever draws the token passes it to [`SamplerState::observe`].
    #[must_use]
    pub fn next_draw(&self) -> Option<Draw> {
        (self.params.logprobs.is_none() && !self.transforms()).then(|| self.draw())
    }

    fn draw(&self) -> Draw {
        if self.params.is_greedy() {
            return Draw::GREEDY;
        }
        Draw::new(&self.params, random::uniform(self.seed, self.output_len))
    }

    /// Whether the next token can be chosen without a delay: the request has no
    /// [`LogitsProcessor`], or it is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.params
            .processor
            .as_ref()
            .is_none_or(|processor| processor.is_ready_caught(&self.output))
    }

    /// Tokens that the request's processor knows to follow; empty if it has none.
    #[must_use]
    pub fn forced(&self) -> Vec<u32> {
        let processor = self.params.processor.as_ref();
        processor.map_or_else(Vec::new, |processor| processor.forced_caught(&self.output))
    }

    /// Tells the request's processor that the next step samples the token after each of `proposals`,
    /// too, as far as they are right.
    pub fn prepare_ahead(&self, proposals: &[u32]) {
        if let Some(processor) = &self.params.processor {
            processor.prepare_ahead_caught(&self.output, proposals);
        }
    }

    /// Whether a processor, bias or penalties may change a logit.
    fn transforms(&self) -> bool {
        let params = &self.params;
        params.processor.is_some() || !params.logit_bias.is_empty() || self.penalties.is_some()
    }

    fn transform(&self, logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(processor) = &self.params.processor {
            processor.process_caught(&self.output, logits)?;
            // The transforms below expect logits that a model may compute.
            select::best(logits)?;
        }
        for &(token, bias) in self.params.logit_bias.iter() {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = saturate(*logit, *logit + bias);
            }
        }
        if let Some(penalties) = &self.penalties {
            penalties.apply(logits);
        }
        Ok(())
    }
}

/// The result of a transform of a finite logit, limited to finite values. A logit of minus infinity
/// is not changed.
fn saturate(before: f32, after: f32) -> f32 {
    if before == f32::NEG_INFINITY { before } else { after.clamp(f32::MIN, f32::MAX) }
}
