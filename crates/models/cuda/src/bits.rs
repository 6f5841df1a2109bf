//! Tensors whose bits are read as another type, so that states in f32 can be stored in blocks of
//! f16 or bf16 without rounding. An element of f32 becomes two neighboring ones, in the byte order
//! of the machine.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};

use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// Number of elements of the type `dtype` that have the bits of `count` elements of f32.
pub(crate) fn width(count: usize, dtype: DType) -> usize {
    count * (size_of::<f32>() / dtype.size_in_bytes())
}

/// Reads the bits of `x`, `[rows, columns]` in f32, as the type `dtype`: `[rows, width(columns)]`.
pub(crate) fn from_f32(x: &Tensor, dtype: DType) -> Result<Tensor> {
    reinterpret(x, dtype)
}

/// The reverse of [`from_f32`].
pub(crate) fn to_f32(x: &Tensor) -> Result<Tensor> {
    reinterpret(x, DType::F32)
}

fn reinterpret(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let x = x.contiguous()?;
    if x.dtype() == dtype {
        return Ok(x);
    }
    match x.device().is_metal() {
        true => {
            let on_host = x.to_device(&candle_core::Device::Cpu)?;
            on_host.apply_op1_no_bwd(&Reinterpret(dtype))?.to_device(x.device())
        }
        false => x.apply_op1_no_bwd(&Reinterpret(dtype)),
    }
}

/// The operation of [`reinterpret`], with the type of its result.
struct Reinterpret(DType);

impl Reinterpret {
    /// The shape of the result for an operand `[rows, columns]` of the type `from`.
    fn shape(&self, from: DType, layout: &Layout) -> Result<Shape> {
        let (from, to) = (from.size_in_bytes(), self.0.size_in_bytes());
        match layout.dims() {
            &[rows, columns] if layout.is_contiguous() && (columns * from).is_multiple_of(to) => {
                Ok(Shape::from((rows, columns * from / to)))
            }
            dims => bail!("reinterpret: expected contiguous rows of whole elements, got {dims:?}"),
        }
    }
}

impl CustomOp1 for Reinterpret {
    fn name(&self) -> &'static str {
        "reinterpret"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let from_halves = |bits: Vec<u16>| {
            let pairs = bits.as_chunks::<2>().0.iter();
            let values = pairs.map(|[a, b]| {
                let ([a0, a1], [b0, b1]) = (a.to_ne_bytes(), b.to_ne_bytes());
                f32::from_ne_bytes([a0, a1, b0, b1])
            });
            CpuStorage::F32(values.collect())
        };
        let to_halves = |values: &[f32]| -> Vec<u16> {
            let halves = values.iter().flat_map(|value| {
                let [a0, a1, b0, b1] = value.to_ne_bytes();
                [u16::from_ne_bytes([a0, a1]), u16::from_ne_bytes([b0, b1])]
            });
            halves.collect()
        };
        let dtype = match x {
            CpuStorage::F32(_) => DType::F32,
            CpuStorage::F16(_) => DType::F16,
            CpuStorage::BF16(_) => DType::BF16,
            _ => bail!("reinterpret: expected f32, f16 or bf16"),
        };
        let result = match (dtype, self.0) {
            (DType::F32, DType::F16) => {
                let bits = to_halves(elements(x, layout)?).into_iter();
                CpuStorage::F16(bits.map(f16::from_bits).collect())
            }
            (DType::F32, DType::BF16) => {
                let bits = to_halves(elements(x, layout)?).into_iter();
                CpuStorage::BF16(bits.map(bf16::from_bits).collect())
            }
            (DType::F16, DType::F32) => {
                from_halves(elements::<f16>(x, layout)?.iter().map(|x| x.to_bits()).collect())
            }
            (DType::BF16, DType::F32) => {
                from_halves(elements::<bf16>(x, layout)?.iter().map(|x| x.to_bits()).collect())
            }
            (from, to) => bail!("reinterpret: expected f32 and a half type, got {from:?}, {to:?}"),
        };
        Ok((result, self.shape(dtype, layout)?))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let shape = self.shape(x.dtype(), layout)?;
        Ok((cuda::reinterpret(x, layout, self.0, shape.elem_count())?, shape))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Goal: all bits come back, also of numbers that are invalid in the other type, for rows that
    /// are a part of a tensor.
    #[test]
    fn all_bits_come_back() {
        let bits = [0, 1, 0x7fc0_0001, 0xff80_0000, 0x3f80_0001, 0x7c01_fc01, u32::MAX, 7];
        let values = bits.map(f32::from_bits);
        let x = Tensor::new(&values, &Device::Cpu).and_then(|x| x.reshape((4, 2)));
        let x = x.and_then(|x| x.narrow(0, 1, 2)).expect("rows");
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let stored = from_f32(&x, dtype).expect("a type of the KV store");
            assert_eq!(stored.dims(), [2, width(2, dtype)]);
            assert_eq!(stored.dtype(), dtype);
            let back = to_f32(&stored).and_then(|x| x.flatten_all()?.to_vec1::<f32>());
            let back: Vec<u32> = back.expect("numbers").into_iter().map(f32::to_bits).collect();
            assert_eq!(back, bits[2..6]);
        }
    }
}
