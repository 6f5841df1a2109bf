//! Which shapes attention computes on AMX tiles.

use crate::path::{Path, PathKind};

/// Length of the inner dimension that one tile product takes: bf16 values in a row of a tile.
const HEAD_DIM_STEP: usize = 32;
#[cfg(target_arch = "x86_64")]
const _: () = assert!(HEAD_DIM_STEP == crate::amx::tile::AMX_BF16_DEPTH);

/// Whether attention on this path computes bf16 keys and values of heads of this length on AMX
/// tiles, if the keys are stored as rows.
pub(crate) fn reads_bf16_heads(path: Path, head_dim: usize) -> bool {
    path.kind() == PathKind::Amx && head_dim.is_multiple_of(HEAD_DIM_STEP)
}
