//! The largest logits of rows, found on the device, so that whole rows need not be copied from it.
//!
//! The CUDA kernel is in `kernels/top_logits.cu`; on the CPU, the engine's function takes its place.

use candle_core::{CpuStorage, CustomOp2, Device, Layout, Result, Shape, Tensor, bail};
use stolon_backend::TokenLogit;

use crate::plan::indices;
use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// Most logits of a row that are found on a device; the kernel allows up to 512.
const COUNT_MAX: usize = 256;
/// The count of a row that the host has to look at; the kernel has the same number.
const UNUSABLE: u32 = u32::MAX;

/// How many of the largest logits of a row `device` finds.
pub(crate) fn count_max(device: &Device) -> usize {
    match device {
        Device::Cpu | Device::Cuda(_) => COUNT_MAX,
        Device::Metal(_) => 0,
    }
}

/// The largest logits of each row of `logits`, `[rows, vocab_size]` in f32, as many as `counts` says, as
/// [`TokenLogit::largest`] returns them.
pub(crate) fn top_logits(logits: &Tensor, counts: &[u32]) -> Result<Vec<Vec<TokenLogit>>> {
    let Some(&count_max) = counts.iter().max() else { return Ok(Vec::new()) };
    let op = TopLogits { count_max: count_max as usize };
    let found = logits.apply_op2_no_bwd(&indices(counts, logits.device())?, &op)?;
    let found = found.to_vec2::<u32>()?.into_iter().zip(counts).enumerate();
    let top = |(row, (found, count)): (usize, (Vec<u32>, &u32))| match found.split_first() {
        Some((&found_count, pairs)) if found_count != UNUSABLE => {
            let pairs = pairs.as_chunks().0.iter().take(found_count as usize);
            let top = pairs.map(|&[token, bits]| TokenLogit { token, logit: f32::from_bits(bits) });
            Ok(top.filter(|top| top.logit > f32::NEG_INFINITY).collect())
        }
        _ => Ok(TokenLogit::largest(&to_host(&logits.get(row)?)?, *count as usize)),
    };
    found.map(top).collect()
}

/// The values of a tensor of rank 1 that may be a part of a larger one. `to_vec1` would copy all of
/// the larger one from the device.
pub(crate) fn to_host(values: &Tensor) -> Result<Vec<f32>> {
    if values.device().is_cpu() { values.to_vec1() } else { values.force_contiguous()?.to_vec1() }
}

/// The operation on logits, `[rows, vocab_size]` in f32, and counts, `[rows]` in u32. Its result is
/// `[rows, 1 + 2 * count_max]` in u32: how many were found, then tokens with the bits of their logits.
struct TopLogits {
    /// The largest of all counts.
    count_max: usize,
}

/// The sizes of the operands of [`TopLogits`].
struct Sizes {
    rows: usize,
    vocab_size: usize,
}

impl TopLogits {
    /// Checks that the operands are contiguous and that their shapes match.
    fn sizes(&self, logits: &Layout, counts: &Layout) -> Result<Sizes> {
        let ([rows, vocab_size], [count]) = (logits.dims(), counts.dims()) else {
            bail!("top logits: expected 2 and 1 dimensions");
        };
        let contiguous = logits.is_contiguous() && counts.is_contiguous();
        if !contiguous || rows != count || self.count_max > COUNT_MAX || *vocab_size == 0 {
            bail!("top logits: expected contiguous operands of matching shapes");
        }
        Ok(Sizes { rows: *rows, vocab_size: *vocab_size })
    }

    fn output_shape(&self, sizes: &Sizes) -> Shape {
        Shape::from((sizes.rows, 1 + 2 * self.count_max))
    }
}

impl CustomOp2 for TopLogits {
    fn name(&self) -> &'static str {
        "top-logits"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        logits_layout: &Layout,
        counts: &CpuStorage,
        counts_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = self.sizes(logits_layout, counts_layout)?;
        let logits = elements::<f32>(logits, logits_layout)?;
        let counts = elements::<u32>(counts, counts_layout)?;
        let width = 1 + 2 * self.count_max;
        let mut output = vec![0; sizes.rows * width];
        let rows = logits.chunks_exact(sizes.vocab_size).zip(counts);
        for (to, (row, count)) in output.chunks_exact_mut(width).zip(rows) {
            if !row.iter().all(|logit| *logit < f32::INFINITY) {
                to[0] = UNUSABLE;
                continue;
            }
            let top = TokenLogit::largest(row, *count as usize);
            to[0] = top.len() as u32;
            for (to, top) in to[1..].as_chunks_mut().0.iter_mut().zip(top) {
                *to = [top.token, top.logit.to_bits()];
            }
        }
        Ok((CpuStorage::U32(output), self.output_shape(&sizes)))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        logits: &candle_core::CudaStorage,
        logits_layout: &Layout,
        counts: &candle_core::CudaStorage,
        counts_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let sizes = self.sizes(logits_layout, counts_layout)?;
        let output = cuda::find(self, &sizes, (logits, logits_layout), (counts, counts_layout))?;
        Ok((output, self.output_shape(&sizes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the result is that of the engine's function, also for equal logits, for rows that cannot be
    /// used, for different counts in a batch and for a part of a tensor.
    #[test]
    fn the_device_finds_what_the_host_finds() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows = [
            [9.0, 9.0, 9.0, 9.0, 9.0],
            [0.5, -1.0, 2.5, 2.5, 0.0],
            [-3.0, -2.0, -2.0, -5.0, -inf],
            [-inf, -inf, -inf, -inf, -inf],
            [1.0, nan, 2.0, 0.0, 3.0],
            [nan, nan, nan, nan, nan],
            [1.0, 2.0, inf, 0.0, inf],
            [7.0, 1.0, 2.0, 3.0, 4.0],
        ];
        let logits = Tensor::new(&rows, &Device::Cpu).expect("a tensor");
        let part = logits.narrow(0, 1, 7).expect("rows");
        for counts in [[1; 7], [5; 7], [1, 2, 3, 4, 5, 200, 3]] {
            let top = top_logits(&part, &counts).expect("a result");
            for ((row, top), count) in rows[1..].iter().zip(&top).zip(counts) {
                let expected = TokenLogit::largest(row, count as usize);
                // NaN is not equal to itself.
                assert_eq!(format!("{top:?}"), format!("{expected:?}"), "{row:?}");
            }
        }
        let none = logits.narrow(0, 0, 0).expect("no row");
        assert!(top_logits(&none, &[]).expect("a result").is_empty());
        top_logits(&part, &[1; 6]).expect_err("a count is missing");
        top_logits(&part, &[COUNT_MAX as u32 + 1; 7]).expect_err("too many");
    }
}
