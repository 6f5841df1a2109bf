//! The product of many rows on AMX tiles of bytes.
//!
//! A part of 32 weights is a tile of 8 words' rows, a group of 16 rows of activations is a tile of
//! 32 columns; their sums are exact integers, so what is added up in f32, part by part, is the
//! same as [`chunk`](super::chunk) adds. A panel is expanded to signed bytes once a task.
#![allow(unsafe_code, reason = "tile instructions have no intrinsics on stable Rust")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::x86_64::{
    __m512, _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_load_si512, _mm512_loadu_ps,
    _mm512_mask_storeu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::activations::{self, PackedGroup, Rows};
use super::chunk::{ChunkArgs, Panel, expand};
use super::dots::RUN;
use super::format::WORDS;
use super::x86::Avx512Vnni;
use crate::amx::{self, ROWS, tile_asm};
use crate::buffer::ALIGN;
use crate::lanes::LANES;
use crate::quant::PART;
use crate::tensor_type::TensorType;

/// Packs a group of 16 rows.
///
/// # Safety
/// AVX-512 is available; `packed` has room for the group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) unsafe fn pack(rows: Rows<'_>, packed: PackedGroup) {
    // SAFETY: the caller's promise.
    unsafe { activations::pack_tiles(rows, packed) }
}

/// Bytes of an expanded panel: bytes, scales (at most two a part) and minima.
pub(super) fn expanded_len(inner: usize) -> usize {
    inner / PART * (WORDS * RUN + 3 * LANES * size_of::<f32>())
}

/// A panel, expanded.
struct Expanded {
    bytes: *const u8,
    scales: *const f32,
    mins: *const f32,
    parts: usize,
}

/// Sums of two tiles: two parts, or the halves of one.
#[repr(C, align(64))]
struct Sums([[[i32; LANES]; ROWS]; 2]);

/// Computes a task whose activations [`pack`] made. `spare` takes [`expanded_len`] bytes, aligned
/// to a cache line.
///
/// # Safety
/// The process may use AMX with tiles of bytes, and AVX-512 VNNI; the pointers of `args` are valid
/// for its sizes, and what is written is touched by nobody else.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn chunk(args: &ChunkArgs, dtype: TensorType, spare: *mut u8) {
    debug_assert!(spare.addr().is_multiple_of(ALIGN));
    let parts = args.inner / PART;
    let halves = dtype == TensorType::Q6K;
    let mins = matches!(dtype, TensorType::Q4K | TensorType::Q5K);
    // SAFETY: the caller's promise.
    unsafe {
        let scales = spare.add(parts * WORDS * RUN).cast::<f32>();
        let panel_mins = scales.add(2 * parts * LANES);
        let expanded = Expanded { bytes: spare, scales, mins: panel_mins, parts };
        amx::configure_bytes(if halves { PART / 2 } else { PART });
        for index in 0..args.features.div_ceil(LANES) {
            let panel = Panel::at(dtype, args.inner, args.panels, index);
            expand::<Avx512Vnni>(dtype, panel, spare, scales, panel_mins);
            let features = LANES.min(args.features - index * LANES);
            for row in (0..args.rows).step_by(ROWS) {
                let args = ChunkArgs {
                    words: args.words.add(row * args.inner),
                    scales: args.scales.add(row * parts),
                    sums: args.sums.add(row * parts),
                    rows: ROWS.min(args.rows - row),
                    out: args.out.add(row * args.out_features + index * LANES),
                    features,
                    ..*args
                };
                match (halves, mins) {
                    (true, _) => tile::<true, false>(&args, &expanded),
                    (false, true) => tile::<false, true>(&args, &expanded),
                    (false, false) => tile::<false, false>(&args, &expanded),
                }
            }
        }
        amx::release();
    }
}

/// Two tiles of sums at once.
///
/// # Safety
/// Tiles are configured; the operands are whole tiles.
#[inline(always)]
unsafe fn two_tiles(words: [*const u8; 2], bytes: [*const u8; 2], sums: &mut Sums) {
    // SAFETY: the caller's promise; the asm writes two tiles of sums.
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
            words = in(reg) words[0], words_1 = in(reg) words[1], word_row = in(reg) PART,
            bytes = in(reg) bytes[0], bytes_1 = in(reg) bytes[1], byte_row = in(reg) RUN,
            sums = in(reg) &raw mut *sums,
        );
    }
}

/// One group of rows times one panel. The tiles of the next two scales are on their way while the
/// sums of two are added up.
///
/// # Safety
/// As [`chunk`], with tiles configured.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
#[allow(clippy::needless_range_loop, reason = "counted loops stay in registers")]
unsafe fn tile<const HALVES: bool, const MINS: bool>(args: &ChunkArgs, panel: &Expanded) {
    let halves = 1 + usize::from(HALVES);
    let tiles = panel.parts * halves;
    let mut totals = [_mm512_setzero_ps(); ROWS];
    let mut sums = [const { Sums([[[0; LANES]; ROWS]; 2]) }; 2];
    let words = |tile: usize| {
        let (part, half) = (tile / halves, tile % halves);
        args.words.wrapping_add(part * ROWS * PART + half * PART / 2)
    };
    let bytes = |tile: usize| panel.bytes.wrapping_add(tile * WORDS * RUN / halves);
    // SAFETY: the caller's promise. Where there is no second tile the first is computed twice.
    unsafe {
        let next = |first: usize, sums: &mut [Sums; 2]| {
            let second = (first + 1).min(tiles - 1);
            let at = &mut sums[first / 2 % 2];
            two_tiles([words(first), words(second)], [bytes(first), bytes(second)], at);
        };
        next(0, &mut sums);
        for first in (0..tiles).step_by(2) {
            if first + 2 < tiles {
                next(first + 2, &mut sums);
            }
            for tile in first..tiles.min(first + 2) {
                let part = tile / halves;
                let scale = _mm512_loadu_ps(panel.scales.add(tile * LANES));
                let row_scales = args.scales.add(part * ROWS);
                let sums = &sums[first / 2 % 2].0[tile % 2];
                for r in 0..ROWS {
                    let sums = _mm512_cvtepi32_ps(_mm512_load_si512(sums[r].as_ptr().cast()));
                    let sums = _mm512_mul_ps(sums, _mm512_set1_ps(*row_scales.add(r)));
                    totals[r] = _mm512_fmadd_ps(sums, scale, totals[r]);
                }
                if MINS {
                    let min = _mm512_loadu_ps(panel.mins.add(part * LANES));
                    let row_sums = args.sums.add(part * ROWS);
                    for r in 0..ROWS {
                        let sum = _mm512_set1_ps(*row_sums.add(r));
                        totals[r] = _mm512_fmadd_ps(sum, min, totals[r]);
                    }
                }
            }
        }
        store(args, &totals);
    }
}

/// Writes the rows and features that exist.
///
/// # Safety
/// As [`chunk`].
#[target_feature(enable = "avx512f")]
unsafe fn store(args: &ChunkArgs, totals: &[__m512; ROWS]) {
    #[allow(clippy::cast_possible_truncation, reason = "16 bits are kept")]
    let live = ((1_u32 << args.features) - 1) as u16;
    for (r, total) in totals.iter().enumerate().take(args.rows) {
        // SAFETY: the caller's promise; no lane beyond the features is touched.
        unsafe { _mm512_mask_storeu_ps(args.out.add(r * args.out_features), live, *total) }
    }
}
