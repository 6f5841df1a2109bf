//! Draws tokens from rows of logits on the device, so that no row is copied from it.
//!
//! The CUDA kernel is in `kernels/draw.cu`. On the CPU, [`Draw::of`] is used instead.

use candle_core::{CpuStorage, CustomOp2, Device, Layout, Result, Shape, Tensor, bail};
use stolon_backend::{Draw, SamplingError};

use crate::storage::elements;

#[cfg(feature = "cuda-core")]
mod cuda;

/// Largest vocabulary size. The kernel has the same constant.
const VOCAB_MAX: usize = 1 << 20;
/// The value in place of a token if the host has to choose the token from the row. The kernel has
/// the same constant.
const UNUSABLE: u32 = u32::MAX;
/// Number of 32-bit words of a [`Draw`] on the device.
const DRAW_WIDTH: usize = 6;

/// Whether tokens can be drawn on `device` from rows of `vocab_size` logits.
pub(crate) fn is_supported(device: &Device, vocab_size: usize) -> bool {
    vocab_size <= VOCAB_MAX && !device.is_metal()
}

/// Uploads draws in the format of the kernel, `[draws, DRAW_WIDTH]` in u32.
pub(crate) fn upload(draws: &[Draw], device: &Device) -> Result<Tensor> {
    let numbers: Vec<u32> = draws.iter().flat_map(numbers).collect();
    Tensor::from_vec(numbers, (draws.len(), DRAW_WIDTH), device)
}

/// Draws a token from each row of `logits`, `[rows, vocab_size]` in f32, with the row's entry in
/// the uploaded `draws`. Returns `[rows]` in u32, where [`UNUSABLE`] says that the host has to
/// draw.
pub(crate) fn draw_tokens(logits: &Tensor, draws: &Tensor) -> Result<Tensor> {
    logits.apply_op2_no_bwd(draws, &DrawTokens)
}

/// Copies the results of [`draw_tokens`] to the host, as [`Draw::of`] returns them, for the first
/// `draws.len()` rows. Rows from which the device could not draw are copied to the host.
pub(crate) fn drawn_tokens(
    tokens: &Tensor,
    draws: &[Draw],
    logits: &Tensor,
) -> Result<Vec<std::result::Result<u32, SamplingError>>> {
    let token = |(row, (token, draw)): (usize, (u32, &Draw))| match token {
        UNUSABLE => Ok(draw.of(&to_host(&logits.get(row)?)?)),
        token => Ok(Ok(token)),
    };
    tokens.to_vec1()?.into_iter().zip(draws).enumerate().map(token).collect()
}

/// A draw in the format of the kernel.
fn numbers(draw: &Draw) -> [u32; DRAW_WIDTH] {
    let &Draw { temperature, top_k, top_p, min_p, uniform } = draw;
    let uniform = uniform.to_bits();
    [
        temperature.to_bits(),
        top_p.to_bits(),
        min_p.to_bits(),
        // For the kernel, 0 means that all tokens are kept.
        top_k.map_or(0, |count| u32::try_from(count.max(1)).unwrap_or(u32::MAX)),
        uniform as u32,
        (uniform >> 32) as u32,
    ]
}

/// The inverse of [`numbers`].
fn draw_of([temperature, top_p, min_p, top_k, low, high]: [u32; DRAW_WIDTH]) -> Draw {
    Draw {
        temperature: f32::from_bits(temperature),
        top_p: f32::from_bits(top_p),
        min_p: f32::from_bits(min_p),
        top_k: (top_k != 0).then_some(top_k as usize),
        uniform: f64::from_bits(u64::from(high) << 32 | u64::from(low)),
    }
}

/// The values of a tensor of rank 1 that may be a part of a larger one. `to_vec1` would copy all of
/// the larger one from the device.
pub(crate) fn to_host(values: &Tensor) -> Result<Vec<f32>> {
    if values.device().is_cpu() { values.to_vec1() } else { values.force_contiguous()?.to_vec1() }
}

/// The operation on logits, `[rows, vocab_size]` in f32, and draws, `[rows, DRAW_WIDTH]` in u32. It
/// returns the tokens, `[rows]` in u32.
struct DrawTokens;

/// The sizes of the operands of [`DrawTokens`].
struct Sizes {
    rows: usize,
    vocab_size: usize,
}

impl Sizes {
    /// Checks that the operands are contiguous and that their shapes match.
    fn new(logits: &Layout, draws: &Layout) -> Result<Self> {
        let ([rows, vocab_size], [count, DRAW_WIDTH]) = (logits.dims(), draws.dims()) else {
            bail!("draw: expected rows of logits and draws of {DRAW_WIDTH} numbers");
        };
        let contiguous = logits.is_contiguous() && draws.is_contiguous();
        if !contiguous || rows != count || !(1..=VOCAB_MAX).contains(vocab_size) {
            bail!("draw: expected contiguous operands of matching shapes");
        }
        Ok(Self { rows: *rows, vocab_size: *vocab_size })
    }
}

impl CustomOp2 for DrawTokens {
    fn name(&self) -> &'static str {
        "draw"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        logits_layout: &Layout,
        draws: &CpuStorage,
        draws_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = Sizes::new(logits_layout, draws_layout)?;
        let rows = elements::<f32>(logits, logits_layout)?.chunks_exact(sizes.vocab_size);
        let draws = elements::<u32>(draws, draws_layout)?.as_chunks().0;
        let token = |(row, draw): (&[f32], &_)| draw_of(*draw).of(row).unwrap_or(UNUSABLE);
        let tokens = rows.zip(draws).map(token).collect();
        Ok((CpuStorage::U32(tokens), Shape::from(sizes.rows)))
    }

    #[cfg(feature = "cuda-core")]
    fn cuda_fwd(
        &self,
        logits: &candle_core::CudaStorage,
        logits_layout: &Layout,
        draws: &candle_core::CudaStorage,
        draws_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let sizes = Sizes::new(logits_layout, draws_layout)?;
        let tokens = cuda::draw(&sizes, (logits, logits_layout), (draws, draws_layout))?;
        Ok((tokens, Shape::from(sizes.rows)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the device returns the same tokens and errors as [`Draw::of`], for all kinds of draws,
    /// for rows that cannot be used and for a part of a tensor.
    #[test]
    fn the_device_draws_what_the_host_draws() {
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
        let draw_tokens = |logits: &Tensor, draws: &[Draw]| {
            let tokens = draw_tokens(logits, &upload(draws, &Device::Cpu)?)?;
            drawn_tokens(&tokens, draws, logits)
        };
        let logits = Tensor::new(&rows, &Device::Cpu).expect("a tensor");
        let part = logits.narrow(0, 1, 7).expect("rows");
        for uniform in [0.0, 0.3, 0.5, 0.999, 1.0 - f64::EPSILON] {
            let all = Draw { temperature: 0.8, uniform, ..Draw::GREEDY };
            for draw in [
                Draw::GREEDY,
                all,
                Draw { top_k: Some(3), ..all },
                Draw { top_k: Some(u32::MAX as usize), min_p: 0.2, ..all },
                Draw { top_p: 0.7, ..all },
            ] {
                assert_eq!(draw_of(numbers(&draw)), draw);
                let tokens = draw_tokens(&part, &[draw; 7]).expect("a result");
                for (row, token) in rows[1..].iter().zip(&tokens) {
                    // NaN is not equal to itself.
                    assert_eq!(format!("{token:?}"), format!("{:?}", draw.of(row)), "{row:?}");
                }
            }
        }
        draw_tokens(&part, &[Draw::GREEDY; 6]).expect_err("a draw is missing");
    }
}
