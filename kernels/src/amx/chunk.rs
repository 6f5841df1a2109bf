//! The bf16 product of a chunk of panels with all rows of a task, on tiles.
#![allow(unsafe_code, reason = "walks packed weights and activations by pointer")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::x86_64::{__m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_storeu_si512};

use super::{
    Block, DEPTH, ROWS, TILE, TILE_BYTES, TILE_ROW_BYTES, block_1x1, block_1x4, block_2x2,
    configure, release,
};
use crate::lanes::LANES;
use crate::source_rows::SourceRows;

/// Tiles along the inner dimension in a block, when many rows share the weights: two panels of
/// them (16 KiB) then stay in the nearest cache while the rows pass by.
const BLOCK_DEPTH: usize = 16;

/// Values of a block of one panel.
const BLOCK: usize = BLOCK_DEPTH * TILE;
/// Panels that pass by the same block of activations before the next one.
const NEAR: usize = 2;
/// Weights that a step along the depth of a block fetches ahead: four cache lines.
const AHEAD: usize = 128;

/// Packs a row tile, rounded to bf16 (to nearest, ties to even): `[columns / 32][16][32]`, zeroes
/// where there is no column; rows that do not exist are left as they are.
///
/// # Safety
/// AVX-512 BF16 is available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn pack_row_tile(source: SourceRows<'_>, packed: &mut [u16]) {
    debug_assert!(source.rows <= ROWS && packed.len() >= ROWS * source.columns);
    let whole = source.columns / DEPTH;
    let tiles = packed.len() / TILE;
    for row in 0..source.rows {
        let from = source.row(row);
        let mut tail = [0.0; DEPTH];
        tail[..from.len() % DEPTH].copy_from_slice(&from[whole * DEPTH..]);
        let to = packed.as_mut_ptr().wrapping_add(row * DEPTH);
        for tile in 0..tiles {
            // SAFETY: a row has `whole` times 32 values, each tile a line for it; the set is enabled.
            unsafe {
                let (low, to) = match tile < whole {
                    true => (from.as_ptr().add(tile * DEPTH), to.add(tile * TILE)),
                    false => (tail.as_ptr(), to.add(tile * TILE)),
                };
                let (low, high) = (_mm512_loadu_ps(low), _mm512_loadu_ps(low.add(LANES)));
                let bits: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.cast(), bits);
            }
        }
    }
}

/// Sums that wait between two blocks of the inner dimension, for a task of `rows` rows.
pub(crate) fn waiting_len(rows: usize) -> usize {
    rows * NEAR * LANES
}

/// A task: some rows times a chunk of panels.
pub(crate) struct TileArgs {
    /// Packed activations of the first row, which begins a row tile.
    pub packed: *const u16,
    pub rows: usize,
    pub padded_inner: usize,
    /// The chunk's first panel.
    pub panels: *const u16,
    /// Where the first row's sum for the chunk's first feature goes.
    pub out: *mut f32,
    /// Values between two rows of `out`.
    pub out_features: usize,
    /// Features of the chunk; the last panel may be less than full.
    pub features: usize,
    /// Room for [`waiting_len`] sums, where they wait between two blocks of the inner dimension.
    pub waiting: *mut f32,
}

/// Computes a task.
///
/// # Safety
/// The process may use AMX; `packed` holds the rows and `panels` the features' panels; `out` takes
/// `features` values in each of `rows` rows, touched by nobody else.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn chunk(args: &TileArgs) {
    // SAFETY: the caller's promise; tiles are configured for the rows each block has.
    unsafe {
        if args.rows <= ROWS {
            chunk_of_one_tile(args);
        } else {
            chunk_of_pairs(args);
        }
        release();
    }
}

/// At most 16 rows: four panels at a time, streamed from memory once.
unsafe fn chunk_of_one_tile(args: &TileArgs) {
    let panel_len = args.padded_inner * LANES;
    let full = args.features / LANES;
    let mut panel = 0;
    // SAFETY: as in `chunk`.
    unsafe {
        configure(args.rows, args.rows, true);
        let mut block = Block {
            a: args.packed,
            a_tile: 0,
            a_row_bytes: TILE_ROW_BYTES,
            a_step_bytes: TILE_BYTES,
            b: args.panels,
            b_panel: panel_len,
            depth: args.padded_inner / DEPTH,
            begin: std::ptr::null(),
            begin_row: 0,
            c: args.out,
            c_row: args.out_features,
            ahead: args.panels,
        };
        while panel < full {
            let count = if full - panel >= 4 { 4 } else { 1 };
            if count == 4 {
                block_1x4(&block);
            } else {
                block_1x1(&block);
            }
            panel += count;
            block.b = block.b.add(count * panel_len);
            block.c = block.c.add(count * LANES);
        }
        last_panel(args, &block, args.rows, full);
    }
}

/// The last panel, if it is not full, for one row tile: its sums go through a spare tile.
unsafe fn last_panel(args: &TileArgs, block: &Block, rows: usize, full: usize) {
    let live = args.features - full * LANES;
    if live == 0 {
        return;
    }
    let mut spare = [0.0_f32; ROWS * LANES];
    // SAFETY: as in `chunk`; the spare tile takes 16 rows of 16 sums.
    unsafe {
        block_1x1(&Block { c: spare.as_mut_ptr(), c_row: LANES, ..*block });
        for row in 0..rows {
            let from = spare.as_ptr().add(row * LANES);
            std::ptr::copy_nonoverlapping(from, block.c.add(row * block.c_row), live);
        }
    }
}

/// More than 16 rows: pairs of panels, blocked along the inner dimension, pairs of row tiles within.
unsafe fn chunk_of_pairs(args: &TileArgs) {
    let panel_len = args.padded_inner * LANES;
    let row_tile_len = ROWS * args.padded_inner;
    let depth = args.padded_inner / DEPTH;
    let full = args.features / LANES;
    let pair_rows = args.rows / (2 * ROWS) * (2 * ROWS);
    let rest = args.rows - pair_rows;
    let whole = |row: usize, panel: usize| {
        // SAFETY: `row` begins a row tile and `panel` is below what the task has.
        unsafe {
            Block {
                a: args.packed.add(row * args.padded_inner),
                a_tile: row_tile_len,
                a_row_bytes: TILE_ROW_BYTES,
                a_step_bytes: TILE_BYTES,
                b: args.panels.add(panel * panel_len),
                b_panel: panel_len,
                depth,
                begin: std::ptr::null(),
                begin_row: 0,
                c: args.out.add(row * args.out_features + panel * LANES),
                c_row: args.out_features,
                ahead: args.panels,
            }
        }
    };
    // SAFETY: as in `chunk`; `waiting` has 32 sums for each of the task's rows.
    unsafe {
        configure(ROWS, ROWS, false);
        let paired = full / 2 * 2;
        for near in (0..paired).step_by(NEAR) {
            let near_end = paired.min(near + NEAR);
            for from in (0..depth).step_by(BLOCK_DEPTH) {
                for panel in (near..near_end).step_by(2) {
                    // What comes after this block of the two panels, for fetching it ahead.
                    let next = if panel + 2 < near_end {
                        (panel + 2) * panel_len + from * TILE
                    } else if from + BLOCK_DEPTH < depth {
                        near * panel_len + (from + BLOCK_DEPTH) * TILE
                    } else {
                        near_end * panel_len
                    };
                    for row in (0..pair_rows).step_by(2 * ROWS) {
                        let mut block = whole(row, panel);
                        let sums = ((panel - near) / 2 * args.rows + row) * 2 * LANES;
                        let sums = args.waiting.add(sums);
                        block.a = block.a.add(from * TILE);
                        block.b = block.b.add(from * TILE);
                        block.depth = BLOCK_DEPTH.min(depth - from);
                        if from > 0 {
                            (block.begin, block.begin_row) = (sums, 2 * LANES);
                        }
                        if from + BLOCK_DEPTH < depth {
                            (block.c, block.c_row) = (sums, 2 * LANES);
                        }
                        // Each pair of row tiles fetches a part, the first panel's first.
                        let step = row / (2 * ROWS) * BLOCK_DEPTH * AHEAD;
                        let (of, at) = (step / BLOCK, step % BLOCK);
                        block.ahead = args.panels.wrapping_add(next + of * panel_len + at);
                        block_2x2(&block);
                    }
                }
            }
        }
        if rest > ROWS {
            configure(ROWS, rest - ROWS, false);
            for panel in (0..paired).step_by(2) {
                block_2x2(&whole(pair_rows, panel));
            }
        } else if rest > 0 {
            configure(rest, rest, true);
            for panel in 0..paired {
                block_1x1(&whole(pair_rows, panel));
            }
        }
        // What is left: a panel without a partner, and one that is not full.
        for row in (0..args.rows).step_by(ROWS) {
            let rows = ROWS.min(args.rows - row);
            if full.is_multiple_of(2) && args.features == full * LANES {
                break;
            }
            configure(rows, rows, true);
            if full % 2 == 1 {
                block_1x1(&whole(row, full - 1));
            }
            last_panel(args, &whole(row, full), rows, full);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// Goal: rows stand in tiles as bf16, rounded as `half` rounds, with zeroes behind them.
    #[test]
    fn rows_are_rounded_into_tiles() {
        if !std::arch::is_x86_feature_detected!("avx512bf16") {
            return;
        }
        for (rows, columns) in [(1, 1), (3, 31), (16, 32), (16, 33), (7, 100), (16, 320)] {
            let x = random(1, rows * (columns + 5));
            let source = SourceRows { x: &x, stride: columns + 5, columns, rows };
            let mut packed = vec![7; ROWS * columns.next_multiple_of(DEPTH)];
            // SAFETY: the set was found.
            unsafe { pack_row_tile(source, &mut packed) }
            for (at, &got) in packed.iter().enumerate() {
                let (row, column) = (at % TILE / DEPTH, at / TILE * DEPTH + at % DEPTH);
                let want = match (row < rows, column < columns) {
                    (true, true) => half::bf16::from_f32(x[row * (columns + 5) + column]).to_bits(),
                    (true, false) => 0,
                    (false, _) => 7,
                };
                assert_eq!(got, want, "[{rows}, {columns}], row {row}, column {column}");
            }
        }
    }
}
