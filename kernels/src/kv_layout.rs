//! How the heads of a layer stand in the store.

use super::lanes::LANES;
use super::{Path, attention};

/// Where the values of a position and head stand in a layer's keys or values. Either way a block is one piece
/// of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// `[block_count, block_size, kv_heads, head_dim]`: a head's values side by side, as they are weighted
    /// and added, and as tiles read keys.
    Rows,
    /// `[block_count, kv_heads, block_size / 16, head_dim, 16]`: 16 positions side by side, as scores on
    /// lanes want keys, so that these are turned once, when they are written. With bf16 two values of a
    /// position stand side by side: `[.., head_dim / 2, 16, 2]`.
    Turned {
        /// Positions of a block, a multiple of 16.
        block_size: usize,
    },
}

impl KvLayout {
    /// The layout in which attention on a path reads keys fastest, as bf16 or of another type.
    #[must_use]
    pub fn of_keys(path: Path, bf16: bool, block_size: usize, head_dim: usize) -> KvLayout {
        let whole = block_size.is_multiple_of(LANES) && !(bf16 && head_dim % 2 == 1);
        if whole && !(bf16 && attention::on_tiles(path, head_dim)) {
            KvLayout::Turned { block_size }
        } else {
            KvLayout::Rows
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PathKind;

    /// Goal: keys are turned where whole panels fit a block, and stay rows where tiles read them.
    #[test]
    fn keys_are_turned_where_lanes_read_them() {
        for path in Path::supported() {
            let tiles = path.kind() == PathKind::Amx;
            for (bf16, block_size, head_dim, turned) in [
                (true, 16, 128, !tiles),
                (true, 16, 80, true),
                (false, 16, 128, true),
                (true, 256, 2, true),
                (true, 16, 33, false),
                (false, 16, 33, true),
                (false, 8, 128, false),
                (true, 24, 128, false),
            ] {
                let got = KvLayout::of_keys(path, bf16, block_size, head_dim);
                let want = if turned { KvLayout::Turned { block_size } } else { KvLayout::Rows };
                assert_eq!(got, want, "{path} {bf16} {block_size} {head_dim}");
            }
        }
    }
}
