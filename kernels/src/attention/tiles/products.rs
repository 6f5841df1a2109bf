//! The two products of attention on tiles: scores, and weighted values.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::asm;
use std::ops::Range;

use super::super::super::amx::{self, Block, DEPTH, ROWS, TILE_BYTES, TILE_ROW_BYTES};
use super::super::super::lanes::LANES;
use super::{TILE, Work};

/// Tiles of sums that a block keeps.
const SUMS: usize = 4;

impl Work<'_> {
    /// Scores of the tile's positions `rows` for all queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn score(&self, begin: usize, rows: Range<usize>, seen: Range<usize>) {
        let dim = self.args.head_dim;
        let end = rows.end.min((seen.end - begin).next_multiple_of(ROWS));
        let mut keys = [(std::ptr::null(), 0); TILE / ROWS];
        // SAFETY: see above the impl of `Work`. Positions beyond `seen` are read within their block,
        // and their scores masked.
        unsafe {
            for row in (rows.start..end).step_by(ROWS) {
                keys[row / ROWS] = self.key_rows(begin, row, &seen);
            }
            let mut row = rows.start;
            while row < end {
                let keys = &keys[row / ROWS..end / ROWS];
                let scores = self.scores.add(row * self.queries);
                let tall = self.queries == ROWS && keys.len() >= SUMS;
                let count = if tall { SUMS } else { 1 };
                for next in begin + row + TILE..begin + row + TILE + count * ROWS {
                    self.fetch(self.keys, next);
                }
                if tall {
                    let keys = [keys[0], keys[1], keys[2], keys[3]];
                    block_4x1(keys.map(|(at, _)| at), 2 * keys[0].1, self.q, dim / DEPTH, scores);
                } else {
                    self.score_row(keys[0], scores);
                }
                row += count * ROWS;
            }
        }
    }

    /// Scores of 16 positions for all queries.
    #[inline]
    unsafe fn score_row(&self, (keys, row_values): (*const u16, usize), scores: *mut f32) {
        let dim = self.args.head_dim;
        let block = Block {
            a: keys,
            a_tile: 0,
            a_row_bytes: row_values * size_of::<u16>(),
            a_step_bytes: DEPTH * size_of::<u16>(),
            b: self.q.cast::<u16>().cast_const(),
            b_panel: ROWS * dim,
            depth: dim / DEPTH,
            begin: std::ptr::null(),
            begin_row: 0,
            c: scores,
            c_row: self.queries,
            ahead: keys,
        };
        // SAFETY: see above the impl of `Work`.
        unsafe { blocks(block, self.queries / ROWS, false) };
    }

    /// Adds the values, weighted, for 16 queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn add_values(&self, first: usize, rows: Range<usize>) {
        let dim = self.args.head_dim;
        // SAFETY: see above the impl of `Work`.
        unsafe {
            let sums = self.span.values.add(first * dim);
            let block = Block {
                a: self.weights.add(rows.start / 2 * ROWS).cast::<u16>().cast_const(),
                a_tile: 0,
                a_row_bytes: TILE_ROW_BYTES,
                a_step_bytes: TILE_BYTES,
                b: self.pairs.add(rows.start * LANES / 2).cast::<u16>().cast_const(),
                b_panel: TILE * LANES,
                depth: rows.len() / DEPTH,
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

/// One row tile times so many panels. With `accumulate` each block begins with the sums that stand
/// where it writes.
///
/// # Safety
/// As [`amx::block_1x4`], for all panels.
#[inline]
unsafe fn blocks(mut block: Block, mut panels: usize, accumulate: bool) {
    while panels > 0 {
        let count = if panels >= SUMS { SUMS } else { 1 };
        // SAFETY: the caller's promise; what is done is left behind.
        unsafe {
            if count == SUMS {
                amx::block_1x4(&block);
            } else {
                amx::block_1x1(&block);
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

/// Four tiles of 16 keys each times one panel of 16 queries: a step along the depth then waits for
/// no other, as it would with one sum alone. `c` is `[4][16][16]`.
///
/// # Safety
/// Tiles are configured as `single`, for 16 rows; keys, whose rows lie `row_bytes` apart, and queries
/// are valid for `depth` tiles along a head, at least 1.
#[inline]
unsafe fn block_4x1(
    keys: [*const u16; 4],
    row_bytes: usize,
    q: *mut f32,
    depth: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
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
            tile_row = in(reg) TILE_ROW_BYTES,
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
            c = in(reg) c, row = in(reg) TILE_ROW_BYTES,
            options(nostack, preserves_flags),
        );
    }
}
