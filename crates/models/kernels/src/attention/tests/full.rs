//! Positions that see each other in both directions, as in an image.

use super::*;

const FULL: Mask<'static> = Mask { sinks: None, full: true, after: None, bias: None };

/// Goal: full attention of a part of a sequence, after other positions, agrees with the formula on
/// every path and shape, and differs from causal attention.
#[test]
fn full_attention_matches_the_formula() {
    let threads = Threads::new(2);
    for shape in SHAPES {
        let sequences = [sequence(shape, 900, 41)];
        for (block_size, (start, count)) in
            [(16, (0, 150)), (1, (3, 70)), (64, (450, 300)), (16, (890, 1))]
        {
            let cache = cache(shape, &sequences, block_size);
            let parts = [(0, start, count)];
            let expected = expected_with(shape, &sequences[0], start..start + count, FULL);
            for path in Path::supported() {
                let got = run_with(path, &threads, shape, &sequences, &cache, &parts, FULL);
                let (difference, at) = worst(&got[0], &expected);
                let tolerance = tolerance(path, shape);
                let what = format!("{path} {shape:?} {start} {count}");
                assert!(difference < tolerance, "{what}: off by {difference} at {at}");
                let causal = run(path, &threads, shape, &sequences, &cache, &parts);
                assert_eq!(got == causal, count == 1, "{what}");
            }
        }
    }
}

/// Goal: the bits of full attention do not depend on the block size, on other sequences of the call,
/// which may be causal, or on how many threads divide the context.
#[test]
fn bits_of_full_attention_do_not_depend_on_blocks_batch_or_threads() {
    let pools = [1, 3, 8].map(Threads::new);
    for path in Path::supported() {
        for shape in [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[5], SHAPES[8]] {
            let sequences = [sequence(shape, 1300, 43), sequence(shape, 80, 44)];
            let caches = [16, 1, 64].map(|block_size| cache(shape, &sequences, block_size));
            let run = |cache, pool, parts: &[_]| {
                run_with(path, pool, shape, &sequences, cache, parts, FULL)
            };
            let alone = run(&caches[0], &pools[0], &[(0, 500, 700)]);
            for (cache, pool) in caches.iter().zip(&pools) {
                let got = run(cache, pool, &[(1, 0, 80), (0, 500, 700), (1, 79, 1)]);
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert!(bits(&got[1]) == bits(&alone[0]), "{path} {shape:?}");
            }
        }
    }
}

/// Goal: attention within a window on both sides, and with a bias by distance, agrees with the
/// formula on every path and shape, and each of them changes the result.
#[test]
fn windows_on_both_sides_and_biases_match_the_formula() {
    let threads = Threads::new(2);
    let reach = 700;
    for shape in SHAPES {
        // The scales of 8-bit keys are applied to sums of scores, to which no bias is added.
        let biased = !matches!(shape.stored, Stored::Int8 | Stored::Int8Int4 | Stored::Int4);
        let rows = random(45, shape.heads * RelativeBias::head_len(reach));
        let bias = biased.then_some((&rows[..], reach));
        let sequences = [sequence(shape, 700, 46)];
        let cache = cache(shape, &sequences, 64);
        for (start, count, before, after) in [
            (0, 150, Some(17), Some(16)),
            (0, 700, Some(65), Some(64)),
            (400, 300, None, Some(3)),
            (3, 600, Some(130), None),
            (0, 40, None, None),
        ] {
            let shape = Shape { window: before, ..shape };
            let parts = [(0, start, count)];
            let mask = Mask { after, bias, ..FULL };
            let expected = expected_with(shape, &sequences[0], start..start + count, mask);
            for path in Path::supported() {
                let run = |mask| run_with(path, &threads, shape, &sequences, &cache, &parts, mask);
                let got = run(mask);
                let (difference, at) = worst(&got[0], &expected);
                let tolerance = tolerance(path, shape);
                let what = format!("{path} {shape:?} {start} {count} {after:?}");
                assert!(difference < tolerance, "{what}: off by {difference} at {at}");
                assert_eq!(got == run(Mask { after, ..FULL }), !biased, "{what}");
            }
        }
    }
}

/// Goal: the bits of windows and biases do not depend on the other sequences of a call, nor on the
/// number of threads.
#[test]
fn bits_of_windows_and_biases_do_not_depend_on_the_batch_or_threads() {
    let pools = [1, 3].map(Threads::new);
    let reach = 1300;
    for path in Path::supported() {
        let shape = Shape { window: Some(65), ..SHAPES[0] };
        let rows = random(47, shape.heads * RelativeBias::head_len(reach));
        let mask = Mask { after: Some(64), bias: Some((&rows, reach)), ..FULL };
        let sequences = [sequence(shape, 1300, 48), sequence(shape, 80, 49)];
        let cache = cache(shape, &sequences, 64);
        let run = |pool, parts: &[_]| run_with(path, pool, shape, &sequences, &cache, parts, mask);
        let alone = run(&pools[0], &[(0, 0, 1300)]);
        for pool in &pools {
            let got = run(pool, &[(1, 0, 80), (0, 0, 1300), (1, 0, 80)]);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got[1]) == bits(&alone[0]), "{path}");
        }
    }
}
