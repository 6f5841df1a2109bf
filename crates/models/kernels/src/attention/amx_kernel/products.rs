//! The two products of attention on tiles: scores, and weighted values.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]

use std::arch::asm;
use std::ops::Range;

use super::work::{AmxWork, POSITIONS_PER_AMX_TILE};
use crate::amx::block::{TileBlock, block_1x1, block_1x4};
use crate::amx::tile::{AMX_BF16_DEPTH, AMX_TILE_BYTES, AMX_TILE_ROW_BYTES, AMX_TILE_ROWS};
use crate::lanes::LANES;

/// Tile registers of sums that a block uses.
const SUM_TILES: usize = 4;

impl AmxWork<'_> {
    /// Computes the scores of the tile's positions `rows` for all queries of the reader group.
    ///
    /// # Safety
    /// The tile registers are configured for 16 rows with `single` true, and the queries are
    /// packed. `rows` lies within the tile that begins at `begin`, is not empty, begins at a
    /// multiple of 32 and covers `seen`, which the block table covers.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn score(&self, begin: usize, rows: Range<usize>, seen: Range<usize>) {
        let dim = self.args.head_dim;
        let end = rows.end.min((seen.end - begin).next_multiple_of(AMX_TILE_ROWS));
        let mut keys = [(std::ptr::null(), 0); POSITIONS_PER_AMX_TILE / AMX_TILE_ROWS];
        // SAFETY: each `row` is a multiple of 16 below `end`, so `begin + row` is below the end of
        // `seen`. All keys of a tile have the same distance between rows. `scores` has a row of
        // `queries` for each position; with 16 queries, the rows of 64 positions are contiguous.
        // `q` has `dim / 32` tiles for each 16 queries. Rows of positions outside `seen` are
        // unspecified; their scores are masked later.
        unsafe {
            for row in (rows.start..end).step_by(AMX_TILE_ROWS) {
                keys[row / AMX_TILE_ROWS] = self.key_rows(begin, row, &seen);
            }
            let mut row = rows.start;
            while row < end {
                let keys = &keys[row / AMX_TILE_ROWS..end / AMX_TILE_ROWS];
                let scores = self.scores.add(row * self.queries);
                let tall = self.queries == AMX_TILE_ROWS && keys.len() >= SUM_TILES;
                let count = if tall { SUM_TILES } else { 1 };
                for next in begin + row + POSITIONS_PER_AMX_TILE
                    ..begin + row + POSITIONS_PER_AMX_TILE + count * AMX_TILE_ROWS
                {
                    self.prefetch(self.keys, next);
                }
                if tall {
                    let keys = [keys[0], keys[1], keys[2], keys[3]];
                    block_4x1(
                        keys.map(|(at, _)| at),
                        2 * keys[0].1,
                        self.q,
                        dim / AMX_BF16_DEPTH,
                        scores,
                    );
                } else {
                    self.score_row(keys[0], scores);
                }
                row += count * AMX_TILE_ROWS;
            }
        }
    }

    /// Computes the scores of 16 positions for all queries of the reader group. The keys are given
    /// as [`key_rows`](AmxWork::key_rows) returns them.
    ///
    /// # Safety
    /// The tile registers are configured for 16 rows with `single` true, and the queries are
    /// packed. `keys` is readable for 16 rows of `head_dim` values, `row_values` apart, and
    /// `scores` is writable for 16 rows of `self.queries`.
    #[inline]
    unsafe fn score_row(&self, (keys, row_values): (*const u16, usize), scores: *mut f32) {
        let dim = self.args.head_dim;
        let block = TileBlock {
            a: keys,
            a_tile: 0,
            a_row_bytes: row_values * size_of::<u16>(),
            a_step_bytes: AMX_BF16_DEPTH * size_of::<u16>(),
            b: self.q.cast::<u16>().cast_const(),
            b_panel: AMX_TILE_ROWS * dim,
            depth: dim / AMX_BF16_DEPTH,
            begin: std::ptr::null(),
            begin_row: 0,
            c: scores,
            c_row: self.queries,
            ahead: keys,
        };
        // SAFETY: the block reads `dim / 32` tiles of the keys' 16 rows and of each of the `queries
        // / 16` panels of `q`, and writes 16 rows of `queries` scores. No other thread accesses the
        // scores.
        unsafe { blocks(block, self.queries / AMX_TILE_ROWS, false) };
    }

    /// Adds the weighted values of the tile's positions `rows` to the state of 16 queries.
    ///
    /// # Safety
    /// The tile registers are configured for 16 rows with `single` true. `rows` lies within the
    /// tile, its ends are multiples of 32, and it is not empty. `self.weights` and
    /// `self.value_pairs` hold the weights of the 16 queries from `first` on and the values of
    /// these positions; `first` is a multiple of 16 below `self.queries`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn add_values(&self, first: usize, rows: Range<usize>) {
        let dim = self.args.head_dim;
        // SAFETY: the weights have a tile for each 32 positions; so has each of the `dim / 16`
        // panels of value pairs. Both begin at the tile of `rows.start`. The state has `dim` sums
        // for each of the 16 queries from `first` on; the panels cover them, and no other thread
        // accesses them.
        unsafe {
            let sums = self.group_span.values.add(first * dim);
            let block = TileBlock {
                a: self.weights.add(rows.start / 2 * AMX_TILE_ROWS).cast::<u16>().cast_const(),
                a_tile: 0,
                a_row_bytes: AMX_TILE_ROW_BYTES,
                a_step_bytes: AMX_TILE_BYTES,
                b: self.value_pairs.add(rows.start * LANES / 2).cast::<u16>().cast_const(),
                b_panel: POSITIONS_PER_AMX_TILE * LANES,
                depth: rows.len() / AMX_BF16_DEPTH,
                begin: sums.cast_const(),
                begin_row: dim,
                c: sums,
                c_row: dim,
                ahead: self.q.cast::<u16>().cast_const(),
            };
            blocks(block, dim / LANES, true);
        }
    }
}

/// Multiplies one row tile with a number of panels. If `accumulate` is true, each block after the
/// first also begins with the sums that are stored where it writes; the first begins with
/// `block.begin`.
///
/// # Safety
/// As for [`block_1x4`], for all `panels` instead of four.
#[inline]
unsafe fn blocks(mut block: TileBlock, mut panels: usize, accumulate: bool) {
    while panels > 0 {
        let count = if panels >= SUM_TILES { SUM_TILES } else { 1 };
        // SAFETY: `block` is at a panel of which `count` are left, and the operands are valid for
        // all of them.
        unsafe {
            if count == SUM_TILES {
                block_1x4(&block);
            } else {
                block_1x1(&block);
            }
            panels -= count;
            block.b = block.b.wrapping_add(count * block.b_panel);
            block.c = block.c.wrapping_add(count * LANES);
        }
        if accumulate {
            block.begin = block.c.cast_const();
        }
    }
}

/// Multiplies four tiles of 16 keys each with one panel of 16 queries. With four sums, successive
/// tile products do not depend on each other, so their latency overlaps. `c` is `[4][16][16]`.
///
/// # Safety
/// This process may use AMX with bf16, and on this thread the tiles were last configured for 16
/// rows with `single` true. Each of `keys` is readable for 16 rows of `32 * depth` values,
/// `row_bytes` bytes apart; `q` is readable for `depth` packed tiles of 1 KiB; `depth` is at least
/// 1. `c` is writable for `4 * 16 * 16` values, which no other thread accesses.
#[inline]
unsafe fn block_4x1(
    keys: [*const u16; 4],
    row_bytes: usize,
    q: *mut f32,
    depth: usize,
    c: *mut f32,
) {
    debug_assert!(depth > 0);
    // SAFETY: iteration t of the first asm loads tile t of the queries and of each of the keys, and
    // it stops after `depth` iterations; it writes no memory. The second writes four tiles of 16
    // rows of 64 bytes, one after the other. All registers that the asm changes are declared as
    // outputs; the second changes none. The tile registers keep their contents in between, because
    // compilers do not use them.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{q} + {tile_row}]",
            "tileloadd tmm5, [{k0} + {k_row}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm6, [{k1} + {k_row}]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tileloadd tmm7, [{k2} + {k_row}]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tileloadd tmm5, [{k3} + {k_row}]",
            "tdpbf16ps tmm3, tmm5, tmm4",
            "add {q}, 1024",
            "add {k0}, 64",
            "add {k1}, 64",
            "add {k2}, 64",
            "add {k3}, 64",
            "dec {depth}",
            "jnz 2b",
            q = inout(reg) q => _,
            tile_row = in(reg) AMX_TILE_ROW_BYTES,
            k0 = inout(reg) keys[0] => _,
            k1 = inout(reg) keys[1] => _,
            k2 = inout(reg) keys[2] => _,
            k3 = inout(reg) keys[3] => _,
            k_row = in(reg) row_bytes,
            depth = inout(reg) depth => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 1024], tmm1",
            "tilestored [{c} + {row} + 2048], tmm2",
            "tilestored [{c} + {row} + 3072], tmm3",
            c = in(reg) c, row = in(reg) AMX_TILE_ROW_BYTES,
            options(nostack, preserves_flags),
        );
    }
}
