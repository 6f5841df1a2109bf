//! Rows of activations as register tiles read them.

use crate::kernels::operand::Source;

/// Packs a group: `[columns][rows of the group]`, zeroes where there is no row or column.
pub(in crate::kernels) fn pack_group(source: Source<'_>, group: usize, packed: &mut [f32]) {
    debug_assert!(source.rows <= group && packed.len() >= group * source.columns);
    if source.rows < group || packed.len() > group * source.columns {
        packed.fill(0.0);
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

/// As [`pack_group`], rounded to bf16: `[columns / 2][rows of the group]` pairs.
pub(in crate::kernels) fn pack_group_pairs(source: Source<'_>, group: usize, packed: &mut [f32]) {
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
