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
