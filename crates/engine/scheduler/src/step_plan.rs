//! The messages between the scheduler and the executor: the plan of one step, and its result. Plain
//! data that is moved, never shared.

use std::sync::Arc;
use std::time::Duration;

use stolon_backend::{
    DraftOutput, DraftTask, ImageEmbeddings, ImageInput, Pooler, Sampled, SamplerState,
    SamplingError, StepBatch, TokenLogprob,
};
use stolon_kvcache::{BlockId, StepTicket};

use crate::late_sampling::LateRow;
use crate::token_set::TokenSet;
use crate::transfer::LoadTask;

/// One step.
#[derive(Debug)]
pub struct StepPlan {
    /// Lists of blocks that are copied out of the KV store before anything is written.
    pub saves: Vec<Vec<BlockId>>,
    /// Blocks that were reserved since the last step. Their content is not needed any longer once
    /// `saves` are made.
    pub discarded: Vec<BlockId>,
    /// Blocks that are copied into the KV store before the forward pass.
    pub loads: Vec<LoadTask>,
    /// An image that is encoded before the forward pass, or a part of that.
    pub encode: Option<EncodeTask>,
    /// What a draft model proposes before the forward pass.
    pub draft: DraftPlan,
    /// The forward pass. It may be empty if the step has only copies, or encodes an image.
    pub batch: StepBatch,
    /// What to do with the output: one entry per slice of the batch.
    pub tasks: Vec<RowTask>,
    /// Blocks released during the step are not reused until this is dropped.
    pub ticket: StepTicket,
}

/// The slices to which a draft model adds proposals. Each has a single token.
#[derive(Debug, Default)]
pub struct DraftPlan {
    /// In ascending order of their indices.
    pub slices: Vec<DraftSlice>,
    /// Maximum number of tokens of these sequences that the draft model computes before it guesses
    /// any ([`Backend::draft`](stolon_backend::Backend::draft)).
    pub budget: usize,
}

/// A slice to which a draft model adds proposals.
#[derive(Debug)]
pub struct DraftSlice {
    /// Its index in the batch.
    pub index: usize,
    /// Its sequence.
    pub task: DraftTask,
    /// Tokens that are not proposed, because they end the answer.
    pub ends: [TokenSet; 2],
}

/// What a draft model has proposed in a step.
#[derive(Debug, Default)]
pub struct DraftDone {
    /// The index of each slice that got proposals, with these.
    pub proposals: Vec<(usize, Vec<u32>)>,
    /// The work of the draft model. Its tokens are in `proposals`.
    pub output: DraftOutput,
    /// Time that the executor thread spent on all of it.
    pub time: Duration,
}

/// An image to encode.
#[derive(Clone, Debug)]
pub struct EncodeTask {
    /// The image.
    pub image: Arc<ImageInput>,
    /// The time for which to do it. See [`Backend::encode`](stolon_backend::Backend::encode).
    pub time: Duration,
}

/// What to do with the logit rows and the hidden states of one slice.
#[derive(Debug, Default)]
pub struct RowTask {
    /// Samples from the last row, if a token is to be generated, or from the last ones, if tokens
    /// were proposed. Returned with the result.
    pub sampler: Option<Box<SamplerState>>,
    /// The tokens that were proposed to follow the sequence's last token. They are the last tokens
    /// of the slice, which then has a row for each of its tokens.
    pub proposals: Vec<u32>,
    /// Return the last row unchanged, to be cached. Not with proposals.
    pub return_logits: bool,
    /// Compute prompt log-probabilities. Every token of the slice then has a row of logits.
    pub prompt: Option<PromptTargets>,
    /// Pools the hidden states of the slice. Returned with the result.
    pub pooler: Option<Pooler>,
    /// Index of the load that the slice continues. If it fails, the slice is not computed.
    pub load: Option<usize>,
}

impl RowTask {
    /// Whether the slice is not computed, because its load is not among those that have succeeded.
    pub(crate) fn is_skipped(&self, loaded: &[bool]) -> bool {
        self.load.is_some_and(|load| !loaded[load])
    }
}

/// The prompt tokens whose log-probabilities are computed.
#[derive(Debug)]
pub struct PromptTargets {
    /// The token that follows each row. One fewer than rows if the slice ends the prompt.
    pub tokens: Vec<u32>,
    /// Number of most likely alternatives to report for each.
    pub top: usize,
}

/// The result for one slice.
#[derive(Debug, Default)]
pub struct RowResult {
    /// The sampler of the task.
    pub sampler: Option<Box<SamplerState>>,
    /// The next tokens, if the task had a sampler: one, after as many as were accepted of the
    /// proposals. The last one is missing if its row failed or its logits processor was not ready.
    pub sampled: Vec<Sampled>,
    /// The rows to sample from next, with the sampler, if the logits processor was not ready.
    pub late: Option<LateRow>,
    /// `[vocab_size]` logits of the last row, if requested.
    pub logits: Option<Arc<[f32]>>,
    /// One entry per target.
    pub prompt: Vec<TokenLogprob>,
    /// The pooler of the task, with the hidden states of the slice.
    pub pooler: Option<Pooler>,
    /// The logits are unusable (NaN, for example): this sequence fails after the tokens of
    /// `sampled`.
    pub failure: Option<SamplingError>,
    /// It was not computed, because its load has failed.
    pub skipped: bool,
}

/// The result of a step.
#[derive(Debug)]
pub struct StepDone {
    /// For each list of saved blocks, their bytes one after another; `None` if they could not be
    /// copied. A missing entry counts as `None`.
    pub saved: Vec<Option<Vec<u8>>>,
    /// What the encoder has returned, if an image was to be encoded: its embeddings if they are
    /// complete, or why it failed.
    pub encoded: Option<Result<Option<ImageEmbeddings>, String>>,
    /// Time that the executor thread spent on the encoder.
    pub encoding: Duration,
    /// Whether each load has copied all of its blocks. A missing entry counts as false.
    pub loaded: Vec<bool>,
    /// What a draft model has proposed.
    pub draft: DraftDone,
    /// One entry per slice, or why the forward pass failed.
    pub outcome: Result<Vec<RowResult>, String>,
    /// Time that the executor thread spent on the forward pass.
    pub compute: Duration,
}
