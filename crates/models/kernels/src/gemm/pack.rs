//! Packing of activations for the microkernel.
#![allow(unsafe_code, reason = "transposes blocks of 16 x 16 values in registers")]

#[cfg(target_arch = "x86_64")]
use crate::lanes::Avx512;
use crate::lanes::{LANES, Lanes, dispatch, load_some, store_some};
use crate::path::Path;
use crate::source_rows::SourceRows;

/// Minimum number of rows of a group that is transposed in registers.
const TRANSPOSED_ROWS_MIN: usize = 8;

/// Packs the rows of a group as `[columns][rows of the group]`. Missing rows and columns become
/// zero.
pub(crate) fn pack_group(path: Path, source: SourceRows<'_>, group: usize, packed: &mut [f32]) {
    debug_assert!(source.rows <= group && packed.len() >= group * source.columns);
    if source.rows < group || packed.len() > group * source.columns {
        packed.fill(0.0);
    }
    if (TRANSPOSED_ROWS_MIN..=LANES).contains(&group) {
        // SAFETY: the group has 8 to 16 rows, of which the source has at most that many, and
        // `packed` holds all columns of the group, as asserted in debug builds and ensured by
        // `Packed::pack`.
        unsafe { transpose_dispatch(path, source, group, packed) }
        return;
    }
    if group == 1 {
        if source.rows == 1 {
            packed[..source.columns].copy_from_slice(source.row(0));
        }
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
    for from in (0..source.columns).step_by(LANES) {
        let count = LANES.min(source.columns - from);
        // SAFETY: each row has `count` columns from `from` on, and `packed` holds a group for each.
        unsafe {
            let mut square = [L::splat(0.0); LANES];
            for (row, lanes) in square.iter_mut().enumerate().take(source.rows) {
                *lanes = load_some(source.row(row).as_ptr().add(from), count, 0.0);
            }
            store_transposed(&mut square, count, group, &mut packed[from * group..]);
        }
    }
}

/// Stores the first `count` columns of a square of 16 rows, `group` values of each.
///
/// # Safety
/// The instruction set of `L` is available. `group` and `count` are at most 16, and `packed` holds
/// at least `count * group` values. The values after them are stored later, so they may be
/// overwritten.
#[inline(always)]
unsafe fn store_transposed<L: Lanes>(
    square: &mut [L; LANES],
    count: usize,
    group: usize,
    packed: &mut [f32],
) {
    debug_assert!(group <= LANES && count <= LANES && packed.len() >= count * group);
    // SAFETY: by the caller. A column is stored as a whole vector, but not beyond the end of
    // `packed`. Its surplus lanes belong to the next columns.
    unsafe {
        L::transpose(square);
        for (k, column) in square.iter().enumerate().take(count) {
            let left = packed.len() - k * group;
            store_some(*column, packed.as_mut_ptr().add(k * group), left);
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
/// rows and columns become zero. Values so small that they are denormal become zero, too, as they
/// do in the products.
///
/// # Safety
/// AVX-512 F, BW, VL, DQ and BF16 are available. The source has at most `group` rows, `group` is at
/// most 16, and `packed` holds `group * columns.div_ceil(2)` values.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn pack_group_pairs(source: SourceRows<'_>, group: usize, packed: &mut [f32]) {
    debug_assert!(source.rows <= group && group <= LANES);
    debug_assert!(packed.len() >= group * source.columns.div_ceil(2));
    if source.rows < group || packed.len() > group * source.columns.div_ceil(2) {
        packed.fill(0.0);
    }
    for from in (0..source.columns).step_by(2 * LANES) {
        let pairs = LANES.min((source.columns - from).div_ceil(2));
        let packed = &mut packed[from / 2 * group..];
        // SAFETY: the instruction sets are enabled for this function. `packed` holds a group for
        // each of the `pairs` columns.
        unsafe {
            if group >= TRANSPOSED_ROWS_MIN {
                let mut square = [Avx512::splat(0.0); LANES];
                for (row, lanes) in square.iter_mut().enumerate().take(source.rows) {
                    *lanes = row_pairs(source, row, from);
                }
                store_transposed(&mut square, pairs, group, packed);
                continue;
            }
            for row in 0..source.rows {
                let lanes = row_pairs(source, row, from);
                if group == 1 {
                    store_some(lanes, packed.as_mut_ptr(), pairs);
                    continue;
                }
                let mut of_row = [0.0; LANES];
                lanes.store(of_row.as_mut_ptr());
                for (k, pair) in of_row.iter().enumerate().take(pairs) {
                    packed[k * group + row] = *pair;
                }
            }
        }
    }
}

/// Up to 16 pairs of a row from column `from` on, which the row has, rounded to bf16. Missing
/// columns are zero.
///
/// # Safety
/// AVX-512 F, BW, VL, DQ and BF16 are available.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn row_pairs(source: SourceRows<'_>, row: usize, from: usize) -> Avx512 {
    let (low, high) = source.row(row)[from..].split_at(LANES.min(source.columns - from));
    // SAFETY: the instruction sets are available. `load_some` reads what is left of the row, which
    // may be nothing.
    unsafe {
        let low = load_some::<Avx512>(low.as_ptr(), low.len(), 0.0);
        let high = load_some::<Avx512>(high.as_ptr(), high.len(), 0.0);
        low.round_pairs(high)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Goal: pairs are rounded as bf16 is defined, to the nearest value with ties to even, and are
    /// where the documentation says, for all sizes of groups and all ends of rows.
    #[test]
    fn pairs_are_rounded_and_placed() {
        if !std::is_x86_feature_detected!("avx512bf16") {
            return;
        }
        let value = |row: usize, column: usize| match (row * 7 + column) % 11 {
            0 => f32::from_bits(0x3f80_8000),
            1 => f32::from_bits(0xbf81_8000),
            2 => f32::INFINITY,
            _ => ((row * 131 + column * 31) as f32).sin() * 1e3,
        };
        for group in 1..=LANES {
            for columns in (1..=70).chain([127, 128]) {
                for rows in [1, group.div_ceil(2), group] {
                    let stride = columns + 3;
                    let x: Vec<f32> =
                        (0..rows * stride).map(|i| value(i / stride, i % stride)).collect();
                    let source = SourceRows { x: &x, stride, columns, rows };
                    let padded = columns.next_multiple_of(32) / 2;
                    let mut packed = vec![f32::NAN; padded * group];
                    // SAFETY: a machine with AVX-512 BF16 has the other sets.
                    unsafe { pack_group_pairs(source, group, &mut packed) };
                    for (at, pair) in packed.iter().enumerate() {
                        let (k, row) = (at / group, at % group);
                        let expected = [0, 1].map(|part| {
                            let is_there = row < rows && 2 * k + part < columns;
                            let value = if is_there { x[row * stride + 2 * k + part] } else { 0.0 };
                            half::bf16::from_f32(value).to_bits()
                        });
                        let got = [pair.to_bits() as u16, (pair.to_bits() >> 16) as u16];
                        assert_eq!(got, expected, "{group} {columns} {rows}: {k} {row}");
                    }
                }
            }
        }
    }
}
