//! One task of a bf16 GEMM on tiles: a chunk of weight panels times all rows of the task.
#![allow(unsafe_code, reason = "accesses packed weights and activations through pointers")]

use std::arch::x86_64::{__m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_storeu_si512};

use crate::amx::block::{TileBlock, block_1x1, block_1x4, block_2x2};
use crate::amx::tile::{
    AMX_BF16_DEPTH, AMX_BF16_TILE_LEN, AMX_TILE_BYTES, AMX_TILE_ROW_BYTES, AMX_TILE_ROWS,
    configure, release,
};
use crate::lanes::LANES;
use crate::source_rows::SourceRows;

/// Tiles along the inner dimension in a block when more than 32 rows share the weights. Two panels
/// of a block (16 KiB each) then stay in the L1 cache while all rows are multiplied with them.
const BLOCK_TILES: usize = 16;
/// Values of one panel in a block.
const BLOCK_PANEL_LEN: usize = BLOCK_TILES * AMX_BF16_TILE_LEN;
/// Panels that are multiplied with all rows before the next ones.
const PANELS_PER_PASS: usize = 2;
/// Weights that [`block_2x2`] prefetches per tile along the inner dimension: four cache lines.
const PREFETCHED_PER_TILE: usize = 128;

/// Rounds up to 16 rows to bf16 (to nearest, ties to even) and packs them as a row tile:
/// `[columns / 32][16][32]`. `packed` has a whole number of tiles that covers all columns; columns
/// beyond those of the source are set to zero. Rows beyond those of the source are not written.
///
/// # Safety
/// AVX-512 F, BW, VL and BF16 are available, and `source` has at most 16 rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn pack_row_tile(source: SourceRows<'_>, packed: &mut [u16]) {
    debug_assert!(source.rows <= AMX_TILE_ROWS);
    let whole = source.columns / AMX_BF16_DEPTH;
    let tiles = packed.len() / AMX_BF16_TILE_LEN;
    debug_assert!(packed.len() >= AMX_TILE_ROWS * source.columns);
    for row in 0..source.rows {
        let from = source.row(row);
        let mut tail = [0.0; AMX_BF16_DEPTH];
        tail[..from.len() % AMX_BF16_DEPTH].copy_from_slice(&from[whole * AMX_BF16_DEPTH..]);
        let to = packed.as_mut_ptr().wrapping_add(row * AMX_BF16_DEPTH);
        for tile in 0..tiles {
            // SAFETY: `source.row` has returned a slice of `columns` values, of which `whole` times
            // 32 are read, and `tail` has 32. `packed` has `tiles` tiles of 16 rows of 32 values,
            // and `row` is below 16. AVX-512 F and BF16 are enabled for this function. Both types
            // of the transmute are 512 bits of plain data.
            unsafe {
                let (low, to) = match tile < whole {
                    true => {
                        (from.as_ptr().add(tile * AMX_BF16_DEPTH), to.add(tile * AMX_BF16_TILE_LEN))
                    }
                    false => (tail.as_ptr(), to.add(tile * AMX_BF16_TILE_LEN)),
                };
                let (low, high) = (_mm512_loadu_ps(low), _mm512_loadu_ps(low.add(LANES)));
                let bits: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(to.cast(), bits);
            }
        }
    }
}

/// Length of the scratch space for partial sums of a task of `rows` rows.
pub(crate) fn partial_sums_len(rows: usize) -> usize {
    rows * PANELS_PER_PASS * LANES
}

/// The operands of a task: some rows times a chunk of panels.
pub(crate) struct AmxChunkArgs {
    /// Activations packed by [`pack_row_tile`], one row tile after the other.
    pub packed: *const u16,
    /// Rows of the task; at least 1.
    pub rows: usize,
    /// Length of the inner dimension, padded with zeroes to a multiple of 32.
    pub padded_inner: usize,
    /// The first of the chunk's panels, each `[padded_inner / 2][16][2]` bf16 weights.
    pub panels: *const u16,
    /// Output: the sum of the first row and the chunk's first feature.
    pub out: *mut f32,
    /// Values from one row of `out` to the next.
    pub out_features: usize,
    /// Features of the chunk. If this is not a multiple of 16, the last panel is padded.
    pub features: usize,
    /// Scratch space for [`partial_sums_len`] sums, which are stored between two blocks of the
    /// inner dimension.
    pub partial_sums: *mut f32,
}

/// Computes a task: `out = activations * weights`.
///
/// # Safety
/// * The processor has AVX-512 F, BW, VL and BF16, and this process may use AMX with bf16: a
///   [`Path`](crate::path::Path) of the kind `Amx` exists.
/// * `rows` and `features` are at least 1, and `padded_inner` is a positive multiple of 32.
/// * `packed` is readable for `rows.div_ceil(16)` row tiles of `16 * padded_inner` values.
/// * `panels` is readable for `features.div_ceil(16)` panels of `16 * padded_inner` values.
/// * `out` is writable for `features` values in each of `rows` rows, `out_features` values apart;
///   `partial_sums` is valid for `partial_sums_len(rows)` values. No other thread accesses either.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn multiply_chunk(args: &AmxChunkArgs) {
    debug_assert!(args.rows > 0 && args.padded_inner.is_multiple_of(AMX_BF16_DEPTH));
    // SAFETY: the conditions of the callees are those of this function.
    unsafe {
        if args.rows <= AMX_TILE_ROWS {
            chunk_of_one_tile(args);
        } else {
            chunk_of_pairs(args);
        }
        release();
    }
}

/// At most 16 rows: four panels at a time, each streamed from memory once.
///
/// # Safety
/// As for [`multiply_chunk`], and `args.rows` is at most 16.
unsafe fn chunk_of_one_tile(args: &AmxChunkArgs) {
    let panel_len = args.padded_inner * LANES;
    let full = args.features / LANES;
    let mut panel = 0;
    // SAFETY: AMX may be used, and the tiles are configured for the task's rows before the blocks
    // run. `block` begins at the first panel and is moved on by the panels that are done. `panel +
    // count` is at most `full`, so 1 or 4 panels of weights and of output columns exist from there;
    // after the loop, `block` is at panel `full`, as `last_panel` requires.
    unsafe {
        configure(args.rows, args.rows, true);
        let mut block = TileBlock {
            a: args.packed,
            a_tile: 0,
            a_row_bytes: AMX_TILE_ROW_BYTES,
            a_step_bytes: AMX_TILE_BYTES,
            b: args.panels,
            b_panel: panel_len,
            depth: args.padded_inner / AMX_BF16_DEPTH,
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

/// The last panel for one row tile, if the panel is not full. Its sums go to a local tile first,
/// because those of the padding must not be written to the output.
///
/// # Safety
/// As for [`multiply_chunk`]. The tiles are configured for `rows` rows with `single` true, `full`
/// is `args.features / 16`, and `block` is at panel `full` and at a row tile of `rows` rows.
unsafe fn last_panel(args: &AmxChunkArgs, block: &TileBlock, rows: usize, full: usize) {
    let live = args.features - full * LANES;
    if live == 0 {
        return;
    }
    let mut padded = [0.0_f32; AMX_TILE_ROWS * LANES];
    // SAFETY: `live` is above 0, so panel `full` exists with its padding. `padded` takes 16 rows of
    // 16 sums, and `rows` is at most 16. The output has `live` more features in each of the rows.
    unsafe {
        block_1x1(&TileBlock { c: padded.as_mut_ptr(), c_row: LANES, ..*block });
        for row in 0..rows {
            let from = padded.as_ptr().add(row * LANES);
            std::ptr::copy_nonoverlapping(from, block.c.add(row * block.c_row), live);
        }
    }
}

/// More than 16 rows: pairs of panels times pairs of row tiles, then the rows and the panels that
/// are left.
///
/// # Safety
/// As for [`multiply_chunk`], and `args.rows` is above 16.
unsafe fn chunk_of_pairs(args: &AmxChunkArgs) {
    let full = args.features / LANES;
    let paired = full / 2 * 2;
    let pair_rows = args.rows / (2 * AMX_TILE_ROWS) * (2 * AMX_TILE_ROWS);
    let rest = args.rows - pair_rows;
    // SAFETY: AMX may be used, and before each kind of block the tiles are configured for its rows
    // and shape. The rows after `pair_rows`, `rest`, are fewer than 32 and get one or two tiles of
    // exactly these rows. The panels below `paired` are full and have partners.
    unsafe {
        blocks_of_pairs(args, pair_rows, paired);
        if rest > AMX_TILE_ROWS {
            configure(AMX_TILE_ROWS, rest - AMX_TILE_ROWS, false);
            for panel in (0..paired).step_by(2) {
                block_2x2(&whole_block(args, pair_rows, panel));
            }
        } else if rest > 0 {
            configure(rest, rest, true);
            for panel in 0..paired {
                block_1x1(&whole_block(args, pair_rows, panel));
            }
        }
        // The remaining panels: one without a partner, and one that is not full.
        for row in (0..args.rows).step_by(AMX_TILE_ROWS) {
            let rows = AMX_TILE_ROWS.min(args.rows - row);
            if full.is_multiple_of(2) && args.features == full * LANES {
                break;
            }
            configure(rows, rows, true);
            if full % 2 == 1 {
                block_1x1(&whole_block(args, row, full - 1));
            }
            last_panel(args, &whole_block(args, row, full), rows, full);
        }
    }
}

/// The block of all the inner dimension at a row tile and a panel.
///
/// # Safety
/// `args` is valid (see [`AmxChunkArgs`]). `row` is a multiple of 16 below the rows of the task, and
/// `panel` is at most the number of its full panels.
unsafe fn whole_block(args: &AmxChunkArgs, row: usize, panel: usize) -> TileBlock {
    let panel_len = args.padded_inner * LANES;
    // SAFETY: by the requirements, the pointers lie within the activations, weights and output of
    // the task or at most at their ends.
    unsafe {
        TileBlock {
            a: args.packed.add(row * args.padded_inner),
            a_tile: AMX_TILE_ROWS * args.padded_inner,
            a_row_bytes: AMX_TILE_ROW_BYTES,
            a_step_bytes: AMX_TILE_BYTES,
            b: args.panels.add(panel * panel_len),
            b_panel: panel_len,
            depth: args.padded_inner / AMX_BF16_DEPTH,
            begin: std::ptr::null(),
            begin_row: 0,
            c: args.out.add(row * args.out_features + panel * LANES),
            c_row: args.out_features,
            ahead: args.panels,
        }
    }
}

/// The first `pair_rows` rows, pairs of row tiles, times the first `paired` panels: one block of the
/// inner dimension after the other.
///
/// # Safety
/// As for [`multiply_chunk`]. `pair_rows` is a multiple of 32 and at most `args.rows`, and `paired`
/// is even and at most the number of full panels.
unsafe fn blocks_of_pairs(args: &AmxChunkArgs, pair_rows: usize, paired: usize) {
    let panel_len = args.padded_inner * LANES;
    let depth = args.padded_inner / AMX_BF16_DEPTH;
    // SAFETY: AMX may be used, and the tiles are configured for pairs of whole row tiles. Blocks
    // end at `depth`. Partial sums have 32 values for each row, and rows of a pass have separate
    // ones; `begin` reads only what the block before in the same pass has stored.
    unsafe {
        configure(AMX_TILE_ROWS, AMX_TILE_ROWS, false);
        for pass in (0..paired).step_by(PANELS_PER_PASS) {
            let pass_end = paired.min(pass + PANELS_PER_PASS);
            for from in (0..depth).step_by(BLOCK_TILES) {
                for panel in (pass..pass_end).step_by(2) {
                    // Offset of the weights that are read after this block, to prefetch them.
                    let next = if panel + 2 < pass_end {
                        (panel + 2) * panel_len + from * AMX_BF16_TILE_LEN
                    } else if from + BLOCK_TILES < depth {
                        pass * panel_len + (from + BLOCK_TILES) * AMX_BF16_TILE_LEN
                    } else {
                        pass_end * panel_len
                    };
                    for row in (0..pair_rows).step_by(2 * AMX_TILE_ROWS) {
                        let mut block = whole_block(args, row, panel);
                        let sums = ((panel - pass) / 2 * args.rows + row) * 2 * LANES;
                        let sums = args.partial_sums.add(sums);
                        block.a = block.a.add(from * AMX_BF16_TILE_LEN);
                        block.b = block.b.add(from * AMX_BF16_TILE_LEN);
                        block.depth = BLOCK_TILES.min(depth - from);
                        if from > 0 {
                            (block.begin, block.begin_row) = (sums, 2 * LANES);
                        }
                        if from + BLOCK_TILES < depth {
                            (block.c, block.c_row) = (sums, 2 * LANES);
                        }
                        // Each pair of row tiles prefetches a share, beginning with the first
                        // panel.
                        let step = row / (2 * AMX_TILE_ROWS) * BLOCK_TILES * PREFETCHED_PER_TILE;
                        let (of, at) = (step / BLOCK_PANEL_LEN, step % BLOCK_PANEL_LEN);
                        block.ahead = args.panels.wrapping_add(next + of * panel_len + at);
                        block_2x2(&block);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;

    /// Goal: rows are packed as bf16, rounded like the `half` crate does, and padded with zeroes.
    #[test]
    fn rows_are_rounded_into_tiles() {
        if !std::arch::is_x86_feature_detected!("avx512bf16") {
            return;
        }
        for (rows, columns) in [(1, 1), (3, 31), (16, 32), (16, 33), (7, 100), (16, 320)] {
            let x = random(1, rows * (columns + 5));
            let source = SourceRows { x: &x, stride: columns + 5, columns, rows };
            let mut packed = vec![7; AMX_TILE_ROWS * columns.next_multiple_of(AMX_BF16_DEPTH)];
            // SAFETY: BF16 was detected, and every processor with it has AVX-512 F, BW and VL; the
            // source has at most 16 rows.
            unsafe { pack_row_tile(source, &mut packed) }
            for (at, &got) in packed.iter().enumerate() {
                let (row, column) = (
                    at % AMX_BF16_TILE_LEN / AMX_BF16_DEPTH,
                    at / AMX_BF16_TILE_LEN * AMX_BF16_DEPTH + at % AMX_BF16_DEPTH,
                );
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
