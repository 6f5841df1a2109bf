//! Low-rank updates of the results of a product: `y += B h`, where `h` has few values. With
//! `h = scale * A x` this is what a LoRA adapter adds to a projection (Hu et al., 2021).
//!
//! The update is computed in the epilogue of the product with the model's own weights, for rows
//! that have an adapter: the results are in the cache then, other rows are not touched, and rows
//! with different adapters can be in one product.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use crate::buffer::Buffer;
use crate::error::KernelError;
use crate::gemm::{Bf16, F16, F32, SingleForm};
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;
use crate::prefetch::{CACHE_LINE_BYTES, prefetch_l2};
use crate::tensor_type::TensorType;

/// Number of panels whose sums are in registers at the same time.
const PANELS: usize = 4;

/// A matrix `[out_features, rank]` whose product with a vector is added to a row of results.
#[derive(Debug)]
pub struct LowRank {
    dtype: TensorType,
    out_features: usize,
    rank: usize,
    path: Path,
    /// `[panel][rank][16]`, so that the update of some features reads successive memory.
    data: Buffer,
}

impl LowRank {
    /// Packs weights of the type F32, F16 or BF16.
    ///
    /// `bytes` holds little-endian weights in row-major order, `[out_features, rank]`.
    ///
    /// # Errors
    /// * [`KernelError::Empty`] if a dimension is zero.
    /// * [`KernelError::NotRounded`] for another type.
    /// * [`KernelError::WrongByteCount`] if `bytes` does not have the size of the shape.
    pub fn pack(
        dtype: TensorType,
        out_features: usize,
        rank: usize,
        bytes: &[u8],
        path: Path,
    ) -> Result<LowRank, KernelError> {
        if out_features == 0 || rank == 0 {
            return Err(KernelError::Empty { out_features, in_features: rank });
        }
        if dtype.block_len() != 1 {
            return Err(KernelError::NotRounded { from: dtype, to: TensorType::F32 });
        }
        let width = dtype.block_bytes();
        let expected = out_features.saturating_mul(rank).saturating_mul(width);
        if bytes.len() != expected {
            let (in_features, got) = (rank, bytes.len());
            return Err(KernelError::WrongByteCount {
                dtype,
                out_features,
                in_features,
                expected,
                got,
            });
        }
        let panel = rank * LANES * width;
        let mut data = Buffer::zeroed::<u8>(out_features.div_ceil(LANES) * panel);
        let panels = data.slice_mut::<u8>().chunks_exact_mut(panel);
        for (panel, rows) in panels.zip(bytes.chunks(panel)) {
            for (lane, row) in rows.chunks_exact(rank * width).enumerate() {
                for (value, to) in
                    row.chunks_exact(width).zip(panel.chunks_exact_mut(LANES * width))
                {
                    to[lane * width..][..width].copy_from_slice(value);
                }
            }
        }
        Ok(LowRank { dtype, out_features, rank, path, data })
    }

    /// Number of output features: rows of the matrix.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of columns of the matrix.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.byte_len()
    }

    /// Prefetches the weights that [`Self::add`] reads for `count` features from `first` on, which
    /// is a multiple of 16.
    pub fn prefetch(&self, first: usize, count: usize) {
        let bytes = self.rank * self.dtype.block_bytes();
        let begin = self.data.slice::<u8>().as_ptr().wrapping_add(first * bytes);
        for line in (0..count * bytes).step_by(CACHE_LINE_BYTES) {
            prefetch_l2(begin.wrapping_add(line));
        }
    }

    /// `y[i] += sum over j of w[first + i, j] * h[j]`: updates the features of a row of results
    /// from `first` on, which is a multiple of 16, as [`RowSums::feature`](crate::RowSums::feature)
    /// is. `h` holds `rank` values.
    ///
    /// The products of a feature are added in the order of `j`, beginning with 0, and the sum is
    /// added to `y`. So its bits do not depend on which other features are updated with it.
    ///
    /// # Panics
    /// If `h` does not hold `rank` values, `first` is not a multiple of 16, or `y` has more
    /// features than there are from `first` on.
    pub fn add(&self, first: usize, h: &[f32], y: &mut [f32]) {
        assert_eq!(h.len(), self.rank, "h must hold one value per column");
        assert!(first.is_multiple_of(LANES), "expected a multiple of {LANES}, got {first}");
        assert!(
            first <= self.out_features && y.len() <= self.out_features - first,
            "features {first}..{} of {}",
            first + y.len(),
            self.out_features
        );
        let (path, start) = (self.path, first * self.rank);
        let (to, len) = (y.as_mut_ptr(), y.len());
        // SAFETY: `to` is valid for `len` values. The features from `first` on begin with a panel,
        // at `start` in the packed values, and the panels that contain the `len` features after it
        // are packed, padded with zeroes.
        unsafe {
            match self.dtype {
                TensorType::F16 => {
                    add_f16(path, self.data.slice::<u16>()[start..].as_ptr(), h, to, len);
                }
                TensorType::Bf16 => {
                    add_bf16(path, self.data.slice::<u16>()[start..].as_ptr(), h, to, len);
                }
                _ => add_f32(path, self.data.slice::<f32>()[start..].as_ptr(), h, to, len),
            }
        }
    }
}

/// # Safety
/// The instruction set of `L` is available, `y` is valid for `len` values, and `panels` is readable
/// for `len` features, rounded up to whole panels of `16 * h.len()` values.
#[inline(always)]
unsafe fn add_lanes<L: Lanes, F: SingleForm>(
    panels: *const F::Raw,
    h: &[f32],
    y: *mut f32,
    len: usize,
) {
    let panel = h.len() * LANES;
    let mut at = 0;
    while at < len {
        let count = (len - at).div_ceil(LANES).min(PANELS);
        // SAFETY: `count` panels begin at feature `at`, which is below `len`, so they are readable,
        // and each has at least one feature, which `load_some` and `store_some` do not exceed.
        unsafe {
            let from = panels.add(at / LANES * panel);
            let mut sums = [L::splat(0.0); PANELS];
            if count == PANELS {
                for (j, &value) in h.iter().enumerate() {
                    let value = L::splat(value);
                    for (index, sum) in sums.iter_mut().enumerate() {
                        let weights = F::load::<L>(from.add(index * panel + j * LANES));
                        *sum = weights.mul_add(value, *sum);
                    }
                }
            } else {
                for (index, sum) in sums.iter_mut().enumerate().take(count) {
                    for (j, &value) in h.iter().enumerate() {
                        let weights = F::load::<L>(from.add(index * panel + j * LANES));
                        *sum = weights.mul_add(L::splat(value), *sum);
                    }
                }
            }
            for (index, sum) in sums.into_iter().enumerate().take(count) {
                let (to, left) = (y.add(at + index * LANES), len - at - index * LANES);
                store_some(load_some::<L>(to, left, 0.0).add(sum), to, left);
            }
        }
        at += count * LANES;
    }
}

/// Defines the kernel for a type of stored weights.
macro_rules! updates {
    ($($name:ident, $body:ident: $form:ident($raw:ty);)*) => {$(
        /// # Safety
        /// As for [`add_lanes`].
        #[inline(always)]
        unsafe fn $body<L: Lanes>(panels: *const $raw, h: &[f32], y: *mut f32, len: usize) {
            // SAFETY: the conditions are those of this function.
            unsafe { add_lanes::<L, $form>(panels, h, y, len) }
        }
        dispatch! {
            /// # Safety
            /// As for [`add_lanes`], apart from the instruction set.
            unsafe fn $name(panels: *const $raw, h: &[f32], y: *mut f32, len: usize) = $body
        }
    )*};
}

updates! {
    add_f32, add_f32_lanes: F32(f32);
    add_f16, add_f16_lanes: F16(u16);
    add_bf16, add_bf16_lanes: Bf16(u16);
}

#[cfg(test)]
mod tests;
