//! The seam between the engine and whatever computes: one ragged batch in, rows of logits out.
//!
//! A backend owns the device, the weights and the KV store. It lives on one thread (the
//! executor's) and is called by nobody else, so it is `Send` but needs not be `Sync`. It knows
//! nothing of requests, the prefix tree or sampling: it is given block tables and writes where
//! it is told to.

use stolon_kvcache::BlockId;

mod check;

pub use check::BatchChecker;

/// What a backend computes with: sizes that the engine needs to plan batches and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSpec {
    /// Rows of the output matrix: a token id is below it.
    pub vocab_size: usize,
    /// Most positions one sequence may have (prompt and generated tokens together).
    pub max_positions: usize,
    /// Positions a KV block holds, a power of two from 1 to 256.
    pub block_size: usize,
    /// Blocks in the KV store; block ids are `0..block_count`.
    pub block_count: usize,
    /// Bytes of one block over all layers, keys and values together.
    pub block_bytes: usize,
}

/// Which rows of a sequence's slice get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prefill chunk that is not the prompt's last.
    None,
    /// The slice's last token only: what sampling needs.
    Last,
    /// Every token of the slice: what prompt log-probabilities need.
    All,
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceSlice {
    /// How many of the batch's concatenated tokens are this sequence's; at least 1.
    pub token_count: usize,
    /// Position of the first of them. Positions `0..start` are cached already and are read
    /// through `block_table`.
    pub start: usize,
    /// First position whose keys and values are written to the block table. Normally `start`;
    /// `start + token_count` when nothing may be written, as on a full hit, where the last
    /// position's keys and values already stand in a shared block and are read from there.
    pub write_from: usize,
    /// The sequence's blocks in order of position; covers `start + token_count` positions.
    pub block_table: Vec<BlockId>,
    /// Which rows get logits.
    pub logit_rows: LogitRows,
}

/// One ragged batch: prefill chunks and decodes of any lengths, in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Token ids of all slices, concatenated in the order of `sequences`.
    pub tokens: Vec<u32>,
    /// The slices. No block that one slice writes is in another slice's table.
    pub sequences: Vec<SequenceSlice>,
}

/// The logits of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// `[rows, vocab_size]`, row-major, f32: the rows asked for, in the batch's order.
    pub logits: Vec<f32>,
}

/// Why a step failed. The KV of blocks it was to write is undefined afterwards.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The device or a kernel failed.
    #[error("the backend failed: {0}")]
    Failed(String),
    /// The batch breaks the contract of [`StepBatch`]: a bug of the caller, found before any write.
    #[error("malformed batch: {0}")]
    MalformedBatch(String),
}

/// Computes steps. See the module's documentation.
pub trait Backend: Send {
    /// Sizes; constant over the backend's life.
    fn spec(&self) -> &BackendSpec;

    /// Computes one ragged batch: writes keys and values, returns the logits asked for.
    ///
    /// A row's logits depend on its sequence's tokens alone, to the last bit: not on the batch
    /// it runs in, on where the prompt was cut into chunks, on the block size, or on which of
    /// its positions were read from the cache.
    ///
    /// # Errors
    /// [`BackendError`]; positions outside the step's write ranges are untouched even then.
    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError>;
}
