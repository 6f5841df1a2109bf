//! Vector operations are compared with scalar arithmetic on each instruction set.

use super::*;
use crate::path::Path;
#[cfg(target_arch = "x86_64")]
use crate::path::PathKind;
use crate::reference::random;

/// # Safety
/// AVX-512 F and DQ are available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn exp2_rough(values: &mut [f32]) {
    for chunk in values.chunks_exact_mut(LANES) {
        // SAFETY: `chunk` holds 16 values, and AVX-512 is available.
        unsafe { Avx512::load(chunk.as_ptr()).exp2_rough().store(chunk.as_mut_ptr()) };
    }
}

#[inline(always)]
unsafe fn exp2_all<L: Lanes>(values: &mut [f32]) {
    for chunk in values.chunks_exact_mut(LANES) {
        // SAFETY: `chunk` holds 16 values, and the function that `dispatch!` makes enables the
        // instruction set.
        unsafe { exp2(L::load(chunk.as_ptr())).store(chunk.as_mut_ptr()) };
    }
}
dispatch! {
    /// # Safety
    /// Every call is sound: `path` proves that its instruction set is available.
    unsafe fn exp2_on(values: &mut [f32]) = exp2_all
}

/// Asserts that `power_of_two`, which works in place, agrees with f64 up to a relative `tolerance`.
fn check_powers(tolerance: f64, power_of_two: impl Fn(&mut [f32])) {
    let x: Vec<f32> = (0..16_000_u16).map(|i| -125.9 + f32::from(i) * 0.010_87).collect();
    let mut got = x.clone();
    power_of_two(&mut got);
    for (x, got) in x.iter().zip(&got) {
        let want = f64::from(*x).exp2();
        assert!((f64::from(*got) / want - 1.0).abs() < tolerance, "2^{x} = {got}");
    }
}

/// Goal: powers of two have a relative error below 2e-7, are exactly 1 at zero and zero far below,
/// and propagate NaN.
#[test]
fn powers_of_two_are_accurate() {
    for path in Path::supported() {
        // SAFETY: `path` proves that its instruction set is available.
        check_powers(2e-7, |values| unsafe { exp2_on(path, values) });
        let mut edges = [f32::NEG_INFINITY; LANES];
        edges[1..4].copy_from_slice(&[0.0, f32::NAN, f32::MIN]);
        // SAFETY: `path` proves that its instruction set is available.
        unsafe { exp2_on(path, &mut edges) };
        assert_eq!((edges[0], edges[1], edges[3]), (0.0, 1.0, 0.0), "{path}");
        assert!(edges[2].is_nan(), "{path}");
    }
}

/// Goal: the rough powers of two have a relative error below 8.6e-5, are exactly 1 at zero, the
/// smallest normal number at -126 and zero below, and propagate NaN.
#[cfg(target_arch = "x86_64")]
#[test]
fn rough_powers_of_two_are_accurate_enough() {
    if !Path::supported().iter().any(|path| path.kind() == PathKind::Avx512) {
        return;
    }
    // SAFETY: the path proves that AVX-512 F and DQ are available.
    check_powers(8.6e-5, |values| unsafe { exp2_rough(values) });
    let mut edges = [f32::NEG_INFINITY; LANES];
    edges[1..6].copy_from_slice(&[0.0, f32::NAN, f32::MIN, -126.0, -126.000_01]);
    // SAFETY: the path proves that AVX-512 F and DQ are available.
    unsafe { exp2_rough(&mut edges) };
    assert_eq!((edges[0], edges[1], edges[3]), (0.0, 1.0, 0.0));
    assert_eq!(edges[4..6], [f32::MIN_POSITIVE, 0.0]);
    assert!(edges[2].is_nan());
}

#[inline(always)]
unsafe fn transpose_all<L: Lanes>(values: &mut [f32]) {
    // SAFETY: `values` holds 256 values, and the function that `dispatch!` makes enables the
    // instruction set.
    unsafe {
        let mut square = [L::splat(0.0); LANES];
        for (i, row) in square.iter_mut().enumerate() {
            *row = L::load(values.as_ptr().add(i * LANES));
        }
        L::transpose(&mut square);
        for (i, row) in square.iter().enumerate() {
            row.store(values.as_mut_ptr().add(i * LANES));
        }
    }
}
dispatch! {
    /// # Safety
    /// `values` holds 256 values.
    unsafe fn transpose_on(values: &mut [f32]) = transpose_all
}

#[inline(always)]
unsafe fn widen_all<L: Lanes>(raw: &[u16], out: &mut [f32]) {
    // SAFETY: `raw` holds 32 values and `out` 64, and the function that `dispatch!` makes enables
    // the instruction set.
    unsafe {
        L::load_bf16(raw.as_ptr()).store(out.as_mut_ptr());
        L::load_f16(raw.as_ptr()).store(out.as_mut_ptr().add(16));
        L::load_bf16_firsts(raw.as_ptr()).store(out.as_mut_ptr().add(32));
        L::load_bf16_seconds(raw.as_ptr()).store(out.as_mut_ptr().add(48));
    }
}
dispatch! {
    /// # Safety
    /// `raw` holds 32 values, `out` 64.
    unsafe fn widen_on(raw: &[u16], out: &mut [f32]) = widen_all
}

/// Goal: transposing a 16 x 16 matrix makes its rows columns.
#[test]
fn transpose_makes_rows_columns() {
    for path in Path::supported() {
        let x = random(1, 256);
        let mut got = x.clone();
        // SAFETY: `got` holds 256 values.
        unsafe { transpose_on(path, &mut got) };
        assert!((0..256).all(|i| got[i] == x[i % 16 * 16 + i / 16]), "{path}");
    }
}

/// Goal: bf16 and f16 values widen exactly.
#[test]
fn half_floats_widen() {
    let values = random(2, 32);
    let bf16: Vec<u16> = values.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect();
    for path in Path::supported() {
        let mut got = [0.0; 64];
        // SAFETY: `bf16` holds 32 values and `got` 64.
        unsafe { widen_on(path, &bf16, &mut got) };
        for i in 0..16 {
            assert_eq!(got[i], half::bf16::from_bits(bf16[i]).to_f32(), "{path}");
            assert_eq!(got[16 + i], half::f16::from_bits(bf16[i]).to_f32(), "{path}");
            assert_eq!(got[32 + i], half::bf16::from_bits(bf16[2 * i]).to_f32(), "{path}");
            assert_eq!(got[48 + i], half::bf16::from_bits(bf16[2 * i + 1]).to_f32(), "{path}");
        }
    }
}

#[inline(always)]
unsafe fn widen_f16_all<L: Lanes>(raw: &[u16; LANES], out: &mut [[f32; LANES]; 2]) {
    let low = raw.map(|bits| bits.to_le_bytes()[0]);
    let high = raw.map(|bits| bits.to_le_bytes()[1]);
    // SAFETY: all arrays hold 16 values, and the function that `dispatch!` makes enables the
    // instruction set.
    unsafe {
        L::load_f16(raw.as_ptr()).store(out[0].as_mut_ptr());
        L::load_f16_bytes(low.as_ptr(), high.as_ptr()).store(out[1].as_mut_ptr());
    }
}
dispatch! {
    /// # Safety
    /// Every call is sound: `path` proves that its instruction set is available.
    unsafe fn widen_f16_on(raw: &[u16; LANES], out: &mut [[f32; LANES]; 2]) = widen_f16_all
}

/// Goal: every f16 value widens exactly, whether its two bytes are stored together or apart.
#[test]
fn all_f16_widen() {
    for path in Path::supported() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let mut raw = [first; LANES];
            raw.iter_mut().zip(0..).for_each(|(raw, offset)| *raw += offset);
            let mut got = [[0.0; LANES]; 2];
            // SAFETY: `path` proves that its instruction set is available.
            unsafe { widen_f16_on(path, &raw, &mut got) };
            let want = raw.map(|bits| half::f16::from_bits(bits).to_f32().to_bits());
            assert_eq!(got.map(|got| got.map(f32::to_bits)), [want; 2], "{path} from {first:#x}");
        }
    }
}

#[inline(always)]
unsafe fn compare_all<L: Lanes>(a: &[f32; LANES], b: &[f32; LANES], out: &mut [[f32; LANES]; 3]) {
    // SAFETY: all arrays hold 16 values, and the function that `dispatch!` makes enables the
    // instruction set.
    unsafe {
        let (a, b) = (L::load(a.as_ptr()), L::load(b.as_ptr()));
        a.max(b).store(out[0].as_mut_ptr());
        a.min(b).store(out[1].as_mut_ptr());
        a.keep_where_ge(a, b).store(out[2].as_mut_ptr());
        out[2][0] = a.reduce_max();
        out[2][1] = b.reduce_add();
    }
}
dispatch! {
    /// # Safety
    /// Every call is sound: `path` proves that its instruction set is available.
    unsafe fn compare_on(a: &[f32; LANES], b: &[f32; LANES], out: &mut [[f32; LANES]; 3]) = compare_all
}

/// Goal: comparisons and reductions give the same bits on every instruction set, also for NaN and
/// signed zeroes.
#[test]
fn comparisons_agree() {
    let mut a = [0.0; LANES];
    let mut b = [0.0; LANES];
    a.copy_from_slice(&random(5, LANES));
    b.copy_from_slice(&random(6, LANES));
    (a[2], a[3], b[4], a[5]) = (f32::NAN, -0.0, 0.0, f32::INFINITY);
    (a[6], b[6], a[7], b[7]) = (0.0, -0.0, -0.0, 0.0);
    let run = |path, b: &[f32; LANES]| {
        let mut out = [[0.0; LANES]; 3];
        // SAFETY: `path` proves that its instruction set is available.
        unsafe { compare_on(path, &a, b, &mut out) };
        out.map(|out| out.map(f32::to_bits))
    };
    for other in [f32::NAN, 1.0] {
        b[8] = other;
        let want = run(Path::PORTABLE, &b);
        for path in Path::supported() {
            assert_eq!(run(path, &b), want, "{path}");
        }
    }
}
