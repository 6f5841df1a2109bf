//! Keys or values of one layer: the memory, and the way into it.

use super::{KvShape, KvType, zeroes};
use crate::kernels::{KvSlice, KvSliceMut};

/// Keys or values of one layer.
#[derive(Debug)]
pub(crate) struct Plane {
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    F32(Vec<f32>),
    /// The bits of bf16 values.
    Bf16(Vec<u16>),
    /// The bits of f16 values.
    F16(Vec<u16>),
    Int8 {
        values: Vec<i8>,
        scales: Vec<f32>,
    },
}

impl Plane {
    /// Zeroes; `None` where there is no memory for them.
    pub(super) fn new(shape: &KvShape, block_count: usize) -> Option<Self> {
        let heads = (shape.block_size * shape.kv_heads).checked_mul(block_count)?;
        let len = heads.checked_mul(shape.head_dim)?;
        let memory = match shape.kv_type {
            KvType::F32 => Memory::F32(zeroes(len)?),
            KvType::Bf16 => Memory::Bf16(zeroes(len)?),
            KvType::F16 => Memory::F16(zeroes(len)?),
            KvType::Int8 => Memory::Int8 { values: zeroes(len)?, scales: zeroes(heads)? },
        };
        Some(Self { memory })
    }

    /// The plane as the kernels read it.
    pub(super) fn slice(&self) -> KvSlice<'_> {
        match &self.memory {
            Memory::F32(values) => KvSlice::F32(values),
            Memory::Bf16(values) => KvSlice::Bf16(values),
            Memory::F16(values) => KvSlice::F16(values),
            Memory::Int8 { values, scales } => KvSlice::Int8 { values, scales },
        }
    }

    /// The plane as the kernels write it.
    pub(crate) fn slice_mut(&mut self) -> KvSliceMut<'_> {
        match &mut self.memory {
            Memory::F32(values) => KvSliceMut::F32(values),
            Memory::Bf16(values) => KvSliceMut::Bf16(values),
            Memory::F16(values) => KvSliceMut::F16(values),
            Memory::Int8 { values, scales } => KvSliceMut::Int8 { values, scales },
        }
    }
}
