//! What goes to the executor's thread and what comes back: plain data, moved, never shared.

use std::sync::Arc;
use std::time::Duration;

use stolon_kvcache::StepTicket;
use stolon_model::StepBatch;
use stolon_model::sampling::{Sampled, SamplerState, SamplingError, TokenLogprob};

/// One step to compute.
#[derive(Debug)]
pub(crate) struct StepPlan {
    /// The forward pass.
    pub(crate) batch: StepBatch,
    /// What to do with the logits; one entry a slice of the batch.
    pub(crate) tasks: Vec<RowTask>,
    /// Blocks given back meanwhile stay out of use until this is dropped.
    pub(crate) ticket: StepTicket,
}

/// What to do with one slice's rows.
#[derive(Debug, Default)]
pub(crate) struct RowTask {
    /// Samples from the last row; travels here and back.
    pub(crate) sampler: Option<SamplerState>,
    /// The last row is to be brought back as it is.
    pub(crate) keep_row: bool,
    /// Prompt log-probabilities: every row has logits.
    pub(crate) prompt: Option<PromptTargets>,
}

/// The tokens whose log-probabilities the rows tell.
#[derive(Debug)]
pub(crate) struct PromptTargets {
    /// The token after each row; one fewer than rows where the slice ends the prompt.
    pub(crate) tokens: Vec<u32>,
    /// How many likeliest tokens to tell beside.
    pub(crate) top: usize,
}

/// What one slice gave.
#[derive(Debug, Default)]
pub(crate) struct RowResult {
    /// The sampler, back.
    pub(crate) sampler: Option<SamplerState>,
    /// The next token, where one was asked for.
    pub(crate) sampled: Option<Sampled>,
    /// The last row, where it was asked for.
    pub(crate) row: Option<Arc<[f32]>>,
    /// One entry a target.
    pub(crate) prompt: Vec<TokenLogprob>,
    /// Logits that cannot be used: this sequence cannot go on.
    pub(crate) failure: Option<SamplingError>,
}

/// A step's end.
#[derive(Debug)]
pub(crate) struct StepDone {
    /// One entry a slice, or why the whole step failed.
    pub(crate) outcome: Result<Vec<RowResult>, String>,
    /// Time on the executor's thread.
    pub(crate) compute: Duration,
}
