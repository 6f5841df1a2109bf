//! The order in which a layer's keys or values are stored.

use crate::attention::amx_support;
use crate::lanes::LANES;
use crate::path::Path;

/// The order of the keys or values of one layer of the paged KV cache. In every layout a block is
/// one contiguous piece of memory, and all blocks have the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// `[block_count, block_size, kv_heads, head_dim]`: the values of one position and head are
    /// contiguous. The sum of weighted values and the AMX tiles read this order.
    Rows,
    /// Transposed in groups of 16 positions: `[block_count, kv_heads, block_size / 16, head_dim,
    /// 16]`. One vector load reads the same element of 16 keys, as the scores on SIMD lanes need
    /// it. Keys are transposed once, when they are written. In bf16 and 4 bits two successive
    /// elements of a position are adjacent: `[block_count, kv_heads, block_size / 16, head_dim / 2,
    /// 16, 2]`.
    Transposed {
        /// Positions per block, a multiple of 16.
        block_size: usize,
    },
}

impl KvLayout {
    /// The layout of keys that [`attention`](crate::attention()) reads fastest on `path`.
    ///
    /// `bf16` says whether keys are stored as bf16. Keys are stored as [`KvLayout::Rows`] if AMX
    /// tiles read them, if `block_size` is not a multiple of 16, or if they are bf16 and `head_dim`
    /// is odd; otherwise they are transposed.
    #[must_use]
    pub fn of_keys(path: Path, bf16: bool, block_size: usize, head_dim: usize) -> KvLayout {
        let whole = block_size.is_multiple_of(LANES) && !(bf16 && head_dim % 2 == 1);
        if whole && !(bf16 && amx_support::reads_bf16_heads(path, head_dim)) {
            KvLayout::Transposed { block_size }
        } else {
            KvLayout::Rows
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::PathKind;

    /// Goal: keys are stored transposed where a block holds whole groups of 16 positions, and as
    /// rows where AMX tiles read them.
    #[test]
    fn keys_are_transposed_where_simd_lanes_read_them() {
        for path in Path::supported() {
            let amx = path.kind() == PathKind::Amx;
            for (bf16, block_size, head_dim, transposed) in [
                (true, 16, 128, !amx),
                (true, 16, 80, true),
                (false, 16, 128, true),
                (true, 256, 2, true),
                (true, 16, 33, false),
                (false, 16, 33, true),
                (false, 8, 128, false),
                (true, 24, 128, false),
            ] {
                let got = KvLayout::of_keys(path, bf16, block_size, head_dim);
                let want =
                    if transposed { KvLayout::Transposed { block_size } } else { KvLayout::Rows };
                assert_eq!(got, want, "{path} {bf16} {block_size} {head_dim}");
            }
        }
    }
}
