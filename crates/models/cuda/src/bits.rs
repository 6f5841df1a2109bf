//! Tensors as bytes. Blocks of the KV store are copied as bytes, whatever their elements are, and
//! states in f32 are stored in them without rounding. The bytes of a number are in the order of the
//! machine.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail};
use half::{bf16, f16};

use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// The bytes of `x`, `[rows, columns]`: `[rows, bytes of a row]` in u8.
pub(crate) fn to_bytes(x: &Tensor) -> Result<Tensor> {
    reinterpret(x, DType::U8)
}

/// The reverse of [`to_bytes`]: rows of `bytes` as numbers of the type `dtype`, of which they are a
/// whole number.
pub(crate) fn from_bytes(bytes: &Tensor, dtype: DType) -> Result<Tensor> {
    reinterpret(bytes, dtype)
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

/// The bytes of the elements of a tensor on the CPU.
fn bytes_of<T: WithDType, const N: usize>(
    x: &CpuStorage,
    layout: &Layout,
    bytes: fn(T) -> [u8; N],
) -> Result<Vec<u8>> {
    Ok(elements::<T>(x, layout)?.iter().flat_map(|x| bytes(*x)).collect())
}

/// The reverse of [`bytes_of`].
fn numbers<T, const N: usize>(bytes: &[u8], number: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
}

impl CustomOp1 for Reinterpret {
    fn name(&self) -> &'static str {
        "reinterpret"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (dtype, bytes) = match x {
            CpuStorage::U8(_) => (DType::U8, elements::<u8>(x, layout)?.to_vec()),
            CpuStorage::F32(_) => (DType::F32, bytes_of(x, layout, f32::to_ne_bytes)?),
            CpuStorage::F16(_) => (DType::F16, bytes_of(x, layout, f16::to_ne_bytes)?),
            CpuStorage::BF16(_) => (DType::BF16, bytes_of(x, layout, bf16::to_ne_bytes)?),
            _ => bail!("reinterpret: expected u8, f32, f16 or bf16"),
        };
        let shape = self.shape(dtype, layout)?;
        let result = match self.0 {
            DType::U8 => CpuStorage::U8(bytes),
            DType::F32 => CpuStorage::F32(numbers(&bytes, f32::from_ne_bytes)),
            DType::F16 => CpuStorage::F16(numbers(&bytes, f16::from_ne_bytes)),
            DType::BF16 => CpuStorage::BF16(numbers(&bytes, bf16::from_ne_bytes)),
            other => bail!("reinterpret: expected u8, f32, f16 or bf16, got {other:?}"),
        };
        Ok((result, shape))
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
        let bytes = to_bytes(&x).expect("a type of the KV store");
        assert_eq!((bytes.dims(), bytes.dtype()), (&[2, 8][..], DType::U8));
        for dtype in [DType::U8, DType::F32, DType::F16, DType::BF16] {
            let stored = from_bytes(&bytes, dtype).expect("a type of the KV store");
            assert_eq!(stored.dims(), [2, 8 / dtype.size_in_bytes()]);
            assert_eq!(stored.dtype(), dtype);
            let back = to_bytes(&stored).and_then(|bytes| from_bytes(&bytes, DType::F32));
            let back = back.and_then(|x| x.flatten_all()?.to_vec1::<f32>());
            let back: Vec<u32> = back.expect("numbers").into_iter().map(f32::to_bits).collect();
            assert_eq!(back, bits[2..6]);
        }
    }

    /// Goal: rows that are not a whole number of elements are refused.
    #[test]
    fn parts_of_elements_are_refused() {
        let bytes = Tensor::zeros((2, 6), DType::U8, &Device::Cpu).expect("bytes");
        from_bytes(&bytes, DType::F16).expect("whole elements");
        from_bytes(&bytes, DType::F32).expect_err("a part of an element");
    }
}
