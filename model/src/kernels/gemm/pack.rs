//! Rows of activations as register tiles read them.

use super::group_rows;

/// Packed activations, padded to whole groups, needed for `rows` rows.
pub(in crate::kernels) fn packed_rows(rows: usize, group_max: usize) -> usize {
    let full = rows / group_max * group_max;
    if full == rows { rows } else { full + group_rows(rows - full, group_max) }
}

/// Packs group `index` of `x`: `[rows, inner]` into `[padded_inner][rows of the group]`, zeroes where
/// there is no row or column.
pub(in crate::kernels) fn pack_group(
    x: &[f32],
    inner: usize,
    padded_inner: usize,
    first_row: usize,
    group: usize,
    packed: &mut [f32],
) {
    let rows = x.len() / inner;
    debug_assert_eq!(packed.len(), group * padded_inner);
    let live = group.min(rows - first_row);
    if live < group || padded_inner > inner {
        packed.fill(0.0);
    }
    // By short runs of columns, so that the lines being filled stay in the nearest cache.
    for from in (0..inner).step_by(64) {
        let to = inner.min(from + 64);
        for row in 0..live {
            let start = (first_row + row) * inner;
            for (k, value) in (from..to).zip(&x[start + from..start + to]) {
                packed[k * group + row] = *value;
            }
        }
    }
}

/// As [`pack_group`], rounded to bf16: `[padded_inner / 2][rows of the group]` pairs.
pub(in crate::kernels) fn pack_group_pairs(
    x: &[f32],
    inner: usize,
    first_row: usize,
    group: usize,
    packed: &mut [f32],
) {
    let live = group.min(x.len() / inner - first_row);
    packed.fill(0.0);
    for row in 0..live {
        let values = x[(first_row + row) * inner..][..inner].chunks(2);
        for (k, pair) in values.enumerate() {
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
