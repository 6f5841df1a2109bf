//! The token counts of a sequence that the penalties need. Owned by
//! [`SamplerState`](super::SamplerState), and created only if a penalty is on.

use std::collections::HashMap;
use std::sync::Arc;

use super::{SamplingParams, saturate};

/// The penalties and the tokens that they apply to. The time to apply them is proportional to the
/// number of these tokens, not to the vocabulary size.
#[derive(Clone, Debug)]
pub(super) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// The tokens of the prompt in ascending order, without duplicates. Empty without a repetition
    /// penalty. Shared by the answers to one prompt.
    prompt: Arc<[u32]>,
    /// Number of occurrences of each token in the output.
    output_counts: HashMap<u32, u32>,
}

impl Penalties {
    /// Returns `None` if every penalty is off.
    pub(super) fn new(params: &SamplingParams, prompt_tokens: &[u32]) -> Option<Self> {
        let repeats = params.repetition_penalty != 1.0;
        if !repeats && params.presence_penalty == 0.0 && params.frequency_penalty == 0.0 {
            return None;
        }
        let mut prompt = if repeats { prompt_tokens.to_vec() } else { Vec::new() };
        prompt.sort_unstable();
        prompt.dedup();
        Some(Self {
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            prompt: prompt.into(),
            output_counts: HashMap::new(),
        })
    }

    /// Counts an output token.
    pub(super) fn observe(&mut self, token: u32) {
        *self.output_counts.entry(token).or_insert(0) += 1;
    }

    /// Applies the penalties to `logits`, `[vocab_size]`. Token ids outside of the vocabulary are
    /// skipped.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        for &token in self.prompt.iter() {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = self.repeated(*logit);
        }
        for (&token, &count) in &self.output_counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if self.prompt.binary_search(&token).is_err() {
                *logit = self.repeated(*logit);
            }
            *logit = saturate(*logit, *logit - (self.frequency * count as f32 + self.presence));
        }
    }

    /// Applies the repetition penalty to a logit.
    fn repeated(&self, logit: f32) -> f32 {
        let after = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        saturate(logit, after)
    }
}
