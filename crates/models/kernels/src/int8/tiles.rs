//! A task of a quantized product with many rows, computed by AMX tiles of bytes.
//!
//! One tile holds a sub-block of 32 weights for 16 features: 8 rows of 16 words. Another tile holds
//! 32 activations of a group of 16 rows. Their sums are exact integers, so the f32 sums over the
//! sub-blocks have the same bits as those of [`chunk`](super::chunk). A panel is unpacked to signed
//! bytes once per task.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]

use std::arch::x86_64::{
    __m512, _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_ps,
    _mm512_mask_storeu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::activations::{self, GroupRows, PackedGroup, SUMS};
use super::chunk::{Int8Chunk, QuantPanel, expand};
use super::x86::Avx512Vnni;
use crate::amx::tile::{AMX_TILE_ROWS, configure_bytes, release, tile_asm};
use crate::buffer::BUFFER_ALIGN;
use crate::lanes::{LANES, WORD_VECTOR_BYTES};
use crate::quant::{Format, SUB_BLOCK, WORDS};

/// Packs a group of 16 rows.
///
/// # Safety
/// AVX-512 F, BW, VL, DQ and VNNI are available, and `packed` is writable for the group (see
/// [`PackedGroup`]).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn pack(rows: GroupRows<'_>, packed: PackedGroup) {
    // SAFETY: the requirements are the same.
    unsafe { activations::pack_tiles::<Avx512Vnni>(rows, packed) }
}

/// Number of bytes of an unpacked panel: bytes, and at most two scales and minima per sub-block.
pub(super) fn expanded_len(inner: usize) -> usize {
    inner / SUB_BLOCK * (WORDS * WORD_VECTOR_BYTES + 4 * LANES * size_of::<f32>())
}

/// A panel, unpacked by [`expand`].
struct Expanded {
    /// `[sub-block][8][16]` words.
    bytes: *const u8,
    /// `[sub-block][scale][16]`.
    scales: *const f32,
    /// `[sub-block][scale][16]`, if the format has minima.
    mins: *const f32,
    /// Number of sub-blocks.
    sub_blocks: usize,
}

/// Integer sums of two tiles: two sub-blocks, or the two halves of one.
#[repr(C, align(64))]
struct TileSums([[[i32; LANES]; AMX_TILE_ROWS]; 2]);

/// Computes a task. `spare` is scratch memory for an unpacked panel.
///
/// # Safety
/// The process may use AMX tiles of bytes, and AVX-512 F, BW, VL, DQ and VNNI are available. `args`
/// is valid (see [`Int8Chunk`]), and its rows were packed by [`pack`]. `spare` is writable for
/// [`expanded_len`] bytes and aligned to a cache line.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn chunk<F: Format>(args: &Int8Chunk, spare: *mut u8) {
    debug_assert!(spare.addr().is_multiple_of(BUFFER_ALIGN));
    let sub_blocks = args.inner / SUB_BLOCK;
    let halves = F::SCALES == 2;
    // SAFETY: bytes, scales and minima of the unpacked panel divide `spare` as `expanded_len` adds
    // them up. Panel `index` is one of the task's. Groups have 16 rows, so the one of `row < rows`
    // is whole, and `rows` and `features` limit what is written.
    unsafe {
        let scales = spare.add(sub_blocks * WORDS * WORD_VECTOR_BYTES).cast::<f32>();
        let panel_mins = scales.add(2 * sub_blocks * LANES);
        let expanded = Expanded { bytes: spare, scales, mins: panel_mins, sub_blocks };
        if !emulated() {
            configure_bytes(if halves { SUB_BLOCK / 2 } else { SUB_BLOCK });
        }
        for index in 0..args.features.div_ceil(LANES) {
            let panel = QuantPanel::at::<F>(args.inner, args.panels, index);
            expand::<Avx512Vnni, F>(panel, spare, scales, panel_mins);
            let features = LANES.min(args.features - index * LANES);
            for row in (0..args.rows).step_by(AMX_TILE_ROWS) {
                let args = Int8Chunk {
                    words: args.words.add(row * args.inner),
                    scales: args.scales.add(row * sub_blocks),
                    sums: args.sums.add(row * sub_blocks * SUMS),
                    rows: AMX_TILE_ROWS.min(args.rows - row),
                    out: args.out.add(row * args.out_row + index * LANES),
                    features,
                    ..*args
                };
                match (halves, F::MINS) {
                    (true, true) => tile::<true, true>(&args, &expanded),
                    (true, false) => tile::<true, false>(&args, &expanded),
                    (false, true) => tile::<false, true>(&args, &expanded),
                    (false, false) => tile::<false, false>(&args, &expanded),
                }
            }
        }
        if !emulated() {
            release();
        }
    }
}

/// Whether tests compute tiles without AMX: on machines that have only AVX-512 VNNI.
#[cfg(test)]
fn emulated() -> bool {
    !crate::amx::probe::allowed().int8
}

/// Outside of tests, AMX is always used.
#[cfg(not(test))]
const fn emulated() -> bool {
    false
}

/// [`two_tiles`] without AMX. `depth` is the number of activations of a row.
///
/// # Safety
/// As for [`two_tiles`].
#[cfg(test)]
unsafe fn emulate(words: [*const u8; 2], bytes: [*const u8; 2], depth: usize, sums: &mut TileSums) {
    for tile in 0..2 {
        for (row, sums) in sums.0[tile].iter_mut().enumerate() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let product = |k: usize| {
                    // SAFETY: the tiles have 16 rows of activations, 32 bytes apart, and `depth /
                    // 4` rows of 16 words.
                    let (x, weight) = unsafe {
                        let weight = bytes[tile].add(k / 4 * WORD_VECTOR_BYTES + 4 * lane + k % 4);
                        (*words[tile].add(row * SUB_BLOCK + k), *weight)
                    };
                    i32::from(x.cast_signed()) * i32::from(weight.cast_signed())
                };
                *sum = (0..depth).map(product).sum();
            }
        }
    }
}

/// Computes the sums of two tiles.
///
/// # Safety
/// Tiles are configured for the sizes of the operands, which are readable whole tiles: rows of 32
/// bytes of activations, and rows of 64 bytes of weights.
#[inline(always)]
unsafe fn two_tiles(words: [*const u8; 2], bytes: [*const u8; 2], sums: &mut TileSums) {
    // SAFETY: the instructions read four whole tiles and write two tiles of 1024 bytes to `sums`.
    unsafe {
        tile_asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tileloadd tmm4, [{words} + {word_row}]",
            "tileloadd tmm6, [{bytes} + {byte_row}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{words_1} + {word_row}]",
            "tileloadd tmm7, [{bytes_1} + {byte_row}]",
            "tdpbssd tmm1, tmm5, tmm7",
            "tilestored [{sums} + {byte_row}], tmm0",
            "tilestored [{sums} + {byte_row} + 1024], tmm1",
            words = in(reg) words[0], words_1 = in(reg) words[1], word_row = in(reg) SUB_BLOCK,
            bytes = in(reg) bytes[0], bytes_1 = in(reg) bytes[1], byte_row = in(reg) WORD_VECTOR_BYTES,
            sums = in(reg) &raw mut *sums,
        );
    }
}

/// Multiplies one group of rows with one panel. While the sums of two tiles are added up, the next
/// two tiles are being computed.
///
/// # Safety
/// As for [`chunk`], with tiles configured. `args` is a group of at most 16 rows with at most 16
/// features, and `panel` is unpacked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
#[allow(clippy::needless_range_loop, reason = "counted loops keep sums in registers")]
unsafe fn tile<const HALVES: bool, const MINS: bool>(args: &Int8Chunk, panel: &Expanded) {
    let halves = 1 + usize::from(HALVES);
    let tiles = panel.sub_blocks * halves;
    let mut totals = [_mm512_setzero_ps(); AMX_TILE_ROWS];
    let mut sums = [const { TileSums([[[0; LANES]; AMX_TILE_ROWS]; 2]) }; 2];
    let words = |tile: usize| {
        let (sub_block, half) = (tile / halves, tile % halves);
        args.words.wrapping_add(sub_block * AMX_TILE_ROWS * SUB_BLOCK + half * SUB_BLOCK / 2)
    };
    let bytes = |tile: usize| panel.bytes.wrapping_add(tile * WORDS * WORD_VECTOR_BYTES / halves);
    // SAFETY: tile indices are below `tiles`, so all tiles, scales and minima are those of the
    // group and the panel. If there is no second tile, the first is computed twice.
    unsafe {
        let next = |first: usize, sums: &mut [TileSums; 2]| {
            let second = (first + 1).min(tiles - 1);
            let at = &mut sums[first / 2 % 2];
            let (words, bytes) = ([words(first), words(second)], [bytes(first), bytes(second)]);
            #[cfg(test)]
            if emulated() {
                return emulate(words, bytes, SUB_BLOCK / halves, at);
            }
            two_tiles(words, bytes, at);
        };
        next(0, &mut sums);
        for first in (0..tiles).step_by(2) {
            if first + 2 < tiles {
                next(first + 2, &mut sums);
            }
            for tile in first..tiles.min(first + 2) {
                let sub_block = tile / halves;
                let scale = _mm512_loadu_ps(panel.scales.add(tile * LANES));
                let row_scales = args.scales.add(sub_block * AMX_TILE_ROWS);
                let sums = &sums[first / 2 % 2].0[tile % 2];
                for r in 0..AMX_TILE_ROWS {
                    let sums = _mm512_cvtepi32_ps(_mm512_load_si512(sums[r].as_ptr().cast()));
                    let sums = _mm512_mul_ps(sums, _mm512_set1_ps(*row_scales.add(r)));
                    totals[r] = _mm512_fmadd_ps(sums, scale, totals[r]);
                }
                if MINS {
                    let min = _mm512_loadu_ps(panel.mins.add(tile * LANES));
                    let sum = if HALVES { 1 + tile % 2 } else { 0 };
                    let row_sums = args.sums.add((sub_block * SUMS + sum) * AMX_TILE_ROWS);
                    for r in 0..AMX_TILE_ROWS {
                        let sum = _mm512_set1_ps(*row_sums.add(r));
                        totals[r] = _mm512_fmadd_ps(sum, min, totals[r]);
                    }
                }
            }
        }
        store(args, &totals);
    }
}

/// Writes the sums of the rows and features that exist.
///
/// # Safety
/// AVX-512 F is available. `out` is writable for `features` values, at most 16, in each of `rows`
/// rows.
#[target_feature(enable = "avx512f")]
unsafe fn store(args: &Int8Chunk, totals: &[__m512; AMX_TILE_ROWS]) {
    #[allow(clippy::cast_possible_truncation, reason = "a mask of 16 bits")]
    let live = ((1_u32 << args.features) - 1) as u16;
    for (r, total) in totals.iter().enumerate().take(args.rows) {
        // SAFETY: the row exists, and the mask excludes lanes beyond the features.
        unsafe { _mm512_mask_storeu_ps(args.out.add(r * args.out_row), live, *total) }
    }
}
