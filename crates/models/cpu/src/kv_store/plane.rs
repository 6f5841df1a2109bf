//! [`Plane`] is the memory of one layer's keys, values, or inputs of its convolution.

use std::ops::Range;

use stolon_kernels::{Buffer, KvSlice, KvSliceMut};
use stolon_kvcache::BlockId;

use stolon_checkpoint::kv::KvType;

/// The keys, the values, or the inputs of the convolution, of one layer.
#[derive(Debug)]
pub(crate) struct Plane {
    kv_type: KvType,
    /// The elements of all blocks, of type `kv_type`.
    values: Buffer,
    /// `[block_count, block_size, kv_heads]` in f32 for [`KvType::Int8`]; empty for other types.
    scales: Buffer,
}

impl Plane {
    /// Allocates a zeroed plane with `heads` heads of `head_dim` elements in total, in all blocks
    /// together. Returns `None` if there is not enough memory.
    pub(super) fn new(kv_type: KvType, heads: usize, head_dim: usize) -> Option<Self> {
        let len = heads.checked_mul(head_dim)?;
        let values = match kv_type {
            KvType::F32 => Buffer::try_zeroed::<f32>(len)?,
            KvType::Bf16 | KvType::F16 => Buffer::try_zeroed::<u16>(len)?,
            KvType::Int8 => Buffer::try_zeroed::<i8>(len)?,
        };
        let scales = if kv_type == KvType::Int8 { heads } else { 0 };
        Some(Self { kv_type, values, scales: Buffer::try_zeroed::<f32>(scales)? })
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
        match self.kv_type {
            KvType::F32 => KvSlice::F32(self.values.slice()),
            KvType::Bf16 => KvSlice::Bf16(self.values.slice()),
            KvType::F16 => KvSlice::F16(self.values.slice()),
            KvType::Int8 => {
                KvSlice::Int8 { values: self.values.slice(), scales: self.scales.slice() }
            }
        }
    }

    /// The plane in the form that the kernels write.
    pub(crate) fn slice_mut(&mut self) -> KvSliceMut<'_> {
        match self.kv_type {
            KvType::F32 => KvSliceMut::F32(self.values.slice_mut()),
            KvType::Bf16 => KvSliceMut::Bf16(self.values.slice_mut()),
            KvType::F16 => KvSliceMut::F16(self.values.slice_mut()),
            KvType::Int8 => {
                let (values, scales) = (&mut self.values, &mut self.scales);
                KvSliceMut::Int8 { values: values.slice_mut(), scales: scales.slice_mut() }
            }
        }
    }
}

/// The range of a block's bytes in a buffer of `len` bytes with `block_count` blocks.
fn part(len: usize, block: BlockId, block_count: usize) -> Range<usize> {
    let (block, bytes) = (block.0 as usize, len / block_count);
    block * bytes..(block + 1) * bytes
}
