//! AMX tiles: the registers' configuration and the blocks of bf16 products.
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

mod chunk;
pub(super) mod probe;

pub(super) use chunk::{TileArgs, chunk, pack_row_tile, waiting_len};

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

/// `asm!` that may change any tile register.
macro_rules! tile_asm {
    ($($part:tt)*) => {
        std::arch::asm!(
            $($part)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}
pub(super) use tile_asm;

/// What `ldtilecfg` reads: of each tile, its rows and the bytes of one.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the tiles.
///
/// # Safety
/// The process may use AMX.
unsafe fn load(tile_rows: [usize; 8], tile_row_bytes: [usize; 8]) {
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        debug_assert!((1..=ROWS).contains(&tile_rows[tile]) && tile_row_bytes[tile] <= 64);
        #[allow(clippy::cast_possible_truncation, reason = "at most 16 and 64")]
        let (rows, row_bytes) = (tile_rows[tile] as u8, tile_row_bytes[tile] as u16);
        (config.rows[tile], config.row_bytes[tile]) = (rows, row_bytes);
    }
    // SAFETY: reads the 64 bytes of a valid configuration; the tiles it clears are ours.
    unsafe { tile_asm!("ldtilecfg [{config}]", config = in(reg) &raw const config,) }
}

/// Configures the tiles: 0 to 3 for sums, 4 and 5 for activations, 6 and 7 for weights. Sums 0, 1
/// and activations 4 take `upper` rows, sums 2, 3 and activations 5 `lower` rows; with `single`,
/// all four sums are of the upper rows and 5 is a tile of weights.
///
/// # Safety
/// The process may use AMX.
pub(super) unsafe fn configure(upper: usize, lower: usize, single: bool) {
    let rows = match single {
        true => [upper, upper, upper, upper, upper, ROWS, ROWS, ROWS],
        false => [upper, upper, lower, lower, upper, lower, ROWS, ROWS],
    };
    // SAFETY: the caller's promise.
    unsafe { load(rows, [TILE_ROW_BYTES; 8]) }
}

/// Configures the tiles for products of bytes: 0 to 3 for sums of 16 rows, 4 and 5 for activations,
/// 16 rows of `depth` bytes, 6 and 7 for weights, `depth / 4` rows of 16 words.
///
/// # Safety
/// The process may use AMX.
pub(super) unsafe fn configure_bytes(depth: usize) {
    let (words, full) = (depth / 4, 4 * LANES);
    let rows = [ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, words, words];
    // SAFETY: the caller's promise.
    unsafe { load(rows, [full, full, full, full, depth, depth, full, full]) }
}

/// Gives the tiles back, so that a switch of threads needs not save them.
///
/// # Safety
/// The process may use AMX.
pub(super) unsafe fn release() {
    // SAFETY: clears the tile registers, which are ours.
    unsafe { tile_asm!("tilerelease",) }
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
    /// Weights of which each step along the depth of a 2 x 2 block fetches four cache lines to the
    /// second cache.
    pub ahead: *const u16,
}

/// Loads four tiles of sums, `places` values after where they begin, or clears them.
///
/// # Safety
/// As for the block.
#[inline(always)]
unsafe fn begin_four(block: &Block, places: [usize; 4]) {
    // SAFETY: the caller's promise.
    unsafe {
        if block.begin.is_null() {
            tile_asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",);
        } else {
            tile_asm!(
                "tileloadd tmm0, [{c0} + {row}]",
                "tileloadd tmm1, [{c1} + {row}]",
                "tileloadd tmm2, [{c2} + {row}]",
                "tileloadd tmm3, [{c3} + {row}]",
                c0 = in(reg) block.begin.add(places[0]),
                c1 = in(reg) block.begin.add(places[1]),
                c2 = in(reg) block.begin.add(places[2]),
                c3 = in(reg) block.begin.add(places[3]),
                row = in(reg) block.begin_row * size_of::<f32>(),
            );
        }
    }
}

/// Stores four tiles of sums, `places` values after where they go.
///
/// # Safety
/// As for the block.
#[inline(always)]
unsafe fn finish_four(block: &Block, places: [usize; 4]) {
    // SAFETY: the caller's promise.
    unsafe {
        tile_asm!(
            "tilestored [{c0} + {row}], tmm0",
            "tilestored [{c1} + {row}], tmm1",
            "tilestored [{c2} + {row}], tmm2",
            "tilestored [{c3} + {row}], tmm3",
            c0 = in(reg) block.c.add(places[0]),
            c1 = in(reg) block.c.add(places[1]),
            c2 = in(reg) block.c.add(places[2]),
            c3 = in(reg) block.c.add(places[3]),
            row = in(reg) block.c_row * size_of::<f32>(),
        );
    }
}

/// Two row tiles times two panels.
///
/// # Safety
/// Tiles are configured, not `single`; the operands are valid for the rows configured.
unsafe fn block_2x2(block: &Block) {
    let places = |row: usize| [0, LANES, ROWS * row, ROWS * row + LANES];
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
    unsafe {
        begin_four(block, places(block.begin_row));
        tile_asm!(
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
            lower = inout(reg) block.c.add(ROWS * block.c_row) => _,
            c_row = in(reg) block.c_row * size_of::<f32>(),
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) TILE_ROW_BYTES,
        );
        finish_four(block, places(block.c_row));
    }
}

/// One row tile times four panels.
///
/// # Safety
/// Tiles are configured as `single`; the operands are valid for the rows configured.
#[inline]
pub(super) unsafe fn block_1x4(block: &Block) {
    let places = [0, LANES, 2 * LANES, 3 * LANES];
    // SAFETY: the caller's promise; the asm reads and writes the operands and tile registers only.
    unsafe {
        begin_four(block, places);
        tile_asm!(
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
        );
        finish_four(block, places);
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
        if block.begin.is_null() {
            tile_asm!("tilezero tmm0",);
        } else {
            let row = block.begin_row * size_of::<f32>();
            tile_asm!(
                "tileloadd tmm0, [{c} + {row}]", c = in(reg) block.begin, row = in(reg) row,
            );
        }
        tile_asm!(
            "2:",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm6, [{b} + {tile_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, {a_step}",
            "add {b}, 1024",
            "dec {depth}",
            "jnz 2b",
            "tilestored [{c} + {c_row}], tmm0",
            a = inout(reg) block.a => _,
            a_row = in(reg) block.a_row_bytes,
            a_step = in(reg) block.a_step_bytes,
            b = inout(reg) block.b => _,
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) TILE_ROW_BYTES,
            c = in(reg) block.c,
            c_row = in(reg) block.c_row * size_of::<f32>(),
        );
    }
}
