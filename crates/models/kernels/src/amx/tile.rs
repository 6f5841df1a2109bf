//! The tile registers: their sizes and their configuration.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]

use crate::lanes::LANES;

/// Rows of a tile register.
pub(crate) const AMX_TILE_ROWS: usize = 16;
/// bf16 values in a row of a tile: elements of the inner dimension that one `tdpbf16ps` multiplies
/// and adds to each sum.
pub(crate) const AMX_BF16_DEPTH: usize = 32;
/// bf16 values in a tile.
pub(crate) const AMX_BF16_TILE_LEN: usize = AMX_TILE_ROWS * AMX_BF16_DEPTH;
/// Bytes of a tile.
pub(crate) const AMX_TILE_BYTES: usize = 2 * AMX_BF16_TILE_LEN;
/// Bytes of a row of a tile; in packed tiles also the distance between two rows.
pub(crate) const AMX_TILE_ROW_BYTES: usize = 2 * AMX_BF16_DEPTH;

/// `asm!` with all tile registers declared as overwritten.
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
pub(crate) use tile_asm;

/// The operand of `ldtilecfg`: rows, and bytes per row, of each tile register.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the eight tile registers of this thread and sets them to zero.
///
/// # Safety
/// This process may use AMX: [`probe::allowed`](crate::amx::probe::allowed) returned true for bf16
/// or int8, or the process is the probe's child, which may be killed.
unsafe fn load(tile_rows: [usize; 8], tile_row_bytes: [usize; 8]) {
    let mut config = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    for tile in 0..8 {
        debug_assert!((1..=AMX_TILE_ROWS).contains(&tile_rows[tile]));
        debug_assert!((1..=AMX_TILE_ROW_BYTES).contains(&tile_row_bytes[tile]));
        #[allow(clippy::cast_possible_truncation, reason = "at most 16 and 64")]
        let (rows, row_bytes) = (tile_rows[tile] as u8, tile_row_bytes[tile] as u16);
        (config.rows[tile], config.row_bytes[tile]) = (rows, row_bytes);
    }
    // SAFETY: the caller makes sure that AMX may be used. The instruction reads the 64 bytes of
    // `config`, which is a local variable; the tile registers that it clears are declared as
    // outputs.
    unsafe { tile_asm!("ldtilecfg [{config}]", config = in(reg) &raw const config,) }
}

/// Configures the tiles for bf16 products: 0 to 3 for sums, 4 and 5 for activations, 6 and 7 for
/// weights. With `single` false, sums 0 and 1 and activations 4 have `upper` rows, and sums 2 and 3
/// and activations 5 have `lower` rows. With `single` true, all four sums and activations 4 have
/// `upper` rows, and tile 5 holds weights too. Both row counts are from 1 to 16.
///
/// # Safety
/// This process may use AMX: [`probe::allowed`](crate::amx::probe::allowed) returned true for bf16
/// or int8, or the process is the probe's child, which may be killed.
pub(crate) unsafe fn configure(upper: usize, lower: usize, single: bool) {
    let full = AMX_TILE_ROWS;
    let rows = match single {
        true => [upper, upper, upper, upper, upper, full, full, full],
        false => [upper, upper, lower, lower, upper, lower, full, full],
    };
    // SAFETY: the caller makes sure that this process may use AMX, which is `load`'s only
    // condition.
    unsafe { load(rows, [AMX_TILE_ROW_BYTES; 8]) }
}

/// Configures the tiles for int8 products: 0 to 3 for sums of 16 rows, 4 and 5 for activations of
/// 16 rows of `depth` bytes, 6 and 7 for weights of `depth / 4` rows of 16 words. `depth` is a
/// multiple of 4 up to 64.
///
/// # Safety
/// This process may use AMX: [`probe::allowed`](crate::amx::probe::allowed) returned true for int8.
pub(crate) unsafe fn configure_bytes(depth: usize) {
    let (words, full, row_bytes) = (depth / 4, AMX_TILE_ROWS, 4 * LANES);
    let rows = [full, full, full, full, full, full, words, words];
    let bytes = [row_bytes, row_bytes, row_bytes, row_bytes, depth, depth, row_bytes, row_bytes];
    // SAFETY: the caller makes sure that this process may use AMX, which is `load`'s only
    // condition.
    unsafe { load(rows, bytes) }
}

/// Releases the tile registers of this thread, so that the operating system does not have to save
/// them when it switches threads.
///
/// # Safety
/// This process may use AMX: [`probe::allowed`](crate::amx::probe::allowed) returned true for bf16
/// or int8, or the process is the probe's child, which may be killed.
pub(crate) unsafe fn release() {
    // SAFETY: the caller makes sure that AMX may be used. The instruction accesses no memory; the
    // tile registers that it clears are declared as outputs.
    unsafe { tile_asm!("tilerelease",) }
}
