//! The bf16 product on AMX tiles.
//!
//! Weights stand in panels of 16 features as `[inner / 2][16][2]`, so that 16 pairs of a panel are
//! one tile of 1 KiB: 32 weights of 16 features. Activations are rounded to bf16 and packed the same
//! way: `[row tile][inner / 32][16 rows][32]`. One `tdpbf16ps` adds 32 products to each of 16 x 16
//! sums.
//!
//! **Order of sums.** Every sum takes its products 32 at a time in ascending order of the inner
//! dimension; the processor's own order within those is the same for all rows and columns. Sums
//! that wait in memory between two blocks of the inner dimension are f32 and lose nothing. So the
//! shape of a block (2 x 2 tiles, 1 x 4, ...) and the rows a tile is configured for change no bit.
//!
//! The tile registers are configured at the start of a task and released at its end; between, no
//! code but the blocks below runs on the thread, and compilers use no tile registers of their own.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::asm;
use std::arch::x86_64::{__m256i, _mm256_storeu_si256, _mm512_cvtneps_pbh, _mm512_loadu_ps};

use super::lanes::LANES;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Products that one instruction adds to a sum.
pub(super) const DEPTH: usize = 32;
/// Values (bf16) of a tile.
pub(super) const TILE: usize = ROWS * DEPTH;
/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 2 * TILE;
/// Bytes between the rows of a packed tile.
pub(super) const TILE_ROW_BYTES: usize = 2 * DEPTH;
/// Tiles along the inner dimension in a block, when many rows share the weights: two panels of
/// them (16 KiB) then stay in the nearest cache while the rows pass by.
const BLOCK_DEPTH: usize = 16;

/// Values of a block of one panel.
const BLOCK: usize = BLOCK_DEPTH * TILE;
/// Panels that pass by the same block of activations before the next one.
const NEAR: usize = 2;
/// Weights that a step along the depth of a block fetches ahead: four cache lines.
const AHEAD: usize = 128;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the tiles: 0 to 3 for sums, 4 and 5 for activations, 6 and 7 for weights. Sums 0, 1
/// and activations 4 take `upper` rows, sums 2, 3 and activations 5 `lower` rows; with `single`,
/// all four sums are of the upper rows and 5 is a tile of weights.
///
/// # Safety
/// The process may use AMX.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn configure(upper: usize, lower: usize, single: bool) {
    debug_assert!((1..=ROWS).contains(&upper) && (1..=ROWS).contains(&lower));
    #[allow(clippy::cast_possible_truncation, reason = "at most 16")]
    let (upper, lower) = (upper as u8, lower as u8);
    let full = 16;
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    config.row_bytes[..8].fill(64);
    config.rows[..8].copy_from_slice(&if single {
        [upper, upper, upper, upper, upper, full, full, full]
    } else {
        [upper, upper, lower, lower, upper, lower, full, full]
    });
    // SAFETY: reads the 64 bytes of a valid configuration; the tiles it clears are ours.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            config = in(reg) &raw const config,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Gives the tiles back, so that a switch of threads needs not save them.
///
/// # Safety
/// The process may use AMX.
pub(super) unsafe fn release() {
    // SAFETY: clears the tile registers, which are ours.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, nomem),
        );
    }
}

/// The operands of a block of tiles.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Activations of the first row tile, at the block's first tile of depth.
    pub a: *const u16,
    /// Values between two row tiles.
    pub a_tile: usize,
    /// Bytes between two rows of a tile of activations (2 x 2: always [`TILE_ROW_BYTES`]).
    pub a_row_bytes: usize,
    /// Bytes between two tiles of activations along the depth (2 x 2: always a packed tile's).
    pub a_step_bytes: usize,
    /// Weights of the first panel, at the block's first tile of depth.
    pub b: *const u16,
    /// Values between two panels.
    pub b_panel: usize,
    /// Tiles of depth; at least 1.
    pub depth: usize,
    /// Where sums begin: those of the first row and panel, or null to begin with zero.
    pub begin: *const f32,
    /// Values between two rows of `begin`.
    pub begin_row: usize,
    /// Where sums go.
    pub c: *mut f32,
    /// Values between two rows of `c`.
    pub c_row: usize,
    /// Weights of which each step along the depth of a 2 x 2 block fetches [`AHEAD`] values to the
    /// second cache.
    pub ahead: *const u16,
}

/// Two row tiles times two panels.
///
/// # Safety
/// Tiles are configured, not `single`; the operands are valid for the rows configured.
unsafe fn block_2x2(block: &Block) {
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
    unsafe {
        let lower = block.c.add(ROWS * block.c_row);
        let c_bytes = block.c_row * size_of::<f32>();
        if !block.begin.is_null() {
            asm!(
                "tileloadd tmm0, [{upper} + {row}]",
                "tileloadd tmm1, [{upper} + {row} + 64]",
                "tileloadd tmm2, [{lower} + {row}]",
                "tileloadd tmm3, [{lower} + {row} + 64]",
                upper = in(reg) block.begin,
                lower = in(reg) block.begin.add(ROWS * block.begin_row),
                row = in(reg) block.begin_row * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, readonly),
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, nomem),
            );
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{a0} + {tile_row}]",
            "tileloadd tmm6, [{b0} + {tile_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {tile_row}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {tile_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "prefetcht1 [{ahead}]",
            "prefetcht1 [{ahead} + 64]",
            "prefetcht1 [{ahead} + 128]",
            "prefetcht1 [{ahead} + 192]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "prefetchw [{upper}]",
            "prefetchw [{upper} + 64]",
            "prefetchw [{lower}]",
            "prefetchw [{lower} + 64]",
            "add {ahead}, 256",
            "add {upper}, {c_row}",
            "add {lower}, {c_row}",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {depth}",
            "jnz 2b",
            a0 = inout(reg) block.a => _,
            a1 = inout(reg) block.a.add(block.a_tile) => _,
            b0 = inout(reg) block.b => _,
            b1 = inout(reg) block.b.add(block.b_panel) => _,
            ahead = inout(reg) block.ahead => _,
            upper = inout(reg) block.c => _,
            lower = inout(reg) lower => _,
            c_row = in(reg) c_bytes,
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) TILE_ROW_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{upper} + {row}], tmm0",
            "tilestored [{upper} + {row} + 64], tmm1",
            "tilestored [{lower} + {row}], tmm2",
            "tilestored [{lower} + {row} + 64], tmm3",
            upper = in(reg) block.c, lower = in(reg) lower, row = in(reg) c_bytes,
            options(nostack, preserves_flags),
        );
    }
}

/// One row tile times four panels.
///
/// # Safety
/// Tiles are configured as `single`; the operands are valid for the rows configured.
#[inline]
pub(super) unsafe fn block_1x4(block: &Block) {
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
    unsafe {
        let c_bytes = block.c_row * size_of::<f32>();
        if block.begin.is_null() {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, nomem),
            );
        } else {
            asm!(
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 64]",
                "tileloadd tmm2, [{c} + {row} + 128]",
                "tileloadd tmm3, [{c} + {row} + 192]",
                c = in(reg) block.begin, row = in(reg) block.begin_row * size_of::<f32>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm5, [{b} + {tile_row}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{b1} + {tile_row}]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tileloadd tmm7, [{b2} + {tile_row}]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm5, [{b3} + {tile_row}]",
            "tdpbf16ps tmm3, tmm4, tmm5",
            "add {a}, {a_step}",
            "add {b}, 1024",
            "add {b1}, 1024",
            "add {b2}, 1024",
            "add {b3}, 1024",
            "dec {depth}",
            "jnz 2b",
            a = inout(reg) block.a => _,
            a_row = in(reg) block.a_row_bytes,
            a_step = in(reg) block.a_step_bytes,
            b = inout(reg) block.b => _,
            b1 = inout(reg) block.b.add(block.b_panel) => _,
            b2 = inout(reg) block.b.add(2 * block.b_panel) => _,
            b3 = inout(reg) block.b.add(3 * block.b_panel) => _,
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) TILE_ROW_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 64], tmm1",
            "tilestored [{c} + {row} + 128], tmm2",
            "tilestored [{c} + {row} + 192], tmm3",
            c = in(reg) block.c, row = in(reg) c_bytes,
            options(nostack, preserves_flags),
        );
    }
}

/// One row tile times one panel.
///
/// # Safety
/// Tiles are configured as `single`; the operands are valid for the rows configured.
#[inline]
pub(super) unsafe fn block_1x1(block: &Block) {
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
    unsafe {
        let c_bytes = block.c_row * size_of::<f32>();
        if block.begin.is_null() {
            asm!("tilezero tmm0", out("tmm0") _, options(nostack, preserves_flags, nomem));
        } else {
            asm!(
                "tileloadd tmm0, [{c} + {row}]",
                c = in(reg) block.begin, row = in(reg) block.begin_row * size_of::<f32>(),
                out("tmm0") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm6, [{b} + {tile_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, {a_step}",
            "add {b}, 1024",
            "dec {depth}",
            "jnz 2b",
            a = inout(reg) block.a => _,
            a_row = in(reg) block.a_row_bytes,
            a_step = in(reg) block.a_step_bytes,
            b = inout(reg) block.b => _,
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) TILE_ROW_BYTES,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack, readonly),
        );
        asm!(
            "tilestored [{c} + {row}], tmm0",
            c = in(reg) block.c, row = in(reg) c_bytes,
            options(nostack, preserves_flags),
        );
    }
}

/// Values of packed activations of `rows` rows.
pub(super) fn packed_len(rows: usize, padded_inner: usize) -> usize {
    rows.div_ceil(ROWS) * ROWS * padded_inner
}

/// Packs row tile `index` of `x`, `[rows, inner]`, rounded to bf16 (to nearest, ties to even).
/// `packed` is the tile's `[padded_inner / 32][16][32]`; rows that do not exist are left as they are.
///
/// # Safety
/// AVX-512 BF16 is available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_row_tile(
    x: &[f32],
    inner: usize,
    padded_inner: usize,
    index: usize,
    packed: &mut [u16],
) {
    debug_assert_eq!(packed.len(), ROWS * padded_inner);
    let rows = ROWS.min(x.len() / inner - index * ROWS);
    for row in 0..rows {
        let from = &x[(index * ROWS + row) * inner..][..inner];
        for k in (0..padded_inner).step_by(LANES) {
            let to = &mut packed[k / DEPTH * TILE + row * DEPTH + k % DEPTH..][..LANES];
            let mut tail = [0.0; LANES];
            let source = match from.get(k..k + LANES) {
                Some(source) => source,
                None => {
                    let rest = from.get(k..).unwrap_or_default();
                    tail[..rest.len()].copy_from_slice(rest);
                    &tail
                }
            };
            // SAFETY: reads and writes 16 values; the set is enabled.
            unsafe {
                let rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(source.as_ptr()));
                let bits: __m256i = std::mem::transmute(rounded);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
            }
        }
    }
}

/// Sums that wait between two blocks of the inner dimension, for a task of `rows` rows.
pub(super) fn waiting_len(rows: usize) -> usize {
    rows * NEAR * LANES
}

/// A task: some rows times a chunk of panels.
pub(super) struct TileArgs {
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
pub(super) unsafe fn chunk(args: &TileArgs) {
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
