//! Attention sinks.

use super::*;

/// Sinks below, among and far above the scores of a test's positions.
const SINKS: [f32; 16] =
    [-9.0, 0.5, 3.0, 1.0, -0.5, 2.0, 40.0, 0.0, -3.0, 1.5, 2.5, -1.0, 0.25, 4.0, -100.0, 0.75];

/// Goal: attention with sinks agrees with the formula on every path and shape.
#[test]
fn sinks_match_the_formula() {
    let threads = Threads::new(2);
    for path in Path::supported() {
        for shape in SHAPES {
            let sinks = &SINKS[..shape.heads];
            let sequences = [sequence(shape, 130, 31)];
            let cache = cache(shape, &sequences, 16);
            let parts = [(0, 0, 130)];
            let got = run_with(path, &threads, shape, &sequences, &cache, &parts, Some(sinks));
            let expected = expected_with(shape, &sequences[0], 0..130, Some(sinks));
            let (difference, at) = worst(&got[0], &expected);
            let tolerance = tolerance(path, shape);
            assert!(difference < tolerance, "{path} {shape:?}: off by {difference} at {at}");
            let plain = run(path, &threads, shape, &sequences, &cache, &parts);
            assert_ne!(got, plain, "{path} {shape:?}: sinks must have an effect");
        }
    }
}

/// Goal: with sinks, bits do not depend on the chunks, or on how many threads divide a long
/// context.
#[test]
fn bits_with_sinks_do_not_depend_on_chunks_or_threads() {
    let pools = [1, 3, 8].map(Threads::new);
    for path in Path::supported() {
        for shape in [SHAPES[0], SHAPES[1], SHAPES[2]] {
            let sinks = Some(&SINKS[..shape.heads]);
            let sequences = [sequence(shape, 1500, 33)];
            let cache = cache(shape, &sequences, 16);
            let all = run_with(path, &pools[0], shape, &sequences, &cache, &[(0, 0, 1500)], sinks);
            let row_len = shape.heads * shape.head_dim;
            for (start, count) in [(1499, 1), (1400, 90), (511, 1), (0, 7)] {
                let expected = &all[0][start * row_len..(start + count) * row_len];
                for pool in &pools {
                    let parts = [(0, start, count)];
                    let got = run_with(path, pool, shape, &sequences, &cache, &parts, sinks);
                    let bits = |values: &[f32]| -> Vec<u32> {
                        values.iter().map(|value| value.to_bits()).collect()
                    };
                    assert!(bits(&got[0]) == bits(expected), "{path} {shape:?} {start} {count}");
                }
            }
        }
    }
}
