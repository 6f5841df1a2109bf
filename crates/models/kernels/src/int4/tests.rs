use super::*;
use crate::reference::random;

/// The values of rounded heads before they are rotated back.
fn levels(rounded: &RoundedHeads, head_dim: usize) -> Vec<f32> {
    let heads = rounded.packed.chunks(head_dim / 2).zip(&rounded.scales);
    heads
        .flat_map(|(head, scale)| {
            head.iter()
                .flat_map(|byte| [byte & 15, byte >> 4])
                .map(move |code| f32::from(LEVELS[usize::from(code)]) * scale)
        })
        .collect()
}

fn squares(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum()
}

/// Goal: a rotation equals the product with the Walsh-Hadamard matrix in its natural order, and is
/// its own inverse.
#[test]
fn rotation_equals_the_matrix() {
    for (head_dim, len) in [(2, 2), (18, 2), (80, 16), (96, 32), (64, 64), (128, 128), (512, 256)] {
        assert_eq!(rotated_len(head_dim), len);
        let heads = random(1, 3 * head_dim);
        let mut got = heads.clone();
        rotate(Path::PORTABLE, &mut got, head_dim);
        for (index, got) in got.iter().enumerate() {
            let (first, row) = (index / len * len, index % len);
            let want: f64 = (0..len)
                .map(|column| {
                    let sign =
                        if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    sign * f64::from(heads[first + column]) / (len as f64).sqrt()
                })
                .sum();
            assert!((f64::from(*got) - want).abs() < 1e-5, "{head_dim}: {got} for {want}");
        }
        rotate(Path::PORTABLE, &mut got, head_dim);
        let near = got.iter().zip(&heads).all(|(got, want)| (got - want).abs() < 1e-5);
        assert!(near, "{head_dim}");
    }
}

/// Goal: heads have the same bits on every instruction set, alone and together with others.
#[test]
fn heads_have_the_same_bits_on_every_path() {
    for head_dim in [2, 18, 64, 80, 128, 576] {
        let heads = random(2, 5 * head_dim);
        let want = RoundedHeads::new(Path::PORTABLE, &heads, head_dim);
        for path in Path::supported() {
            for (index, head) in heads.chunks(head_dim).enumerate() {
                let got = RoundedHeads::new(path, head, head_dim);
                let packed = &want.packed[index * head_dim / 2..][..head_dim / 2];
                assert!(got.packed == packed, "{path} {head_dim}");
                assert_eq!(got.scales[0].to_bits(), want.scales[index].to_bits(), "{path}");
            }
        }
    }
}

/// Goal: the squared error of normally distributed heads is at most that of a plain search for the
/// best scale, plus 3 %. One outlier makes the error of a whole head larger if it is not rotated, and
/// hardly if it is.
#[test]
fn error_is_close_to_the_least() {
    let normal = |seed| -> Vec<f32> {
        let sums = random(seed, 12 * 64 * 128);
        sums.chunks(12).map(|uniform| uniform.iter().sum()).collect()
    };
    for head_dim in [64, 128] {
        let mut heads = normal(3);
        let error = |heads: &[f32]| {
            let rounded = RoundedHeads::new(Path::PORTABLE, heads, head_dim);
            let mut rotated = heads.to_vec();
            rotate(Path::PORTABLE, &mut rotated, head_dim);
            let got = levels(&rounded, head_dim);
            let off = squares(rotated.iter().zip(got).map(|(value, got)| value - got));
            (off / squares(rotated.iter().copied()), rotated)
        };
        let (got, rotated) = error(&heads);
        let best = rotated.chunks(head_dim).map(|head| {
            let largest = head.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            let of_scale = |scale: f32| {
                squares(head.iter().map(|value| {
                    let off = LEVELS.map(|level| (value - f32::from(level) * scale).abs());
                    off.into_iter().fold(f32::MAX, f32::min)
                }))
            };
            (60..110)
                .map(|share| of_scale(largest * share as f32 / 12_700.0))
                .fold(f64::MAX, f64::min)
        });
        let best = best.sum::<f64>() / squares(rotated.iter().copied());
        assert!(got < 1.03 * best && got < 0.009, "{head_dim}: {got} for {best}");
        heads.chunks_mut(head_dim).for_each(|head| head[3] += 100.0);
        let (with_outlier, _) = error(&heads);
        assert!(with_outlier < 0.03, "{head_dim}: {with_outlier}");
    }
}

/// Goal: heads of zeroes and of tiny values are stored as zeroes, and heads with values that are not
/// finite become NaN.
#[test]
fn unusual_heads_are_zero_or_nan() {
    for (value, want) in [(0.0, 0.0), (1e-42, 0.0), (f32::NAN, f32::NAN), (f32::INFINITY, f32::NAN)]
    {
        let mut head = [0.0; 16];
        head[5] = value;
        let got = RoundedHeads::new(Path::PORTABLE, &head, 16).scales[0];
        assert!(got == want || got.is_nan() && want.is_nan(), "{value}: {got}");
    }
    let wide = RoundedHeads::new(Path::PORTABLE, &[1e37; 16], 16);
    assert!(wide.scales[0].is_finite() && wide.scales[0] > 0.0);
}

/// Copies of the levels of codes, loaded in every way: `[firsts, seconds, adjacent]`.
#[inline(always)]
unsafe fn load_lanes<L: Lanes>(bytes: &[u8; LANES], to: &mut [[f32; LANES]; 3]) {
    // SAFETY: there are 16 bytes, which `load_i4` reads half of, and the arrays have 16 values.
    unsafe {
        L::load_i4_firsts(bytes.as_ptr()).store(to[0].as_mut_ptr());
        L::load_i4_seconds(bytes.as_ptr()).store(to[1].as_mut_ptr());
        L::load_i4(bytes.as_ptr()).store(to[2].as_mut_ptr());
    }
}
dispatch! {
    /// # Safety
    /// There are no conditions; `dispatch!` makes unsafe functions only.
    unsafe fn load_on(bytes: &[u8; LANES], to: &mut [[f32; LANES]; 3]) = load_lanes
}

/// Goal: every instruction set loads the levels of all codes.
#[test]
fn codes_are_loaded_as_their_levels() {
    for path in Path::supported() {
        for first in (0..=255).step_by(LANES) {
            let bytes: [u8; LANES] = std::array::from_fn(|index| (first + 37 * index) as u8);
            let level = |code: u8| f32::from(LEVELS[usize::from(code)]);
            let mut got = [[0.0; LANES]; 3];
            // SAFETY: the function has no conditions.
            unsafe { load_on(path, &bytes, &mut got) };
            let adjacent = |index: usize| level((bytes[index / 2] >> (index % 2 * 4)) & 15);
            assert_eq!(got[0], bytes.map(|byte| level(byte & 15)), "{path}");
            assert_eq!(got[1], bytes.map(|byte| level(byte >> 4)), "{path}");
            assert_eq!(got[2], std::array::from_fn(adjacent), "{path}");
        }
    }
}
