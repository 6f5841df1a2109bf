//! The microkernels of bf16 products on tiles: blocks of 2 x 2, 1 x 4 and 1 x 1 tiles of sums.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]

use crate::amx::tile::{AMX_TILE_ROW_BYTES, AMX_TILE_ROWS, tile_asm};
use crate::lanes::LANES;

/// The operands of a block of tiles: `c = begin + a * b`.
#[derive(Clone, Copy)]
pub(crate) struct TileBlock {
    /// bf16 activations of the first row tile, at the block's first tile along the inner dimension.
    pub a: *const u16,
    /// Values from one row tile to the next.
    pub a_tile: usize,
    /// Bytes from one row of a tile of activations to the next. [`block_2x2`] takes only
    /// [`AMX_TILE_ROW_BYTES`].
    pub a_row_bytes: usize,
    /// Bytes from one tile of activations to the next along the inner dimension. [`block_2x2`]
    /// takes only [`AMX_TILE_BYTES`](crate::amx::tile::AMX_TILE_BYTES).
    pub a_step_bytes: usize,
    /// Packed bf16 weights of the first panel, at the block's first tile along the inner dimension.
    pub b: *const u16,
    /// Values from one panel to the next.
    pub b_panel: usize,
    /// Tiles along the inner dimension; at least 1.
    pub depth: usize,
    /// Initial sums of the first row and panel, laid out as `c`; null to begin with zero.
    pub begin: *const f32,
    /// Values from one row of `begin` to the next.
    pub begin_row: usize,
    /// Output: 16 sums of row r and panel p are written at `c + r * c_row + 16 * p`.
    pub c: *mut f32,
    /// Values from one row of `c` to the next.
    pub c_row: usize,
    /// Weights of which [`block_2x2`] prefetches four cache lines into the L2 cache at each tile
    /// along the inner dimension. Any address is allowed.
    pub ahead: *const u16,
}

/// Loads tiles 0 to 3 with the initial sums, each `offsets` values after `begin`, or clears them if
/// `begin` is null.
///
/// # Safety
/// The tiles are configured by [`configure`](crate::amx::tile::configure) on this thread. Unless
/// `begin` is null, for each offset the rows of the tile's configuration, `begin_row` values apart,
/// are readable for 16 values.
#[inline(always)]
unsafe fn begin_four(block: &TileBlock, offsets: [usize; 4]) {
    // SAFETY: the caller makes sure that the tiles are configured and that the rows which
    // `tileloadd` reads are readable. Only tile registers are written, which are declared as
    // outputs.
    unsafe {
        if block.begin.is_null() {
            tile_asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",);
        } else {
            tile_asm!(
                "tileloadd tmm0, [{c0} + {row}]",
                "tileloadd tmm1, [{c1} + {row}]",
                "tileloadd tmm2, [{c2} + {row}]",
                "tileloadd tmm3, [{c3} + {row}]",
                c0 = in(reg) block.begin.add(offsets[0]),
                c1 = in(reg) block.begin.add(offsets[1]),
                c2 = in(reg) block.begin.add(offsets[2]),
                c3 = in(reg) block.begin.add(offsets[3]),
                row = in(reg) block.begin_row * size_of::<f32>(),
            );
        }
    }
}

/// Stores tiles 0 to 3, each `offsets` values after `c`.
///
/// # Safety
/// The tiles are configured by [`configure`](crate::amx::tile::configure) on this thread. For each
/// offset the rows of the tile's configuration, `c_row` values apart, are writable for 16 values,
/// and no other thread accesses them.
#[inline(always)]
unsafe fn finish_four(block: &TileBlock, offsets: [usize; 4]) {
    // SAFETY: the caller makes sure that the tiles are configured and that the rows which
    // `tilestored` writes are writable and not accessed by other threads.
    unsafe {
        tile_asm!(
            "tilestored [{c0} + {row}], tmm0",
            "tilestored [{c1} + {row}], tmm1",
            "tilestored [{c2} + {row}], tmm2",
            "tilestored [{c3} + {row}], tmm3",
            c0 = in(reg) block.c.add(offsets[0]),
            c1 = in(reg) block.c.add(offsets[1]),
            c2 = in(reg) block.c.add(offsets[2]),
            c3 = in(reg) block.c.add(offsets[3]),
            row = in(reg) block.c_row * size_of::<f32>(),
        );
    }
}

/// Two row tiles times two panels.
///
/// # Safety
/// This process may use AMX with bf16, and on this thread the tiles were last configured by
/// [`configure`](crate::amx::tile::configure) with `single` false. With `upper` and `lower` the
/// rows given there:
/// * `a` is readable for `depth` packed tiles of `upper` rows, `a + a_tile` for as many of `lower`
///   rows;
/// * `b` and `b + b_panel` are readable for `depth` packed tiles of 16 rows;
/// * `depth` is at least 1;
/// * `c` is writable for 32 values in each of `upper` rows, `c_row` values apart, and `c + 16 *
///   c_row` in each of `lower` rows; no other thread accesses them;
/// * `begin` is null, or readable like `c` with rows `begin_row` values apart.
pub(crate) unsafe fn block_2x2(block: &TileBlock) {
    debug_assert!(block.depth > 0);
    let offsets = |row: usize| [0, LANES, AMX_TILE_ROWS * row, AMX_TILE_ROWS * row + LANES];
    // SAFETY: the caller makes sure that the tiles are configured for this shape and that `a`, `b`,
    // `begin` and `c` are valid for it. Iteration t of the asm loads tile t of `a` and `b`, and it
    // stops after `depth` iterations. The prefetched addresses, which may lie outside `ahead` and
    // `c`, are hints. All registers that the asm changes are declared as outputs.
    unsafe {
        begin_four(block, offsets(block.begin_row));
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
            lower = inout(reg) block.c.add(AMX_TILE_ROWS * block.c_row) => _,
            c_row = in(reg) block.c_row * size_of::<f32>(),
            depth = inout(reg) block.depth => _,
            tile_row = in(reg) AMX_TILE_ROW_BYTES,
        );
        finish_four(block, offsets(block.c_row));
    }
}

/// One row tile times four panels.
///
/// # Safety
/// This process may use AMX with bf16, and on this thread the tiles were last configured by
/// [`configure`](crate::amx::tile::configure) with `single` true. With `rows` the rows given there:
/// * at `a`, `depth` tiles `a_step_bytes` apart are readable: `rows` rows of 64 bytes,
///   `a_row_bytes` apart;
/// * `b + p * b_panel` is readable for `depth` packed tiles of 16 rows, for p from 0 to 3;
/// * `depth` is at least 1;
/// * `c` is writable for 64 values in each of `rows` rows, `c_row` values apart; no other thread
///   accesses them;
/// * `begin` is null, or readable like `c` with rows `begin_row` values apart.
#[inline]
pub(crate) unsafe fn block_1x4(block: &TileBlock) {
    debug_assert!(block.depth > 0);
    let offsets = [0, LANES, 2 * LANES, 3 * LANES];
    // SAFETY: the caller makes sure that the tiles are configured for this shape and that `a`, `b`,
    // `begin` and `c` are valid for it. Iteration t of the asm loads tile t of `a` and of each
    // panel, and it stops after `depth` iterations. All registers that the asm changes are declared
    // as outputs.
    unsafe {
        begin_four(block, offsets);
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
            tile_row = in(reg) AMX_TILE_ROW_BYTES,
        );
        finish_four(block, offsets);
    }
}

/// One row tile times one panel.
///
/// # Safety
/// This process may use AMX with bf16, and on this thread the tiles were last configured by
/// [`configure`](crate::amx::tile::configure) with `single` true. With `rows` the rows given there:
/// * at `a`, `depth` tiles `a_step_bytes` apart are readable: `rows` rows of 64 bytes,
///   `a_row_bytes` apart;
/// * `b` is readable for `depth` packed tiles of 16 rows;
/// * `depth` is at least 1;
/// * `c` is writable for 16 values in each of `rows` rows, `c_row` values apart; no other thread
///   accesses them;
/// * `begin` is null, or readable like `c` with rows `begin_row` values apart.
#[inline]
pub(crate) unsafe fn block_1x1(block: &TileBlock) {
    debug_assert!(block.depth > 0);
    // SAFETY: the caller makes sure that the tiles are configured for this shape and that `a`, `b`,
    // `begin` and `c` are valid for it. Iteration t of the asm loads tile t of `a` and of each
    // panel, and it stops after `depth` iterations. All registers that the asm changes are declared
    // as outputs.
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
            tile_row = in(reg) AMX_TILE_ROW_BYTES,
            c = in(reg) block.c,
            c_row = in(reg) block.c_row * size_of::<f32>(),
        );
    }
}
