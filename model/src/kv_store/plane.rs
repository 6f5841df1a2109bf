//! [`Plane`]: the memory of the keys, or of the values, of one layer.

use std::ops::Range;

use stolon_kernels::{Buffer, KvSlice, KvSliceMut};
use stolon_kvcache::BlockId;

use super::{KvShape, KvType};

/// The keys, or the values, of one layer.
#[derive(Debug)]
pub(crate) struct Plane {
    kv_type: KvType,
    /// The elements of all blocks, of type `kv_type`.
    values: Buffer,
    /// `[block_count, block_size, kv_heads]` in f32 for [`KvType::Int8`]; empty for other types.
    scales: Buffer,
}

impl Plane {
    /// Allocates a zeroed plane. Returns `None` if there is not enough memory.
    pub(super) fn new(shape: &KvShape, block_count: usize) -> Option<Self> {
        let heads = (shape.block_size * shape.kv_heads).checked_mul(block_count)?;
        let len = heads.checked_mul(shape.head_dim)?;
        let kv_type = shape.kv_type;
        let values = match kv_type {
            KvType::F32 => Buffer::try_zeroed::<f32>(len)?,
            KvType::Bf16 | KvType::F16 => Buffer::try_zeroed::<u16>(len)?,
            KvType::Int8 => Buffer::try_zeroed::<i8>(len)?,
        };
        let scales = if kv_type == KvType::Int8 { heads } else { 0 };
        Some(Self { kv_type, values, scales: Buffer::try_zeroed::<f32>(scales)? })
    }

    /// The bytes of one of `block_count` blocks: its elements, then its scales. In every layout a
    /// block is contiguous.
    pub(super) fn block(&self, block: BlockId, block_count: usize) -> [&[u8]; 2] {
        [&self.values, &self.scales]
            .map(|buffer| &buffer.slice::<u8>()[part(buffer.byte_len(), block, block_count)])
    }

    /// [`Plane::block`] for writing.
    pub(super) fn block_mut(&mut self, block: BlockId, block_count: usize) -> [&mut [u8]; 2] {
        [&mut self.values, &mut self.scales].map(|buffer| {
            let part = part(buffer.byte_len(), block, block_count);
            &mut buffer.slice_mut::<u8>()[part]
        })
    }

    /// The plane as a slice that the kernels read.
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

    /// The plane as a slice that the kernels write.
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

/// The bytes of one of `block_count` blocks in a buffer of `len` bytes.
fn part(len: usize, block: BlockId, block_count: usize) -> Range<usize> {
    let (block, bytes) = (block.0 as usize, len / block_count);
    block * bytes..(block + 1) * bytes
}
