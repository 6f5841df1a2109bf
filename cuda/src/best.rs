//! The largest logit of each row, found on the device, so that not all of them are copied from it.

use candle_core::{DType, Result, Tensor};
use stolon_backend::BestLogit;

/// The largest logit of each row of `logits`, `[rows, vocab_size]` in f32.
pub(crate) fn best_logits(logits: &Tensor) -> Result<Vec<BestLogit>> {
    let (rows, vocab_size) = logits.dims2()?;
    if rows == 0 {
        return Ok(Vec::new());
    }
    let largest = logits.max_keepdim(1)?;
    let tokens = Tensor::arange(0, vocab_size as u32, logits.device())?;
    let tokens = tokens.reshape((1, vocab_size))?.broadcast_as((rows, vocab_size))?;
    let none = Tensor::full(vocab_size as u32, (1, 1), logits.device())?;
    let none = none.broadcast_as((rows, vocab_size))?;
    // `argmax` does not say which of equal logits it finds.
    let first = logits.broadcast_eq(&largest)?.where_cond(&tokens, &none)?.min_keepdim(1)?;
    // A comparison with NaN is false.
    let usable = logits.lt(f32::INFINITY)?.min_keepdim(1)?;
    // One copy for all. Token ids are far below 2^24, up to which f32 is exact.
    let columns = [first.to_dtype(DType::F32)?, largest, usable.to_dtype(DType::F32)?];
    let found = Tensor::cat(&columns, 1)?.to_vec2::<f32>()?.into_iter().enumerate();
    let best = |(row, found): (usize, Vec<f32>)| match found[..] {
        [token, logit, 1.0] => Ok(BestLogit { token: token as u32, logit }),
        _ => Ok(BestLogit::of(&to_host(&logits.get(row)?)?)),
    };
    found.map(best).collect()
}

/// The values of a tensor of rank 1 that may be a part of a larger one. `to_vec1` would copy all of
/// the larger one from the device.
pub(crate) fn to_host(values: &Tensor) -> Result<Vec<f32>> {
    if values.device().is_cpu() { values.to_vec1() } else { values.force_contiguous()?.to_vec1() }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Goal: the result is that of the host's function, also for equal logits and for rows that
    /// cannot be used.
    #[test]
    fn the_device_finds_what_the_host_finds() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows = [
            [0.5, -1.0, 2.5, 2.5, 0.0],
            [-3.0, -2.0, -2.0, -5.0, -inf],
            [-inf, -inf, -inf, -inf, -inf],
            [1.0, nan, 2.0, 0.0, 3.0],
            [nan, nan, nan, nan, nan],
            [1.0, 2.0, inf, 0.0, inf],
            [7.0, 1.0, 2.0, 3.0, 4.0],
        ];
        let logits = Tensor::new(&rows, &Device::Cpu).expect("a tensor");
        let best = best_logits(&logits).expect("a result");
        for (row, best) in rows.iter().zip(&best) {
            let expected = BestLogit::of(row);
            assert_eq!(best.token, expected.token, "{row:?}");
            assert_eq!(best.logit.to_bits(), expected.logit.to_bits(), "{row:?}");
        }
        let tokens: Vec<u32> = best.iter().map(|best| best.token).collect();
        assert_eq!(tokens, [2, 1, 0, 1, 0, 2, 0]);
        let none = logits.narrow(0, 0, 0).expect("no row");
        assert!(best_logits(&none).expect("a result").is_empty());
    }
}
