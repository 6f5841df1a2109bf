//! Packing of activations for the microkernel.
#![allow(unsafe_code, reason = "transposes blocks of 16 x 16 values in registers")]

use crate::elementwise::{load_some, store_some};
use crate::lanes::{LANES, Lanes, dispatch};
use crate::path::Path;
use crate::source_rows::SourceRows;

/// Packs the rows of a group as `[columns][rows of the group]`. Missing rows and columns become
/// zero.
pub(crate) fn pack_group(path: Path, source: SourceRows<'_>, group: usize, packed: &mut [f32]) {
    debug_assert!(source.rows <= group && packed.len() >= group * source.columns);
    if source.rows < group || packed.len() > group * source.columns {
        packed.fill(0.0);
    }
    if (8..=LANES).contains(&group) {
        // SAFETY: the group has 8 to 16 rows, of which the source has at most that many, and
        // `packed` holds all columns of the group, as asserted in debug builds and ensured by
        // `Packed::pack`.
        unsafe { transpose_dispatch(path, source, group, packed) }
        return;
    }
    // Short runs of columns keep the cache lines that are written in the L1 cache.
    for from in (0..source.columns).step_by(64) {
        let to = source.columns.min(from + 64);
        for row in 0..source.rows {
            for (k, value) in (from..to).zip(&source.row(row)[from..to]) {
                packed[k * group + row] = *value;
            }
        }
    }
}

/// Packs 16 columns at a time by transposing them in registers.
///
/// # Safety
/// The instruction set of `L` is available. The source has at most `group` rows, `group` is at most
/// 16, and `packed` holds `group * columns` values.
#[inline(always)]
unsafe fn transpose_lanes<L: Lanes>(source: SourceRows<'_>, group: usize, packed: &mut [f32]) {
    let end = packed.as_ptr().wrapping_add(packed.len());
    for from in (0..source.columns).step_by(LANES) {
        let count = LANES.min(source.columns - from);
        // SAFETY: each row has `count` columns from `from` on, and `(from + k) * group` is below
        // the length of `packed`. A column is stored as a whole vector, but not beyond the end of
        // `packed`. Its surplus lanes are zero or belong to the next columns, which are stored
        // later.
        unsafe {
            let mut square = [L::splat(0.0); LANES];
            for (row, lanes) in square.iter_mut().enumerate().take(source.rows) {
                *lanes = load_some(source.row(row).as_ptr().add(from), count, 0.0);
            }
            L::transpose(&mut square);
            for (k, column) in square.iter().enumerate().take(count) {
                let to = packed.as_mut_ptr().add((from + k) * group);
                let left = end.offset_from_unsigned(to);
                store_some(*column, to, left);
            }
        }
    }
}
dispatch! {
    /// # Safety
    /// The source has at most `group` rows, `group` is at most 16, and `packed` holds
    /// `group * columns` values.
    unsafe fn transpose_dispatch(source: SourceRows<'_>, group: usize, packed: &mut [f32]) = transpose_lanes
}

/// Packs the rows of a group, rounded to bf16, as `[columns / 2][rows of the group]` pairs. Missing
/// rows and columns become zero.
pub(crate) fn pack_group_pairs(source: SourceRows<'_>, group: usize, packed: &mut [f32]) {
    packed.fill(0.0);
    for row in 0..source.rows {
        for (k, pair) in source.row(row).chunks(2).enumerate() {
            let second = pair.get(1).copied().unwrap_or(0.0);
            packed[k * group + row] = pair_bits(pair[0], second);
        }
    }
}

/// Rounds two activations to bf16 and returns the bits of the pair as an f32.
fn pair_bits(first: f32, second: f32) -> f32 {
    let bits = |value| u32::from(half::bf16::from_f32(value).to_bits());
    f32::from_bits(bits(first) | bits(second) << 16)
}
