//! The keys and values of layers with a sliding window, if only the positions of the window are
//! kept.
//!
//! Each running sequence has a *ring* of blocks in the windowed layers. Block `i` of its positions
//! is stored in block `i % ring_blocks` of the ring of its slot. The ring has room for the window
//! before a slice and for the slice itself, so a step writes the positions of its slice before it
//! reads any, as in other layers. The kernels read the ring through a block table in which its
//! blocks repeat, and attend only to positions of the window.
//!
//! The window at a position is part of the state of the sequence there. A checkpoint has the blocks
//! of the window in order of position, after the states of recurrent layers. The prefix tree, the
//! tiers and the scheduler therefore handle windows in the same way as recurrent states.

use std::ops::Range;

use stolon_backend::{BackendError, SequenceSlice, SliceState, StepBatch};
use stolon_kvcache::BlockId;

use stolon_checkpoint::kv::KvStoreError;

use super::{KvStore, Plane, out_of_memory, planes};

/// The numbers that determine the size of rings, in addition to the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowRings {
    /// Number of rings, one for each slot of a state.
    pub(crate) slots: usize,
    /// Maximum number of tokens of a slice.
    pub(crate) slice_tokens: usize,
}

/// The rings of all slots.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// The planes of the windowed layers, in the order of the layers.
    pub(super) planes: Vec<Plane>,
    /// Number of blocks of a ring.
    ring_blocks: usize,
    /// Number of rings.
    slots: usize,
    /// Maximum number of tokens of a slice.
    slice_tokens: usize,
}

impl Windows {
    /// The block in the ring of `slot` that stores block `index` of the sequence's positions.
    fn block(&self, slot: u32, index: usize) -> BlockId {
        BlockId((slot as usize * self.ring_blocks + index % self.ring_blocks) as u32)
    }

    /// Appends the bytes of the blocks `blocks` of a sequence's positions to `to`.
    fn bytes_of(&self, slot: u32, blocks: Range<usize>, to: &mut Vec<u8>) {
        let count = self.slots * self.ring_blocks;
        for index in blocks {
            let block = self.block(slot, index);
            for part in self.planes.iter().flat_map(|plane| plane.block(block, count)) {
                to.extend_from_slice(part);
            }
        }
    }

    /// Fills blocks of a sequence's positions with bytes from [`Windows::bytes_of`].
    fn fill(&mut self, slot: u32, blocks: Range<usize>, from: &[u8]) {
        let count = self.slots * self.ring_blocks;
        let mut from = from;
        for index in blocks {
            let block = self.block(slot, index);
            for part in self.planes.iter_mut().flat_map(|plane| plane.block_mut(block, count)) {
                let (head, rest) = from.split_at(part.len());
                part.copy_from_slice(head);
                from = rest;
            }
        }
    }
}

impl KvStore {
    /// Adds rings for the windowed layers, all zero. A store without such layers is returned
    /// unchanged.
    ///
    /// # Errors
    /// [`KvStoreError::OutOfMemory`].
    pub(crate) fn with_rings(mut self, rings: WindowRings) -> Result<Self, KvStoreError> {
        if self.shape.window == 0 {
            return Ok(self);
        }
        let WindowRings { slots, slice_tokens } = rings;
        let ring_blocks = self.shape.ring_blocks(slice_tokens);
        let block_count = ring_blocks.saturating_mul(slots);
        let planes = planes(&self.shape, true, block_count).collect::<Option<Vec<_>>>();
        let planes = planes.filter(|_| u32::try_from(block_count).is_ok());
        let planes =
            planes.ok_or_else(|| out_of_memory(block_count, self.shape.heads_bytes(true)))?;
        self.windows = Windows { planes, ring_blocks, slots, slice_tokens };
        Ok(self)
    }

    /// Size of all rings in bytes.
    pub(crate) fn ring_bytes(&self) -> usize {
        self.shape.ring_bytes(self.windows.slice_tokens) * self.windows.slots
    }

    /// Whether a layer is windowed. `layer` is an index in `KvShape::attention_layers`.
    pub(crate) fn is_windowed(&self, layer: usize) -> bool {
        self.shape.attention_layers[layer].windowed
    }

    /// Checks that the ring of each slice has room for it.
    ///
    /// # Errors
    /// [`BackendError::MalformedBatch`].
    pub(crate) fn check_slices(&self, batch: &StepBatch) -> Result<(), BackendError> {
        let most = self.windows.slice_tokens;
        let is_long = |slice: &&SequenceSlice| self.shape.window > 0 && slice.token_count > most;
        batch.sequences.iter().find(is_long).map_or(Ok(()), |slice| {
            let got = slice.token_count;
            let message = format!("expected slices of at most {most} tokens, got {got}");
            Err(BackendError::MalformedBatch(message))
        })
    }

    /// For each slice, the block table that maps its positions to its ring; empty if there are no
    /// windowed layers.
    pub(crate) fn window_tables(&self, batch: &StepBatch) -> Vec<Vec<BlockId>> {
        if self.shape.window == 0 {
            return Vec::new();
        }
        let table = |slice: &SequenceSlice| {
            let slot = slot_of(slice);
            let count = (slice.start + slice.token_count).div_ceil(self.shape.block_size);
            (0..count).map(|index| self.windows.block(slot, index)).collect()
        };
        batch.sequences.iter().map(table).collect()
    }

    /// Fills the rings of the slices that resume from a checkpoint. `offset` is the offset in bytes
    /// of the window in a checkpoint.
    pub(crate) fn resume_windows(&mut self, batch: &StepBatch, offset: usize) {
        if self.shape.window == 0 {
            return;
        }
        for slice in &batch.sequences {
            let Some(SliceState { resume: Some(checkpoint), .. }) = &slice.state else { continue };
            let blocks = self.shape.window_at(slice.start);
            let mut bytes = vec![0; blocks.len() * self.shape.heads_bytes(true)];
            self.read_bytes(checkpoint, offset, &mut bytes);
            self.windows.fill(slot_of(slice), blocks, &bytes);
        }
    }

    /// Completes the checkpoints of a step, whose first `offset` bytes are written already. It
    /// appends the windows, and fills the rest with zeros.
    pub(crate) fn finish_checkpoints(&mut self, batch: &StepBatch, offset: usize) {
        for slice in &batch.sequences {
            let Some(state) = &slice.state else { continue };
            for checkpoint in &state.checkpoints {
                let end = checkpoint.blocks.len() * self.shape.block_bytes();
                let mut bytes = self.window_bytes_at(state.slot, checkpoint.len);
                bytes.resize(end - offset, 0);
                self.write_bytes(&checkpoint.blocks, offset, &bytes);
            }
        }
    }

    /// The bytes of the window of the sequence in `slot`, after its first `len` positions.
    pub(crate) fn window_bytes_at(&self, slot: u32, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.shape.window > 0 {
            self.windows.bytes_of(slot, self.shape.window_at(len), &mut bytes);
        }
        bytes
    }
}

/// The slot of a slice, which the batch checker requires.
fn slot_of(slice: &SequenceSlice) -> u32 {
    slice.state.as_ref().map_or(0, |state| state.slot)
}
