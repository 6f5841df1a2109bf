//! What goes in and out of [`Backend::draft`](crate::Backend::draft): tokens that a smaller model
//! guesses to follow a sequence.

use std::sync::Arc;
use std::time::Duration;

use stolon_kvcache::BlockId;

use crate::{BackendError, BackendSpec};

/// A sequence whose next tokens are to be guessed.
#[derive(Clone, Debug)]
pub struct DraftTask {
    /// All tokens of the sequence so far, at least one. Keys and values of the last one may still
    /// have to be computed, by the model as well as by the draft model.
    pub tokens: Arc<Vec<u32>>,
    /// The blocks of the sequence in order of position. They cover `tokens`, and the positions of
    /// all guessed tokens but the last one. Only this sequence uses blocks after those of `tokens`.
    pub block_table: Vec<BlockId>,
    /// Maximum number of tokens to guess.
    pub count: usize,
    /// Maximum number of tokens of the sequence for which the draft model may still have to compute
    /// keys and values. If more are missing, nothing is computed and nothing is guessed.
    pub missing_max: usize,
}

/// What [`Backend::draft`](crate::Backend::draft) has computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftOutput {
    /// The guessed tokens of each task; none if the draft model has not computed all keys and values
    /// of the sequence yet.
    pub tokens: Vec<Vec<u32>>,
    /// The number of tokens in the first forward pass of the draft model: those of all sequences
    /// whose keys and values it did not have. 0 if nothing was computed.
    pub first_tokens: usize,
    /// Duration of the first forward pass.
    pub first: Duration,
    /// Number of forward passes after the first one. Each has one token per sequence.
    pub passes: usize,
    /// Duration of these passes together.
    pub later: Duration,
}

/// Checks that each task has tokens, and existing blocks for them.
///
/// # Errors
/// [`BackendError::MalformedBatch`].
pub fn check_drafts(tasks: &[DraftTask], spec: &BackendSpec) -> Result<(), BackendError> {
    for (index, DraftTask { tokens, block_table, .. }) in tasks.iter().enumerate() {
        let covered = block_table.len() * spec.block_size;
        let is_known = |block: &BlockId| (block.0 as usize) < spec.block_count;
        if tokens.is_empty() || covered < tokens.len() || !block_table.iter().all(is_known) {
            let len = tokens.len();
            return Err(BackendError::MalformedBatch(format!(
                "draft task {index}: expected at least one token and blocks below {} for them, \
                 got {len} tokens and the blocks {block_table:?}",
                spec.block_count
            )));
        }
    }
    Ok(())
}
