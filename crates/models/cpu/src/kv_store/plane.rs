//! [`Plane`] is the memory of one layer's keys, values, or inputs of its convolution.

use std::ops::Range;

use stolon_kernels::{Buffer, KvSlice, KvSliceMut};
use stolon_kvcache::BlockId;

use stolon_checkpoint::kv::KvElement;

/// The keys, the values, or the inputs of the convolution, of one layer.
#[derive(Debug)]
pub(crate) struct Plane {
    element: KvElement,
    /// The elements of all blocks, of type `element`.
    values: Buffer,
    /// `[block_count, block_size, kv_heads]` in f32 for [`KvElement::Int8`] and
    /// [`KvElement::Int4`]; empty for other types.
    scales: Buffer,
}

impl Plane {
    /// Allocates a zeroed plane with `heads` heads of `head_dim` elements in total, in all blocks
    /// together, which is even for [`KvElement::Int4`]. Returns `None` if there is not enough
    /// memory.
    pub(super) fn new(element: KvElement, heads: usize, head_dim: usize) -> Option<Self> {
        let len = heads.checked_mul(head_dim)?;
        let (values, scales) = match element {
            KvElement::F32 => (Buffer::try_zeroed::<f32>(len)?, 0),
            KvElement::Bf16 | KvElement::F16 => (Buffer::try_zeroed::<u16>(len)?, 0),
            KvElement::Int8 => (Buffer::try_zeroed::<i8>(len)?, heads),
            KvElement::Int4 => (Buffer::try_zeroed::<u8>(len / 2)?, heads),
        };
        Some(Self { element, values, scales: Buffer::try_zeroed::<f32>(scales)? })
    }

    /// Number of bytes of a block, if the plane has `block_count` blocks.
    pub(super) fn block_bytes(&self, block_count: usize) -> usize {
        (self.values.byte_len() + self.scales.byte_len()) / block_count
    }

    /// The bytes of a block, if the plane has `block_count` blocks: its elements, then its scales.
    /// A block is contiguous in every layout.
    pub(super) fn block(&self, block: BlockId, block_count: usize) -> [&[u8]; 2] {
        [&self.values, &self.scales]
            .map(|buffer| &buffer.slice::<u8>()[part(buffer.byte_len(), block, block_count)])
    }

    /// The same as [`Plane::block`], for writing.
    pub(super) fn block_mut(&mut self, block: BlockId, block_count: usize) -> [&mut [u8]; 2] {
        [&mut self.values, &mut self.scales].map(|buffer| {
            let part = part(buffer.byte_len(), block, block_count);
            &mut buffer.slice_mut::<u8>()[part]
        })
    }

    /// The plane in the form that the kernels read.
    pub(super) fn slice(&self) -> KvSlice<'_> {
        match self.element {
            KvElement::F32 => KvSlice::F32(self.values.slice()),
            KvElement::Bf16 => KvSlice::Bf16(self.values.slice()),
            KvElement::F16 => KvSlice::F16(self.values.slice()),
            KvElement::Int8 => {
                KvSlice::Int8 { values: self.values.slice(), scales: self.scales.slice() }
            }
            KvElement::Int4 => {
                KvSlice::Int4 { packed: self.values.slice(), scales: self.scales.slice() }
            }
        }
    }

    /// The plane in the form that the kernels write.
    pub(crate) fn slice_mut(&mut self) -> KvSliceMut<'_> {
        let (values, scales) = (&mut self.values, &mut self.scales);
        match self.element {
            KvElement::F32 => KvSliceMut::F32(values.slice_mut()),
            KvElement::Bf16 => KvSliceMut::Bf16(values.slice_mut()),
            KvElement::F16 => KvSliceMut::F16(values.slice_mut()),
            KvElement::Int8 => {
                KvSliceMut::Int8 { values: values.slice_mut(), scales: scales.slice_mut() }
            }
            KvElement::Int4 => {
                KvSliceMut::Int4 { packed: values.slice_mut(), scales: scales.slice_mut() }
            }
        }
    }
}

/// The range of a block's bytes in a buffer of `len` bytes with `block_count` blocks.
fn part(len: usize, block: BlockId, block_count: usize) -> Range<usize> {
    let (block, bytes) = (block.0 as usize, len / block_count);
    block * bytes..(block + 1) * bytes
}
