//! What keys and values are stored as: what that costs, and that the ways to read it agree.

use super::*;

/// Goal: keys and values of 16 bits count as the f32s they stand for, to the last bit: keys multiplied in pairs
/// and values multiplied where they stand, or both widened before.
#[test]
fn sixteen_bits_count_as_what_they_widen_to() {
    let threads = Threads::new(2);
    for path in Path::supported() {
        for stored in [Stored::Bf16, Stored::F16] {
            // None of these sizes goes to AMX tiles.
            for (heads, head_dim) in [(4, 80), (4, 18), (12, 16), (3, 33)] {
                let shape = Shape { heads, kv_heads: 1, head_dim, window: Some(333), stored };
                let sequences = [sequence(shape, 600, 21)];
                for block_size in [1, 16, 24, 64] {
                    let cache = cache(shape, &sequences, block_size);
                    for part in [(0, 599, 1), (0, 420, 2), (0, 100, 200)] {
                        let [got, want] = [stored, Stored::F32].map(|stored| {
                            let shape = Shape { stored, ..shape };
                            run(path, &threads, shape, &sequences, &cache, &[part])
                        });
                        let bits = |out: &[Vec<f32>]| -> Vec<u32> {
                            out[0].iter().map(|value| value.to_bits()).collect()
                        };
                        assert!(
                            bits(&got) == bits(&want),
                            "{path} {shape:?} {block_size} {part:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Goal: what a smaller store costs: with keys and values below one, queries below three and 64 values
/// a head, f16 is within 1e-3 of the formula on values that were never rounded, bf16 and integers
/// within 2e-2.
#[test]
fn smaller_stores_stay_near() {
    let threads = Threads::new(2);
    for (stored, bound) in
        [(Stored::F32, 3e-5), (Stored::F16, 1e-3), (Stored::Bf16, 2e-2), (Stored::Int8, 2e-2)]
    {
        let exact =
            Shape { heads: 4, kv_heads: 2, head_dim: 64, window: None, stored: Stored::F32 };
        let shape = Shape { stored, ..exact };
        let sequence = sequence(exact, 150, 11);
        let want = expected(exact, &sequence, 0..sequence.len);
        let sequences = [sequence];
        let cache = cache(exact, &sequences, 16);
        for path in Path::supported() {
            let got = run(path, &threads, shape, &sequences, &cache, &[(0, 0, 150)]);
            let (difference, at) = worst(&got[0], &want);
            assert!(difference < bound, "{path} {stored:?}: off by {difference} at {at}");
        }
    }
}
