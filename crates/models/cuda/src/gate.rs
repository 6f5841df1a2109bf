//! The gate of an MLP, `function(gate) * up`, in one kernel.
//!
//! The CUDA kernel is in `kernels/gate.cu`. On the CPU, the functions of the CPU backend are used
//! instead.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail};
use stolon_checkpoint::GateFunction;
use stolon_kernels::{Path, clamped_swiglu, gelu_tanh_mul, silu_mul};

use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// Computes `function(gate) * up` in f32. A row of `x`, `[rows, 2 * width]`, has the elements of
/// `gate` followed by those of `up`. Returns `[rows, width]` in the type of `x`.
pub(crate) fn gate(x: &Tensor, function: GateFunction) -> Result<Tensor> {
    match x.device().is_metal() {
        true => separate_operations(x, function),
        false => x.contiguous()?.apply_op1_no_bwd(&Gate(function)),
    }
}

/// The same as [`gate`], with separate operations of candle.
fn separate_operations(x: &Tensor, function: GateFunction) -> Result<Tensor> {
    let dtype = x.dtype();
    let x = x.to_dtype(DType::F32)?;
    let width = x.dim(1)? / 2;
    let (gate, up) = (x.narrow(1, 0, width)?, x.narrow(1, width, width)?);
    let gated = match function {
        GateFunction::Silu => (gate.silu()? * up)?,
        GateFunction::GeluTanh => (gate.gelu()? * up)?,
        GateFunction::ClampedSwiglu { alpha, limit } => {
            let gate = gate.minimum(limit)?;
            let up = up.clamp(-limit, limit)?;
            let sigmoid = candle_nn::ops::sigmoid(&gate.affine(f64::from(alpha), 0.0)?)?;
            ((gate * sigmoid)? * up.affine(1.0, 1.0)?)?
        }
    };
    gated.to_dtype(dtype)
}

/// The operation of [`gate`].
struct Gate(GateFunction);

/// The sizes of the operands of [`Gate`].
struct Sizes {
    rows: usize,
    /// Number of elements of a row of the result.
    width: usize,
}

impl Sizes {
    /// Checks that the operand is contiguous and has the shape `[rows, 2 * width]`.
    fn of(x: &Layout) -> Result<Self> {
        match x.dims() {
            &[rows, both] if both.is_multiple_of(2) && x.is_contiguous() => {
                Ok(Self { rows, width: both / 2 })
            }
            dims => bail!("gate: expected contiguous rows of an even length, got {dims:?}"),
        }
    }

    fn shape(&self) -> Shape {
        Shape::from((self.rows, self.width))
    }
}

impl Gate {
    /// Computes the gate of the rows `x`, `[rows, 2 * width]`.
    fn of_rows<T: WithDType>(&self, x: &[T], width: usize) -> Result<Vec<T>> {
        let path = Path::detect().map_err(candle_core::Error::wrap)?;
        let mut output = Vec::with_capacity(x.len() / 2);
        for row in x.chunks_exact(2 * width.max(1)) {
            let mut gate: Vec<f32> = row.iter().map(|x| x.to_f64() as f32).collect();
            let up = gate.split_off(width);
            match self.0 {
                GateFunction::Silu => silu_mul(path, &mut gate, &up),
                GateFunction::GeluTanh => gelu_tanh_mul(path, &mut gate, &up),
                GateFunction::ClampedSwiglu { alpha, limit } => {
                    clamped_swiglu(path, &mut gate, &up, alpha, limit);
                }
            }
            output.extend(gate.into_iter().map(|value| T::from_f64(value.into())));
        }
        Ok(output)
    }
}

impl CustomOp1 for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let sizes = Sizes::of(layout)?;
        let width = sizes.width;
        let output = match x {
            CpuStorage::F32(_) => CpuStorage::F32(self.of_rows(elements(x, layout)?, width)?),
            CpuStorage::F16(_) => CpuStorage::F16(self.of_rows(elements(x, layout)?, width)?),
            CpuStorage::BF16(_) => CpuStorage::BF16(self.of_rows(elements(x, layout)?, width)?),
            _ => bail!("gate: expected f32, f16 or bf16"),
        };
        Ok((output, sizes.shape()))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let sizes = Sizes::of(layout)?;
        Ok((cuda::gate(self.0, &sizes, x, layout)?, sizes.shape()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Goal: the operation and candle's separate operations, which are used on Metal, agree within
    /// rounding for each function and type, and for rows that are a part of a tensor.
    #[test]
    fn one_pass_equals_separate_operations() {
        let functions = [
            GateFunction::Silu,
            GateFunction::GeluTanh,
            GateFunction::ClampedSwiglu { alpha: 1.7, limit: 3.0 },
        ];
        let values = (0..5 * 38).map(|i| 9.0 * (0.7 * i as f32).sin());
        let x = Tensor::from_iter(values, &Device::Cpu).and_then(|x| x.reshape((5, 38)));
        let x = x.expect("a matrix");
        let x = x.narrow(0, 1, 3).expect("rows");
        for function in functions {
            for (dtype, error) in [(DType::F32, 1e-5), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
                let x = x.to_dtype(dtype).expect("a type");
                let got = gate(&x, function).expect("a result");
                assert_eq!((got.dims(), got.dtype()), (&[3, 19][..], dtype));
                let expected = separate_operations(&x, function).expect("a result");
                let rows = |x: Tensor| {
                    let x = x.to_dtype(DType::F32).and_then(|x| x.flatten_all());
                    x.and_then(|x| x.to_vec1::<f32>()).expect("numbers")
                };
                for (got, expected) in rows(got).into_iter().zip(rows(expected)) {
                    // For a negative number, GELU subtracts numbers that are almost equal, so its
                    // relative error is large.
                    let close = (got - expected).abs() <= error * expected.abs() + 1e-5;
                    assert!(close, "{function:?}, {dtype:?}: {got}, expected {expected}");
                }
            }
        }
        gate(&x.narrow(1, 0, 37).expect("columns"), GateFunction::Silu).expect_err("an odd length");
    }
}
