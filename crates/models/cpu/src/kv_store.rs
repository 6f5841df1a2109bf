//! The paged KV store: the keys and values of all layers, in blocks that block tables refer to.
//!
//! A layer with a convolution keeps the convolution's input of each position instead,
//! `[block_count, block_size, width]`. Keeping only the inputs of the last positions would need
//! less memory, but a prefix could then be resumed only where they were kept. With all inputs, it
//! can be resumed from any position.
//!
//! The values of a layer have the layout `[block_count, block_size, kv_heads, head_dim]`, where the
//! sizes of heads may differ between layers ([`KvLayer`]). The layout of its keys is
//! [`KvLayer::key_layout`]. A layer that reads the keys and values of another one has none of its
//! own, and needs no memory in the store. The keys of latent attention are also its values. Types of
//! 8 and 4 bits have scales `[block_count, block_size, kv_heads]`. There is one scale per position
//! and head, so the bits that are stored for a position depend only on this position, and not on the
//! others that are written in the same step.
//!
//! Layers with a sliding window can keep only what the window needs, in a ring of blocks for each
//! running sequence (`windows.rs`).
//!
//! Blocks also store checkpoints of the states of sequences, as plain bytes (`bytes.rs`).
//!
//! The store belongs to one backend, and only the backend's steps write to it. It does not track
//! which sequence owns which block.
//!
//! Memory is reserved at creation in new zeroed mappings, which may use huge pages. It becomes
//! resident where blocks are written, so a large budget costs nothing until it is used. Dropping
//! the store releases the memory.

use std::ops::Range;

use stolon_checkpoint::kv::{KvLayer, KvShape, KvStoreError, check_block_size};
use stolon_checkpoint::memory::free_memory;
use stolon_kernels::{KvLayout, KvRows, KvSlice, Path, SlotMapping};
use stolon_kvcache::BlockId;

use crate::workers::Workers;

pub(crate) use plane::Plane;
pub(crate) use windows::WindowRings;
use windows::Windows;

mod bytes;
mod plane;
mod windows;

/// Minimum number of bytes of a copy that several threads share.
const COPY_MIN: usize = 1 << 18;

/// The keys and values of all layers. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct KvStore {
    shape: KvShape,
    block_count: usize,
    /// The planes of layers that keep all positions. A layer with its own keys and values has a
    /// plane of keys and one of values, or one plane if they are the same. They are followed by a
    /// plane for each layer with a convolution.
    planes: Vec<Plane>,
    /// The keys and values of windowed layers.
    windows: Windows,
}

impl KvStore {
    /// Reserves a store of `block_count` blocks, all zero.
    ///
    /// # Errors
    /// [`KvStoreError::BlockSize`], [`KvStoreError::BlockCount`], [`KvStoreError::OutOfMemory`].
    pub(crate) fn new(shape: KvShape, block_count: usize) -> Result<Self, KvStoreError> {
        check_block_size(shape.block_size)?;
        if block_count == 0 || u32::try_from(block_count).is_err() {
            return Err(KvStoreError::BlockCount { got: block_count });
        }
        let inputs = (0..shape.convolution_layers).map(|_| {
            let positions = shape.block_size.checked_mul(block_count)?;
            Plane::new(shape.kv_type.of_convolutions(), positions, shape.convolution_width)
        });
        let planes = planes(&shape, false, block_count).chain(inputs).collect::<Option<Vec<_>>>();
        let planes = planes.ok_or_else(|| out_of_memory(block_count, shape.block_bytes()))?;
        Ok(Self { shape, block_count, planes, windows: Windows::default() })
    }

    /// The sizes and layout.
    #[must_use]
    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Number of blocks.
    #[must_use]
    pub(crate) fn block_count(&self) -> usize {
        self.block_count
    }

    /// The keys of a layer, in the layout [`KvLayer::key_layout`]. `layer` is an index in
    /// [`KvShape::attention_layers`]. The blocks of a windowed layer are the blocks of the rings.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub(crate) fn keys(&self, layer: usize) -> KvSlice<'_> {
        self.head_planes(layer)[0].slice()
    }

    /// The values of a layer, `[block_count, block_size, kv_heads, head_dim]`. `layer` is an index
    /// in [`KvShape::attention_layers`].
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub(crate) fn values(&self, layer: usize) -> KvSlice<'_> {
        let planes = self.head_planes(layer);
        planes[planes.len() - 1].slice()
    }

    /// The inputs of a layer's convolution, `[block_count, block_size, width]`. `layer` is an index
    /// among the layers with a convolution.
    ///
    /// # Panics
    /// If `layer` is not below the number of layers with a convolution.
    #[must_use]
    pub(crate) fn inputs(&self, layer: usize) -> KvSlice<'_> {
        self.planes[self.first_input() + layer].slice()
    }

    /// Copies blocks out, one after another. A block consists of the keys and the values of each
    /// layer that has its own, followed by the inputs of each layer with a convolution. Each of
    /// these parts has the elements in their layout, followed by the scales, in the byte order of
    /// this machine. `to` has [`KvShape::block_bytes`] bytes for each block.
    ///
    /// # Panics
    /// If there is no such block, or `to` has another size.
    pub(crate) fn read_blocks(&self, blocks: &[BlockId], to: &mut [u8], workers: &Workers) {
        let block_bytes = self.shape.block_bytes();
        assert_eq!(to.len(), blocks.len() * block_bytes, "{} blocks", blocks.len());
        let count = COPY_MIN.div_ceil(block_bytes);
        let parts = blocks.chunks(count).zip(to.chunks_mut(count * block_bytes));
        workers.run(parts, |(blocks, to)| {
            for (block, mut to) in blocks.iter().zip(to.chunks_exact_mut(block_bytes)) {
                for part in
                    self.planes.iter().flat_map(|plane| plane.block(*block, self.block_count))
                {
                    let (head, rest) = to.split_at_mut(part.len());
                    head.copy_from_slice(part);
                    to = rest;
                }
            }
        });
    }

    /// Copies blocks in that [`KvStore::read_blocks`] has copied out of a store of the same shape.
    ///
    /// # Panics
    /// If there is no such block, or an item of `from` has another size than a block.
    pub(crate) fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]], workers: &Workers) {
        let block_bytes = self.shape.block_bytes();
        let fits = from.iter().all(|bytes| bytes.len() == block_bytes);
        assert!(fits && from.len() == blocks.len(), "expected {} blocks", blocks.len());
        // Each thread writes another plane, so it computes where the bytes of its plane begin in a
        // block.
        let count = self.block_count;
        let plane_bytes = (block_bytes / self.planes.len()).max(1);
        let per_part = COPY_MIN.div_ceil((blocks.len() * plane_bytes).max(1));
        let mut end = 0;
        let starts = self.planes.iter().map(|plane| {
            end += plane.block_bytes(count);
            end - plane.block_bytes(count)
        });
        let starts: Vec<usize> = starts.collect();
        let parts = self.planes.chunks_mut(per_part).zip(starts.chunks(per_part));
        workers.run(parts, |(planes, starts)| {
            for (plane, start) in planes.iter_mut().zip(starts) {
                for (block, from) in blocks.iter().zip(from) {
                    let mut from = &from[*start..];
                    for part in plane.block_mut(*block, count) {
                        let (head, rest) = from.split_at(part.len());
                        part.copy_from_slice(head);
                        from = rest;
                    }
                }
            }
        });
    }

    /// The plane of the inputs of a layer's convolution, for writing.
    pub(crate) fn inputs_mut(&mut self, layer: usize) -> &mut Plane {
        let first = self.first_input();
        &mut self.planes[first + layer]
    }

    /// Index of the first plane of a convolution.
    fn first_input(&self) -> usize {
        self.planes.len() - self.shape.convolution_layers
    }

    /// The planes of a layer's keys and values: one if keys and values are shared, else two.
    fn head_planes(&self, layer: usize) -> &[Plane] {
        let (windowed, range) = self.head_range(layer);
        if windowed { &self.windows.planes[range] } else { &self.planes[range] }
    }

    /// The same as [`Self::head_planes`], for writing.
    fn head_planes_mut(&mut self, layer: usize) -> &mut [Plane] {
        let (windowed, range) = self.head_range(layer);
        if windowed { &mut self.windows.planes[range] } else { &mut self.planes[range] }
    }

    /// Whether a layer is windowed, and the range of its planes.
    fn head_range(&self, layer: usize) -> (bool, Range<usize>) {
        let (before, from) = self.shape.attention_layers.split_at(layer);
        let windowed = from[0].windowed;
        let before = before.iter().filter(|layer| layer.windowed == windowed);
        let first = before.map(KvLayer::planes).sum();
        (windowed, first..first + from[0].planes())
    }

    /// The destination of a layer's keys at the positions in `slots`.
    pub(crate) fn keys_mut<'a>(
        &'a mut self,
        layer: usize,
        path: Path,
        slots: &'a SlotMapping,
    ) -> KvRows<'a> {
        let KvLayer { kv_heads, head_dim, key_layout, .. } = self.shape.attention_layers[layer];
        let keys = self.head_planes_mut(layer)[0].slice_mut();
        KvRows::new(path, keys, key_layout, slots, kv_heads, head_dim)
    }

    /// The destinations of a layer's keys and values at the positions in `slots`. The layer has a
    /// plane for each of them. Both are returned together, so that two threads can write them at
    /// the same time.
    pub(crate) fn rows_mut<'a>(
        &'a mut self,
        layer: usize,
        path: Path,
        slots: &'a SlotMapping,
    ) -> [KvRows<'a>; 2] {
        let KvLayer { kv_heads, head_dim, key_layout, .. } = self.shape.attention_layers[layer];
        let [keys, values] = self.head_planes_mut(layer) else {
            unreachable!("keys and values that are not shared have two planes");
        };
        [(keys, key_layout), (values, KvLayout::Rows)].map(|(plane, layout)| {
            KvRows::new(path, plane.slice_mut(), layout, slots, kv_heads, head_dim)
        })
    }
}

/// Reserves the planes of `block_count` blocks of all windowed layers, or of all other attention
/// layers, in the order of the layers. An item is `None` if there is not enough memory for it.
fn planes(
    shape: &KvShape,
    windowed: bool,
    block_count: usize,
) -> impl Iterator<Item = Option<Plane>> + '_ {
    let layers = shape.attention_layers.iter().filter(move |layer| layer.windowed == windowed);
    let each = layers.flat_map(|layer| shape.elements(layer).map(move |element| (layer, element)));
    each.map(move |(layer, element)| {
        let heads = (shape.block_size * layer.kv_heads).checked_mul(block_count)?;
        Plane::new(element, heads, layer.head_dim)
    })
}

/// The error that there is no memory for `block_count` blocks of `block_bytes` bytes.
fn out_of_memory(block_count: usize, block_bytes: usize) -> KvStoreError {
    KvStoreError::OutOfMemory {
        expected: (block_count as u64).saturating_mul(block_bytes as u64),
        block_count,
        block_bytes,
        free: free_memory(),
    }
}

#[cfg(test)]
mod tests;
