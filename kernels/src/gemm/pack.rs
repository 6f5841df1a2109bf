//! Rows of activations as register tiles read them.
#![allow(unsafe_code, reason = "turns squares of lanes")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use crate::Path;
use crate::elementwise::{load_some, store_some};
use crate::lanes::{LANES, Lanes, dispatch};
use crate::operand::Source;

/// Packs a group: `[columns][rows of the group]`, zeroes where there is no row or column.
pub(crate) fn pack_group(path: Path, source: Source<'_>, group: usize, packed: &mut [f32]) {
    debug_assert!(source.rows <= group && packed.len() >= group * source.columns);
    if source.rows < group || packed.len() > group * source.columns {
        packed.fill(0.0);
    }
    if (8..=LANES).contains(&group) {
        // SAFETY: sizes were checked.
        unsafe { turn_dispatch(path, source, group, packed) }
        return;
    }
    // By short runs of columns, so that the lines being filled stay in the nearest cache.
    for from in (0..source.columns).step_by(64) {
        let to = source.columns.min(from + 64);
        for row in 0..source.rows {
            for (k, value) in (from..to).zip(&source.row(row)[from..to]) {
                packed[k * group + row] = *value;
            }
        }
    }
}

/// Sixteen columns at a time, turned in registers.
#[inline(always)]
unsafe fn turn_lanes<L: Lanes>(source: Source<'_>, group: usize, packed: &mut [f32]) {
    let end = packed.as_ptr().wrapping_add(packed.len());
    for from in (0..source.columns).step_by(LANES) {
        let count = LANES.min(source.columns - from);
        // SAFETY: the caller's promise. A column is written with what stands behind it, up to the end;
        // what is behind it is written next, or was zero and is written as zero.
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
    /// The source has at most `group` rows, at most 16, and `packed` takes all of its columns.
    unsafe fn turn_dispatch(source: Source<'_>, group: usize, packed: &mut [f32]) = turn_lanes
}

/// As [`pack_group`], rounded to bf16: `[columns / 2][rows of the group]` pairs.
pub(crate) fn pack_group_pairs(source: Source<'_>, group: usize, packed: &mut [f32]) {
    packed.fill(0.0);
    for row in 0..source.rows {
        for (k, pair) in source.row(row).chunks(2).enumerate() {
            let second = pair.get(1).copied().unwrap_or(0.0);
            packed[k * group + row] = pair_bits(pair[0], second);
        }
    }
}

/// Rounds a pair of activations to bf16, in the place of an f32.
fn pair_bits(first: f32, second: f32) -> f32 {
    let bits = |value| u32::from(half::bf16::from_f32(value).to_bits());
    f32::from_bits(bits(first) | bits(second) << 16)
}
