//! [`Plane`]: the keys, the values, or the inputs of the convolution, of one layer.

use candle_core::{DType, Device, Result, Tensor};
use stolon_checkpoint::kv::KvElement;

use crate::kv_write;

/// The memory of one layer's keys, values, or inputs of its convolution, at all positions of the
/// store. The index of a position is its slot.
#[derive(Clone, Debug)]
pub(crate) struct Plane {
    /// `[block_count * block_size, kv_heads * head_dim]`. For [`KvElement::Int8`], the codes from
    /// -127 to 127 in two's complement, because candle has no tensors of i8.
    pub(crate) elements: Tensor,
    /// The scales, `[block_count * block_size, kv_heads]` in f32, for [`KvElement::Int8`]; `None`
    /// for other types.
    pub(crate) scales: Option<Tensor>,
}

/// Type of the tensor with the elements of a plane.
pub(super) fn dtype(element: KvElement) -> DType {
    match element {
        KvElement::F32 => DType::F32,
        KvElement::F16 => DType::F16,
        KvElement::Bf16 => DType::BF16,
        // 4 bits are refused when a backend is opened.
        KvElement::Int8 | KvElement::Int4 => DType::U8,
    }
}

impl Plane {
    /// A plane of zeros with `positions` positions of `heads` heads of `head_dim` elements.
    pub(super) fn new(
        element: KvElement,
        (positions, heads, head_dim): (usize, usize, usize),
        device: &Device,
    ) -> Result<Self> {
        let scales = match element {
            KvElement::Int8 => Some(Tensor::zeros((positions, heads), DType::F32, device)?),
            _ => None,
        };
        let elements = Tensor::zeros((positions, heads * head_dim), dtype(element), device)?;
        Ok(Self { elements, scales })
    }

    /// Writes `rows`, `[count, kv_heads * head_dim]`, to `slots`, `[count]` in u32. A slot may occur
    /// several times only with equal rows.
    pub(crate) fn write(&self, rows: &Tensor, slots: &Tensor) -> Result<()> {
        match &self.scales {
            None => kv_write::write(&self.elements, rows, slots),
            Some(scales) => kv_write::write_int8(&self.elements, scales, rows, slots),
        }
    }

    /// Type of the rows that [`write`](Self::write) expects.
    pub(crate) fn row_dtype(&self) -> DType {
        if self.scales.is_some() { DType::F32 } else { self.elements.dtype() }
    }

    /// The values at `slots`, `[count]` in u32: `[count, kv_heads * head_dim]` in f32.
    pub(crate) fn gather(&self, slots: &Tensor) -> Result<Tensor> {
        let elements = self.elements.index_select(slots, 0)?.to_dtype(DType::F32)?;
        let Some(scales) = &self.scales else { return Ok(elements) };
        // A code that is negative was read as a number from 128 on.
        let is_negative = elements.ge(128_f32)?.to_dtype(DType::F32)?;
        let codes = (elements - is_negative.affine(256.0, 0.0)?)?;
        let (count, heads) = (slots.dim(0)?, scales.dim(1)?);
        let scales = scales.index_select(slots, 0)?.reshape((count, heads, 1))?;
        codes.reshape((count, heads, ()))?.broadcast_mul(&scales)?.flatten_from(1)
    }

    /// The tensors in the order in which the bytes of a block are copied.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.elements).chain(&self.scales)
    }
}
