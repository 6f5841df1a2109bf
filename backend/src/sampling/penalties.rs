//! Which tokens a sequence has seen, for the penalties. Owned by
//! [`SamplerState`](super::SamplerState); exists only while a penalty is on, so that a sequence
//! without penalties keeps no map.

use std::collections::HashMap;

use super::SamplingParams;

/// The tokens that penalties touch; applying costs time in their number, not the vocabulary's.
#[derive(Clone, Debug)]
pub(super) struct Penalties {
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// How often each token is in the output; 0 for one that is in the prompt only. Prompt tokens
    /// are in here only when there is a repetition penalty.
    output_counts: HashMap<u32, u32>,
}

impl Penalties {
    /// `None` when every penalty is off.
    pub(super) fn new(params: &SamplingParams, prompt_tokens: &[u32]) -> Option<Self> {
        let repeats = params.repetition_penalty != 1.0;
        if !repeats && params.presence_penalty == 0.0 && params.frequency_penalty == 0.0 {
            return None;
        }
        let seen = if repeats { prompt_tokens } else { &[] };
        Some(Self {
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            output_counts: seen.iter().map(|&token| (token, 0)).collect(),
        })
    }

    /// Counts an output token.
    pub(super) fn observe(&mut self, token: u32) {
        *self.output_counts.entry(token).or_insert(0) += 1;
    }

    /// Changes the logits of the tokens seen. Ids beyond the row are no text and are skipped.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        for (&token, &count) in &self.output_counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
            if count > 0 {
                *logit -= self.frequency * count as f32 + self.presence;
            }
        }
    }
}
