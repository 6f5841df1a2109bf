//! The trait [`Backend`] and the plain data that goes in and out of it.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use stolon_kvcache::BlockId;

use crate::adapter::{Adapter, AdapterLoader};
use crate::draft::{DraftOutput, DraftTask};
use crate::image::{ImageEmbeddings, ImageInput, SliceImage};
use crate::kv_format::KvFormat;
use crate::regions::RegionBins;
use crate::sampling::{Draw, SamplingError};

/// The sizes of a backend, which the engine needs to plan batches and memory. A backend names those
/// that it has; the others are 0, false and `None` by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendSpec {
    /// Number of rows of the output matrix. Every token id is below it.
    pub vocab_size: usize,
    /// Context length: the maximum number of positions of one sequence, prompt and generated
    /// tokens together.
    pub max_positions: usize,
    /// Positions per KV block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Number of blocks in the KV store. Block ids are `0..block_count`.
    pub block_count: usize,
    /// Size of one block in bytes: keys and values of all layers.
    pub block_bytes: usize,
    /// Number of values of a hidden state, from which embeddings are made; `None` if the backend
    /// does not return hidden states.
    pub hidden_size: Option<usize>,
    /// Whether the backend draws tokens itself ([`LogitRows::Drawn`]). This saves time if rows of
    /// logits must otherwise be copied from a device.
    pub draws: bool,
    /// Whether slices may have proposed tokens after the last token of their sequence
    /// (speculative decoding). A later step then begins at the first position that was not accepted
    /// and writes it again. Requires keys and values that can be overwritten, rows with the same
    /// bits however many tokens the slice has, and, if there are recurrent states, that a sequence
    /// can continue after any of the tokens ([`SliceState::proposed`]).
    pub proposals: bool,
    /// Whether the backend has a smaller model, or a head of the model, that guesses tokens
    /// ([`Backend::draft`]). Requires `proposals`.
    pub draft_model: bool,
    /// The recurrent state of a sequence; `None` if the backend keeps all that a prefix leaves behind
    /// in its KV blocks, as for a model with attention layers only.
    pub state: Option<StateSpec>,
    /// Number of values that the embeddings of an image have for each of its positions; `None` if
    /// the backend does not encode images ([`Backend::encode`]). Their order is the backend's own.
    pub image_width: Option<usize>,
    /// The bins into which the model divides coordinates and sizes; `None` if it has none. Batches
    /// may then have tokens for these bins, and rows with their logits ([`LogitRows::Regions`]).
    pub regions: Option<RegionBins>,
    /// Whether a prompt is computed in one step, as a whole: in a text encoder, every token attends
    /// to all others. Nothing is cached, and the backend returns hidden states only.
    pub whole_prompts: bool,
    /// Number of token types; 0 if there are none. The token `id` of type `t` is `t * vocab_size +
    /// id`. A text encoder has a type for each segment of a text, and with matrices for tasks, as many
    /// again for each task.
    pub token_types: usize,
}

impl BackendSpec {
    /// Number of KV blocks that hold the copy of a state; 0 for a model without states.
    #[must_use]
    pub fn checkpoint_blocks(&self) -> usize {
        self.state.map_or(0, |state| state.bytes.div_ceil(self.block_bytes.max(1)).max(1))
    }

    /// Whether a sequence may have this token where it has no image: one of the vocabulary, of any
    /// type, or a coordinate or a size in the backend's bins.
    #[must_use]
    pub fn has_token(&self, token: u32) -> bool {
        (token as usize) < self.vocab_size.saturating_mul(self.token_types.max(1))
            || self.regions.is_some_and(|bins| bins.have(token))
    }

    /// Number of values of the embeddings of an image of `kv_len` positions, saturating; 0 if the
    /// backend does not encode images.
    #[must_use]
    pub fn image_values(&self, kv_len: usize) -> usize {
        kv_len.saturating_mul(self.image_width.unwrap_or(0))
    }
}

/// The recurrent state of a sequence: what layers such as Gated DeltaNet and Mamba keep of a prefix
/// in place of keys and values of its positions. A backend may also keep the window of layers with a
/// sliding window as a state, in place of the keys and values of all positions.
///
/// A state belongs to one position and cannot be cut. A running sequence has its own in a *slot* of
/// the backend. A *checkpoint* is a copy of it in KV blocks, from which other requests resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Size of a state in bytes, all layers together; at least 1.
    pub bytes: usize,
    /// Number of slots: the maximum number of sequences that run at the same time. Slots are
    /// `0..slots`.
    pub slots: usize,
}

/// For which tokens of a sequence's slice the backend returns a row, and whether it is a row of
/// logits or a hidden state: the output of the last layer after the final norm, which the output
/// matrix turns into logits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LogitRows {
    /// For none. Used for every prefill chunk of a prompt except the last.
    #[default]
    None,
    /// For the slice's last token, which is what sampling needs.
    Last,
    /// For the slice's last token, but only the token that is drawn from it is returned. Only for
    /// backends with [`BackendSpec::draws`].
    Drawn(Draw),
    /// For every token of the slice, which is what prompt log-probabilities need.
    All,
    /// For the slice's last token, followed by the logits of bins of coordinates and sizes. Only
    /// for backends with [`BackendSpec::regions`].
    Regions,
    /// The hidden state of the slice's last token, which is what an embedding with
    /// [`Pooling::Last`](crate::Pooling::Last) needs.
    LastHidden,
    /// The hidden state of every token of the slice, which is what an embedding with
    /// [`Pooling::Mean`](crate::Pooling::Mean) needs.
    AllHidden,
}

impl LogitRows {
    /// The tokens of a slice of `token_count` tokens that get a row of logits.
    #[must_use]
    pub fn logits(self, token_count: usize) -> Range<usize> {
        match self {
            Self::Last | Self::Regions => token_count.saturating_sub(1)..token_count,
            Self::All => 0..token_count,
            Self::None | Self::Drawn(_) | Self::LastHidden | Self::AllHidden => 0..0,
        }
    }

    /// The tokens of a slice of `token_count` tokens whose hidden states are returned.
    #[must_use]
    pub fn hidden(self, token_count: usize) -> Range<usize> {
        match self {
            Self::LastHidden => token_count.saturating_sub(1)..token_count,
            Self::AllHidden => 0..token_count,
            Self::None | Self::Last | Self::Drawn(_) | Self::All | Self::Regions => 0..0,
        }
    }

    /// Number of values of a row for a backend with this `spec`.
    #[must_use]
    pub fn width(self, spec: &BackendSpec) -> usize {
        let regions = spec.regions.filter(|_| self == Self::Regions);
        spec.vocab_size + regions.map_or(0, RegionBins::width)
    }

    /// The draw of the last token, if a token is returned instead of a row.
    #[must_use]
    pub fn draw(self) -> Option<Draw> {
        match self {
            Self::Drawn(draw) => Some(draw),
            _ => None,
        }
    }
}

/// The part of a step that belongs to one sequence. The default has no tokens; it is for the fields
/// that few slices have: `..SequenceSlice::default()`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceSlice {
    /// Number of tokens in [`StepBatch::tokens`] that belong to this sequence; at least 1.
    pub token_count: usize,
    /// Position of the first of these tokens. Keys and values of the positions `0..start` are in
    /// the KV store already and are read through `block_table`.
    pub start: usize,
    /// First position whose keys and values are written through the block table, from `start` to
    /// `start + token_count`. Those of the positions before it are in shared blocks already, which
    /// must not be written to. It is `start` unless cached positions are computed again: the last
    /// one for its logits, if the whole prompt was found in the prefix cache, or all after the
    /// checkpoint from which a sequence with a recurrent state resumes.
    pub write_from: usize,
    /// The sequence's blocks in order of position: block `i` holds the positions from
    /// `i * block_size`. The table covers at least `start + token_count` positions.
    pub block_table: Vec<BlockId>,
    /// The tokens of this slice that get a row of logits, or whose hidden states are returned.
    pub logit_rows: LogitRows,
    /// The sequence's recurrent state. `Some` exactly if the backend has states
    /// ([`BackendSpec::state`]).
    pub state: Option<SliceState>,
    /// The images that have positions in the slice, in ascending order; none overlap.
    pub images: Vec<SliceImage>,
    /// How many rotary positions the images before `start` have skipped: those that end there have
    /// fewer rotary positions than positions if they are grids ([`rotary_len`](crate::rotary_len)).
    /// 0 for most models.
    pub rotary_lag: usize,
    /// The adapter that changes the model's weights for all of these tokens; `None` for the model
    /// itself. The positions before `start` were computed with the same one. Only for backends with
    /// [`Backend::adapters`], and only one that their loader has returned.
    pub adapter: Option<Adapter>,
}

/// How a slice uses the recurrent state of its sequence. After the step, the slot has the state
/// after the slice's last position, or, with proposed tokens, what is needed to continue after any
/// of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceState {
    /// The slot of the sequence, which no other slice of the batch has. If `start` is 0, or with a
    /// checkpoint to resume from, what it contains is ignored; else it has the state after the
    /// position before `start`, or that position was proposed in the sequence's last step.
    pub slot: u32,
    /// The blocks of the checkpoint after the position before `start`, if the sequence resumes from
    /// one: [`BackendSpec::checkpoint_blocks`] of them. The step reads them only.
    pub resume: Option<Vec<BlockId>>,
    /// The checkpoints that the step writes, in ascending order of their positions. None of them
    /// covers a proposed token.
    pub checkpoints: Vec<StateCheckpoint>,
    /// Number of tokens at the end of the slice that were proposed and may be rejected, fewer than
    /// the slice has. The next slice of the sequence begins at the first of them, or after any of
    /// them. Not 0 only for backends with [`BackendSpec::proposals`].
    pub proposed: usize,
}

impl SliceState {
    /// The state in `slot`, without checkpoints.
    #[must_use]
    pub fn in_slot(slot: u32) -> Self {
        Self { slot, resume: None, checkpoints: Vec::new(), proposed: 0 }
    }
}

/// A checkpoint that a step writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCheckpoint {
    /// Number of positions of the sequence that the state covers: from `start + 1` to the end of
    /// the slice without its proposed tokens.
    pub len: usize,
    /// The blocks that the state is copied to: [`BackendSpec::checkpoint_blocks`] of them, which
    /// are in no block table and in no other checkpoint of the batch.
    pub blocks: Vec<BlockId>,
}

/// One ragged batch of prefill chunks and decodes, of any lengths and in any order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    /// Token ids of all slices, concatenated in the order of `sequences`. At the positions of images
    /// they have no meaning.
    pub tokens: Vec<u32>,
    /// The slices. A block that one slice writes is in no other slice's block table.
    pub sequences: Vec<SequenceSlice>,
}

/// What a step returns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// Row-major `[rows, vocab_size]`: the rows requested by each slice's `logit_rows`, in the
    /// order of the batch's tokens. A row for [`LogitRows::Regions`] is wider
    /// ([`LogitRows::width`]).
    pub logits: Vec<f32>,
    /// Row-major `[rows, hidden_size]`: the hidden states requested by each slice's `logit_rows`,
    /// in the order of the batch's tokens.
    pub hidden: Vec<f32>,
    /// The token of each slice with [`LogitRows::Drawn`], as [`Draw::of`] returns it.
    pub drawn: Vec<Result<u32, SamplingError>>,
}

/// Why a step failed. The contents of the positions it should have written are undefined
/// afterward.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The device or a kernel failed.
    #[error("the backend failed: {0}")]
    Failed(String),
    /// The batch violates the contract of [`StepBatch`]. This is a bug of the caller; nothing was
    /// written.
    #[error("malformed batch: {0}")]
    MalformedBatch(String),
    /// The backend does not implement this optional operation.
    #[error("this backend does not support {0}")]
    Unsupported(&'static str),
}

/// Computes forward passes.
///
/// The engine computes every step on one dedicated thread, the executor thread, and drops the
/// backend there. A backend that a factory creates on this thread does not have to be `Send` or
/// `Sync`. If [`Backend::step`] panics or fails, the engine treats every position that the step
/// should have written as lost; it never reads them again. After a panic it restarts on the same
/// backend, so a panic must not leave a backend that cannot compute further steps.
pub trait Backend {
    /// The backend's sizes. They are constant over its lifetime.
    fn spec(&self) -> &BackendSpec;

    /// Reads adapters for the model, if the backend supports them. The default is `None`. The
    /// engine calls this once, after the backend was made.
    fn adapters(&self) -> Option<Arc<dyn AdapterLoader>> {
        None
    }

    /// Computes one ragged batch: writes keys and values and returns the rows and tokens that the
    /// slices request.
    ///
    /// The call returns when everything has been computed, even if no rows were requested. The
    /// engine measures its time to learn how fast prompts are computed, and whether loading stored
    /// KV would be faster.
    ///
    /// **Batch invariance.** A row of logits and a hidden state depend, bit for bit, on the tokens
    /// and the adapter of that sequence only. They do not depend on the other sequences of the
    /// batch, on how the prompt was cut into chunks, on the block size, or on which positions were
    /// read from the cache. The engine relies on this to return the same text with a warm and with
    /// a cold cache.
    ///
    /// # Errors
    /// Any [`BackendError`]. Positions outside of the step's write ranges are unchanged even after
    /// an error.
    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError>;

    /// Guesses the tokens that follow some sequences, with a smaller model ([`WithDraft`]) or a head
    /// of the model, which is called the draft model here. For each
    /// guess, `choose` gets the index of the task and a row of the draft model's logits, which it may
    /// overwrite, and returns a token. With `None`, nothing more is guessed for this task.
    ///
    /// First the draft model computes the tokens of the sequences whose keys and values it does not
    /// have, at most `budget` of all tasks together. If a sequence has more, nothing is guessed for
    /// it, and a later call continues.
    ///
    /// It is called before a step, and writes nothing from which [`Backend::step`] computes: guesses
    /// are not subject to batch invariance, because the model verifies them.
    ///
    /// [`WithDraft`]: crate::WithDraft
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] by default; any [`BackendError`] of the draft model. The engine
    /// then goes on without guesses.
    fn draft(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        choose: &mut dyn FnMut(usize, &mut [f32]) -> Option<u32>,
    ) -> Result<DraftOutput, BackendError> {
        let _ = (tasks, budget, choose);
        Err(BackendError::Unsupported("draft models"))
    }

    /// Encodes an image, or a part of that: computes for about `time` and returns the image's
    /// embeddings if they are complete. If not, the next call for the same image continues. A
    /// backend may remember one incomplete image only; a call for another one then begins anew.
    ///
    /// The embeddings depend on the image only, bit for bit, and not on how many calls it took.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] by default; [`BackendError::Failed`] if the size or the number
    /// of positions of the image differs from what the encoder expects.
    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        time: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        let _ = (image, time);
        Err(BackendError::Unsupported("images"))
    }

    /// Maximum number of threads, including the executor thread, that sample from the rows of a
    /// step after it has ended; at least 1. Small steps are sampled on the executor thread alone.
    /// The default is 1.
    fn sampling_threads(&self) -> usize {
        1
    }

    /// The content of these blocks is not needed any longer: they were given to sequences, which
    /// write each position before they read it. Called before the loads and the forward pass of a
    /// step. The default does nothing. A backend for tests clears them, so that a read of positions
    /// that were not written is found, even where older content would look right.
    fn discard_blocks(&mut self, blocks: &[BlockId]) {
        let _ = blocks;
    }

    /// The format of the bytes that [`Backend::read_blocks`] and [`Backend::write_blocks`] copy;
    /// `None`, the default, if the backend cannot copy blocks. It is constant over the backend's
    /// lifetime.
    fn kv_format(&self) -> Option<KvFormat> {
        None
    }

    /// Copies keys and values of all layers out of the KV store: [`BackendSpec::block_bytes`] bytes
    /// for each of `blocks`, in their order, to `to`. Every position of the blocks was written
    /// before.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] by default; [`BackendError::MalformedBatch`] for a block that
    /// does not exist or a buffer of another size.
    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        let _ = (blocks, to);
        Err(BackendError::Unsupported("copies of KV blocks"))
    }

    /// Copies keys and values into the KV store: the reverse of [`Backend::read_blocks`]. `from`
    /// has the bytes of each block. A block that is read after it was written has the same bytes.
    /// If this fails, the contents of `blocks` are undefined; other blocks are unchanged.
    ///
    /// # Errors
    /// As [`Backend::read_blocks`].
    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        let _ = (blocks, from);
        Err(BackendError::Unsupported("copies of KV blocks"))
    }
}
