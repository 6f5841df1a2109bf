//! [`Plane`]: the memory of the keys, or of the values, of one layer.

use stolon_kernels::{Buffer, KvSlice, KvSliceMut};

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
