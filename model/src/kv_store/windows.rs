//! The keys and values of layers with a sliding window, if these keep only what the window needs.
//!
//! Each running sequence has a *ring* of blocks in the windowed layers: block `i` of its positions
//! is the block `i % ring_blocks` of the ring of its slot. The ring has room for the window before
//! a slice and for the slice itself, so that a step writes the positions of its slice before it
//! reads any, as in other layers. The kernels read the ring through a block table in which its
//! blocks return, and see only positions of the window.
//!
//! The window at a position belongs to the state of the sequence there: a checkpoint has the blocks
//! of the window in order of position, after the states of recurrent layers. So what the prefix
//! tree, the tiers and the scheduler do for recurrent states, they do for windows.

use std::ops::Range;
use std::str::FromStr;

use stolon_backend::{BackendError, SequenceSlice, SliceState, StepBatch};
use stolon_kvcache::BlockId;

use super::{KvShape, KvStore, Plane, out_of_memory};
use crate::config::DecoderConfig;
use crate::error::{KvStoreError, ModelError};

/// Where layers with a sliding window keep their keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowKv {
    /// In blocks, as other layers do, for all positions: a prefix can be used again from any block.
    #[default]
    Blocks,
    /// In the state of each running sequence, for the positions of the window only: long contexts
    /// take less memory, and a prefix can be used again only from where a state was kept.
    States,
}

impl WindowKv {
    /// All places.
    pub const ALL: [Self; 2] = [Self::Blocks, Self::States];

    /// The shape `shape` of the KV store of a model with windows in this place.
    pub(crate) fn apply(self, shape: KvShape, config: &DecoderConfig) -> KvShape {
        match self {
            Self::Blocks => shape,
            Self::States => shape.with_windows(config),
        }
    }

    /// The name, which [`WindowKv::from_str`] parses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::States => "states",
        }
    }
}

impl std::fmt::Display for WindowKv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WindowKv {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        Self::ALL.into_iter().find(|place| place.name() == name).ok_or_else(|| {
            ModelError::InvalidOption {
                name: "window KV".to_owned(),
                expected: format!("one of {}", Self::ALL.map(Self::name).join(", ")),
                got: format!("`{name}`"),
            }
        })
    }
}

/// The sizes of rings that do not depend on the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowRings {
    /// Number of rings: one for each slot of a state.
    pub(crate) slots: usize,
    /// Maximum number of tokens of a slice.
    pub(crate) slice_tokens: usize,
}

impl KvShape {
    /// The shape in which the layers of `config` whose windows are shorter than its context are
    /// windowed. All others stay in blocks. If there are no others, nothing changes: a prefix needs
    /// blocks.
    #[must_use]
    pub(crate) fn with_windows(mut self, config: &DecoderConfig) -> Self {
        let own = config.layers.iter().filter(|layer| layer.has_own_kv());
        let windows: Vec<Option<usize>> = own
            .map(|layer| layer.sliding_window.filter(|window| *window < config.max_positions))
            .collect();
        if self.convolution_layers > 0 || windows.contains(&None) {
            for (layer, window) in self.attention_layers.iter_mut().zip(&windows) {
                layer.windowed = window.is_some();
            }
            self.window = windows.into_iter().flatten().max().unwrap_or(0);
        }
        self
    }

    /// Size in bytes of the window of a sequence in a checkpoint; 0 if no layer is windowed.
    #[must_use]
    pub fn window_bytes(&self) -> usize {
        let before = self.window.saturating_sub(1);
        // A checkpoint that ends inside of a block has a part of one more.
        (before.div_ceil(self.block_size) + 1).saturating_mul(self.heads_bytes(true))
    }

    /// Size in bytes of a ring; 0 if no layer is windowed.
    pub(crate) fn ring_bytes(&self, slice_tokens: usize) -> usize {
        self.ring_blocks(slice_tokens).saturating_mul(self.heads_bytes(true))
    }

    /// Number of blocks of a ring. One more than for the positions alone, because these begin
    /// anywhere in a block.
    fn ring_blocks(&self, slice_tokens: usize) -> usize {
        self.window.saturating_add(slice_tokens).div_ceil(self.block_size) + 1
    }

    /// The blocks of positions that a query at position `len` or after it sees of those before it.
    fn window_at(&self, len: usize) -> Range<usize> {
        len.saturating_sub(self.window - 1) / self.block_size..len.div_ceil(self.block_size)
    }
}

/// The rings of all slots.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// As those of [`KvStore`], for the windowed layers.
    pub(super) planes: Vec<Plane>,
    /// Number of blocks of a ring.
    ring_blocks: usize,
    /// Number of rings.
    slots: usize,
    /// Maximum number of tokens of a slice.
    slice_tokens: usize,
}

impl Windows {
    /// The block of the ring of `slot` that holds block `index` of the positions.
    fn block(&self, slot: u32, index: usize) -> BlockId {
        BlockId((slot as usize * self.ring_blocks + index % self.ring_blocks) as u32)
    }

    /// The bytes of blocks of the positions, one after the other.
    fn bytes_of(&self, slot: u32, blocks: Range<usize>, to: &mut Vec<u8>) {
        let count = self.slots * self.ring_blocks;
        for index in blocks {
            let block = self.block(slot, index);
            for part in self.planes.iter().flat_map(|plane| plane.block(block, count)) {
                to.extend_from_slice(part);
            }
        }
    }

    /// Copies bytes to blocks of the positions, as [`Windows::bytes_of`] has returned them.
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
    /// The store with rings for its windowed layers, all zero. Without such layers, it does not
    /// change.
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
        let planes = self.shape.planes(true, block_count).collect::<Option<Vec<_>>>();
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

    /// Whether a layer is windowed. Layers are counted as in [`KvShape::attention_layers`].
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

    /// For each slice the block table by which windowed layers find its positions; empty if there
    /// are no such layers.
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

    /// Fills the rings of the slices that resume from a checkpoint. The window begins at `offset`
    /// in a checkpoint, in bytes.
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

    /// Completes the checkpoints of a step, of which the first `offset` bytes are written: copies
    /// the windows, and fills the rest with zeros.
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

    /// The window of the sequence in `slot` after its first `len` positions.
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
