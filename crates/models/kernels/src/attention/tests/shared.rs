//! Decoding sequences that share a prefix, compared with the same sequences alone.

use super::*;

const SHARED_SHAPES: [Shape; 11] = [
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        softcap: Some(0.8),
        window: None,
        stored: Stored::Bf16,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        softcap: None,
        window: None,
        stored: Stored::Bf16,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        softcap: None,
        window: Some(500),
        stored: Stored::Bf16,
    },
    Shape {
        heads: 12,
        kv_heads: 1,
        head_dim: 64,
        softcap: None,
        window: None,
        stored: Stored::Bf16,
    },
    Shape { heads: 3, kv_heads: 1, head_dim: 20, softcap: None, window: None, stored: Stored::F32 },
    Shape {
        heads: 5,
        kv_heads: 1,
        head_dim: 33,
        softcap: None,
        window: Some(700),
        stored: Stored::Bf16,
    },
    Shape { heads: 7, kv_heads: 1, head_dim: 16, softcap: None, window: None, stored: Stored::F16 },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 24,
        softcap: None,
        window: None,
        stored: Stored::Int8,
    },
    Shape { heads: 20, kv_heads: 1, head_dim: 8, softcap: None, window: None, stored: Stored::F32 },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 48,
        softcap: None,
        window: None,
        stored: Stored::Int4,
    },
    Shape {
        heads: 12,
        kv_heads: 1,
        head_dim: 24,
        softcap: None,
        window: Some(500),
        stored: Stored::Int8Int4,
    },
];

/// Sequences, each of which has a prefix of random length in common with a random earlier one, and
/// a cache in which the whole blocks of these prefixes exist once.
fn family(
    shape: Shape,
    count: usize,
    block_size: usize,
    rng: &mut SmallRng,
) -> (Vec<Sequence>, Cache) {
    let position_len = shape.kv_heads * shape.head_dim;
    let mut sequences: Vec<Sequence> = Vec::new();
    let mut shares = Vec::new();
    for index in 0..count {
        let len = rng.random_range(1..1400);
        let mut own = sequence(shape, len, 100 + 3 * index as u64);
        let of = if index == 0 { 0 } else { rng.random_range(0..index) };
        let most = if index == 0 { 0 } else { len.min(sequences[of].len) / block_size };
        // Often the longest possible prefix, so that whole groups share long prefixes.
        let blocks = if rng.random_bool(0.5) { most } else { rng.random_range(0..=most) };
        let shared = blocks * block_size * position_len;
        if shared > 0 {
            own.k[..shared].copy_from_slice(&sequences[of].k[..shared]);
            own.v[..shared].copy_from_slice(&sequences[of].v[..shared]);
        }
        shares.push((of, blocks));
        sequences.push(own);
    }
    let mut cache = cache(shape, &sequences, block_size);
    for (index, (of, blocks)) in shares.into_iter().enumerate() {
        let (before, own) = cache.tables.split_at_mut(index);
        if blocks > 0 {
            own[0][..blocks].copy_from_slice(&before[of][..blocks]);
        }
    }
    (sequences, cache)
}

/// Goal: a decode has the same bits alone and together with others that share any part of its
/// prefix, in any order, on every path, stored type, block size and number of threads, with and
/// without a sliding window.
#[test]
fn bits_do_not_depend_on_other_readers_of_a_prefix() {
    let mut rng = SmallRng::seed_from_u64(2);
    let pools = [1, 3].map(Threads::new);
    for path in Path::supported() {
        for shape in SHARED_SHAPES {
            for (block_size, count) in [(1, 4), (16, 9), (64, 5), (256, 6), (48, 5)] {
                let (sequences, cache) = family(shape, count, block_size, &mut rng);
                let mut parts: Vec<_> =
                    (0..count).map(|index| (index, sequences[index].len - 1, 1)).collect();
                // The batch also contains some rows of a prompt.
                let rows = sequences[0].len.min(30);
                parts.push((0, sequences[0].len - rows, rows));
                parts.shuffle(&mut rng);
                let pool = &pools[block_size % 2];
                let together = run(path, pool, shape, &sequences, &cache, &parts);
                for (part, got) in parts.iter().zip(&together) {
                    let alone = run(path, &pools[0], shape, &sequences, &cache, &[*part]);
                    assert!(
                        got.iter().map(|v| v.to_bits()).eq(alone[0].iter().map(|v| v.to_bits())),
                        "{path} {shape:?} blocks of {block_size}: {part:?}"
                    );
                }
            }
        }
    }
}

/// Goal: a shared prefix is read from the shared blocks only and the results match the formula,
/// also with more sequences than fit in a work item.
#[test]
fn many_decodes_of_one_prefix_match_the_formula() {
    for (head_dim, stored) in [(16, Stored::F32), (32, Stored::Bf16)] {
        check_many_decodes(Shape {
            heads: 8,
            kv_heads: 1,
            head_dim,
            softcap: None,
            window: None,
            stored,
        });
    }
}

fn check_many_decodes(shape: Shape) {
    let (block_size, shared, count) = (16, 576, 40);
    let mut sequences: Vec<Sequence> =
        (0..count).map(|index| sequence(shape, shared + 1 + index, 3 * index as u64)).collect();
    let (first, others) = sequences.split_at_mut(1);
    for other in others {
        let len = shared * shape.head_dim;
        other.k[..len].copy_from_slice(&first[0].k[..len]);
        other.v[..len].copy_from_slice(&first[0].v[..len]);
    }
    let mut cache = cache(shape, &sequences, block_size);
    let blocks = shared / block_size;
    let head: Vec<BlockId> = cache.tables[0][..blocks].to_vec();
    for table in &mut cache.tables[1..] {
        // The sequence's own copy of the prefix must not be read.
        for block in &table[..blocks] {
            let at = block.0 as usize * block_size * shape.head_dim;
            cache.keys[at..at + block_size * shape.head_dim].fill(f32::NAN);
        }
        table[..blocks].copy_from_slice(&head);
    }
    let parts: Vec<_> = (0..count).map(|i| (i, sequences[i].len - 1, 1)).collect();
    for path in Path::supported() {
        for threads in [1, 4].map(Threads::new) {
            let got = run(path, &threads, shape, &sequences, &cache, &parts);
            for (sequence, got) in sequences.iter().zip(&got) {
                let want = expected(shape, sequence, sequence.len - 1..sequence.len);
                let (difference, at) = worst(got, &want);
                assert!(difference < tolerance(path, shape), "{path}: off by {difference} at {at}");
            }
        }
    }
}
