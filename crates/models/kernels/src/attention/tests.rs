//! Attention compared with its formula in f64, and its bits compared between all ways to divide the
//! work.

use std::ops::Range;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use stolon_kvcache::BlockId;

use super::*;
use crate::attention::args::{AttentionSequence, KvSlice, RelativeBias};
use crate::int4::{self, LEVELS, RoundedHeads};
use crate::kv_layout::KvLayout;
use crate::path::{Path, PathKind};
use crate::reference::{random, to_bf16, worst};

mod full;
mod shared;
mod sinks;
mod stored;

/// The sizes of a layer, and how its cache is stored.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    softcap: Option<f32>,
    window: Option<usize>,
    stored: Stored,
}

/// The stored type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    F32,
    Bf16,
    F16,
    Int8,
    /// Keys in bytes, values in 4 bits.
    Int8Int4,
    Int4,
}

impl Stored {
    /// The types of keys and of values.
    fn planes(self) -> [Stored; 2] {
        match self {
            Stored::Int8Int4 => [Stored::Int8, Stored::Int4],
            other => [other; 2],
        }
    }

    /// The values, `[.., head_dim]`, after they were rounded to the stored type.
    fn rounded(self, values: Vec<f32>, head_dim: usize) -> Vec<f32> {
        match self {
            Stored::F32 => values,
            Stored::Bf16 => to_bf16(&values),
            Stored::F16 => values.iter().map(|&v| half::f16::from_f32(v).to_f32()).collect(),
            Stored::Int8 => {
                let (integers, scales) = quantized(&values, head_dim);
                let heads = integers.chunks(head_dim).zip(scales);
                heads
                    .flat_map(|(head, scale)| head.iter().map(move |&v| f32::from(v) * scale))
                    .collect()
            }
            Stored::Int4 => {
                let RoundedHeads { packed, scales } =
                    RoundedHeads::new(Path::PORTABLE, &values, head_dim);
                let heads = packed.chunks(head_dim / 2).zip(scales);
                let mut values: Vec<f32> = heads
                    .flat_map(|(head, scale)| levels(head).map(move |v| f32::from(v) * scale))
                    .collect();
                int4::rotate(Path::PORTABLE, &mut values, head_dim);
                values
            }
            Stored::Int8Int4 => unreachable!("a plane has one type"),
        }
    }
}

/// Quantizes each head to bytes with a scale. A head of NaNs gets the scale NaN.
fn quantized(values: &[f32], head_dim: usize) -> (Vec<i8>, Vec<f32>) {
    let heads = values.chunks(head_dim);
    let scale = |head: &[f32]| head.iter().fold(head[0], |a, b| a.abs().max(b.abs())) / 127.0;
    let scales: Vec<f32> = heads.clone().map(scale).collect();
    let integers = heads
        .zip(&scales)
        .flat_map(|(head, scale)| head.iter().map(move |v| (v / scale).round() as i8));
    (integers.collect(), scales)
}

/// The levels of the codes in these bytes.
fn levels(packed: &[u8]) -> impl Iterator<Item = i8> + '_ {
    packed.iter().flat_map(|byte| [byte & 15, byte >> 4]).map(|code| LEVELS[usize::from(code)])
}

/// The codes and scales of heads that were rounded to 4 bits before, found again from their values.
/// Rounding them once more could choose other scales. A head of NaNs gets the scale NaN.
fn packed(values: &[f32], head_dim: usize) -> (Vec<u8>, Vec<f32>) {
    let mut rotated = values.to_vec();
    int4::rotate(Path::PORTABLE, &mut rotated, head_dim);
    let above =
        |value: f32| move |pair: &&[i8]| f32::from(pair[0]) + f32::from(pair[1]) < 2.0 * value;
    let code = |value: f32| LEVELS.windows(2).filter(above(value)).count();
    let of_head = |head: &[f32]| -> (Vec<u8>, f32) {
        let largest = head.iter().fold(head[0].abs(), |a, b| a.max(b.abs()));
        if largest.is_nan() || largest == 0.0 {
            return (vec![0; head_dim / 2], largest);
        }
        // The largest level of the head is one of the positive ones.
        let mut scales = LEVELS[8..].iter().rev().map(|level| largest / f32::from(*level));
        let is_level = |value: f32| (f32::from(LEVELS[code(value)]) - value).abs() < 0.01;
        let scale = scales.find(|scale| head.iter().all(|value| is_level(value / scale)));
        let scale = scale.expect("a head that was rounded to 4 bits");
        let codes: Vec<u8> = head.iter().map(|value| code(value / scale) as u8).collect();
        (codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect(), scale)
    };
    let (packed, scales): (Vec<_>, Vec<_>) = rotated.chunks(head_dim).map(of_head).unzip();
    (packed.concat(), scales)
}

const SHAPES: [Shape; 18] = [
    Shape { heads: 4, kv_heads: 2, head_dim: 32, softcap: None, window: None, stored: Stored::F32 },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        softcap: None,
        window: None,
        stored: Stored::Bf16,
    },
    Shape {
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        softcap: None,
        window: Some(37),
        stored: Stored::F32,
    },
    Shape {
        heads: 2,
        kv_heads: 2,
        head_dim: 128,
        softcap: None,
        window: Some(1),
        stored: Stored::Bf16,
    },
    Shape {
        heads: 7,
        kv_heads: 1,
        head_dim: 8,
        softcap: None,
        window: Some(100),
        stored: Stored::Bf16,
    },
    Shape {
        heads: 16,
        kv_heads: 2,
        head_dim: 96,
        softcap: None,
        window: None,
        stored: Stored::Bf16,
    },
    Shape { heads: 2, kv_heads: 1, head_dim: 1, softcap: None, window: None, stored: Stored::F32 },
    Shape { heads: 4, kv_heads: 2, head_dim: 64, softcap: None, window: None, stored: Stored::F16 },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        softcap: None,
        window: None,
        stored: Stored::Int8,
    },
    Shape {
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        softcap: None,
        window: Some(37),
        stored: Stored::Int8,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        softcap: Some(1.5),
        window: None,
        stored: Stored::Bf16,
    },
    Shape {
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        softcap: Some(0.7),
        window: Some(37),
        stored: Stored::F32,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        softcap: Some(4.0),
        window: None,
        stored: Stored::Int8,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        softcap: None,
        window: None,
        stored: Stored::Int4,
    },
    Shape {
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        softcap: Some(0.7),
        window: Some(37),
        stored: Stored::Int4,
    },
    Shape {
        heads: 16,
        kv_heads: 1,
        head_dim: 80,
        softcap: None,
        window: None,
        stored: Stored::Int4,
    },
    Shape {
        heads: 4,
        kv_heads: 2,
        head_dim: 96,
        softcap: None,
        window: Some(100),
        stored: Stored::Int8Int4,
    },
    // Latent attention.
    Shape {
        heads: 2,
        kv_heads: 1,
        head_dim: 576,
        softcap: None,
        window: None,
        stored: Stored::Bf16,
    },
];

/// The queries, keys and values of one sequence, in order of position.
#[derive(Clone)]
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    len: usize,
}

fn sequence(shape: Shape, len: usize, seed: u64) -> Sequence {
    let kv_len = len * shape.kv_heads * shape.head_dim;
    let wide = |values: Vec<f32>| values.into_iter().map(|v| v * 3.0).collect::<Vec<_>>();
    let [keys, values] = shape.stored.planes();
    Sequence {
        q: wide(random(seed, len * shape.heads * shape.head_dim)),
        k: keys.rounded(random(seed + 1, kv_len), shape.head_dim),
        v: values.rounded(random(seed + 2, kv_len), shape.head_dim),
        len,
    }
}

fn expected(shape: Shape, sequence: &Sequence, positions: Range<usize>) -> Vec<f64> {
    expected_with(shape, sequence, positions, None)
}

/// The differences from plain causal attention.
#[derive(Clone, Copy, Debug, Default)]
struct Mask<'a> {
    /// A sink for each head.
    sinks: Option<&'a [f32]>,
    /// Whether the queries of each part see all positions up to the part's end.
    full: bool,
    /// Number of positions after their own that the queries see, if they do not see all.
    after: Option<usize>,
    /// The rows of a relative bias and its reach.
    bias: Option<(&'a [f32], usize)>,
}

impl<'a> From<Option<&'a [f32]>> for Mask<'a> {
    fn from(sinks: Option<&'a [f32]>) -> Self {
        Mask { sinks, ..Mask::default() }
    }
}

/// [`expected`] with a mask.
fn expected_with<'a>(
    shape: Shape,
    sequence: &Sequence,
    positions: Range<usize>,
    mask: impl Into<Mask<'a>>,
) -> Vec<f64> {
    let (Mask { sinks, full, after, bias }, end) = (mask.into(), positions.end);
    let Shape { heads, kv_heads, head_dim, softcap, window, .. } = shape;
    let mut out = Vec::new();
    for position in positions {
        for head in 0..heads {
            let q = &sequence.q[(position * heads + head) * head_dim..][..head_dim];
            let kv = |at: usize| (at * kv_heads + head / (heads / kv_heads)) * head_dim;
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            let last = after.map_or(end, |after| end.min(position + 1 + after));
            let scores: Vec<f64> = (first..if full { last } else { position + 1 })
                .map(|at| {
                    let k = &sequence.k[kv(at)..][..head_dim];
                    let dot: f64 =
                        q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let bias = bias.map_or(0.0, |(values, reach)| {
                        let len = RelativeBias::head_len(reach);
                        f64::from(values[head * len + len / 2 + at - position])
                    });
                    let score = dot / (head_dim as f64).sqrt() + bias / std::f64::consts::LOG2_E;
                    softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum = weights.iter().sum::<f64>() + (sink - max).exp();
            out.extend((0..head_dim).map(|d| {
                let weighted = weights.iter().zip(first..);
                let weighted = weighted.map(|(w, at)| w * f64::from(sequence.v[kv(at) + d]));
                weighted.sum::<f64>() / sum
            }));
        }
    }
    out
}

/// A paged cache with the sequences in randomly chosen blocks. Everything else in it is NaN.
struct Cache {
    tables: Vec<Vec<BlockId>>,
    keys: Vec<f32>,
    values: Vec<f32>,
    block_size: usize,
}

fn cache(shape: Shape, sequences: &[Sequence], block_size: usize) -> Cache {
    let position_len = shape.kv_heads * shape.head_dim;
    let counts: Vec<usize> = sequences.iter().map(|s| s.len.div_ceil(block_size)).collect();
    let total: usize = counts.iter().sum::<usize>() + 3;
    let mut ids: Vec<u32> = (0..u32::try_from(total).unwrap()).collect();
    ids.shuffle(&mut SmallRng::seed_from_u64(9));
    let mut keys = vec![f32::NAN; total * block_size * position_len];
    let mut values = keys.clone();
    let mut ids = ids.into_iter().map(BlockId);
    let mut tables = Vec::new();
    for (sequence, count) in sequences.iter().zip(counts) {
        let table: Vec<BlockId> = ids.by_ref().take(count).collect();
        for position in 0..sequence.len {
            let slot = table[position / block_size].0 as usize * block_size + position % block_size;
            let (to, from) = (slot * position_len, position * position_len);
            keys[to..to + position_len].copy_from_slice(&sequence.k[from..from + position_len]);
            values[to..to + position_len].copy_from_slice(&sequence.v[from..from + position_len]);
        }
        tables.push(table);
    }
    Cache { tables, keys, values, block_size }
}

/// Brings keys that are stored as rows into the order of [`KvLayout::Transposed`].
fn transpose<T: Copy>(rows: &[T], shape: Shape, block_size: usize) -> Vec<T> {
    let Shape { kv_heads, mut head_dim, .. } = shape;
    let together = if shape.stored == Stored::Bf16 { 2 } else { 1 };
    if shape.stored == Stored::Int4 {
        // Rows of bytes with two values each.
        head_dim /= 2;
    }
    let mut transposed = rows.to_vec();
    for (index, value) in rows.iter().enumerate() {
        let (d, head) = (index % head_dim, index / head_dim % kv_heads);
        let (block, offset) =
            (index / head_dim / kv_heads / block_size, index / head_dim / kv_heads % block_size);
        let panel = (block * kv_heads + head) * (block_size / LANES) + offset / LANES;
        let step = panel * (head_dim / together) + d / together;
        transposed[(step * LANES + offset % LANES) * together + d % together] = *value;
    }
    transposed
}

/// Runs parts of the sequences, each (index, start, count), in one call. Returns one output per
/// part.
fn run(
    path: Path,
    threads: &Threads,
    shape: Shape,
    sequences: &[Sequence],
    cache: &Cache,
    parts: &[(usize, usize, usize)],
) -> Vec<Vec<f32>> {
    run_with(path, threads, shape, sequences, cache, parts, None)
}

/// [`run`] with a mask.
fn run_with<'a>(
    path: Path,
    threads: &Threads,
    shape: Shape,
    sequences: &[Sequence],
    cache: &Cache,
    parts: &[(usize, usize, usize)],
    mask: impl Into<Mask<'a>>,
) -> Vec<Vec<f32>> {
    let Mask { sinks, full, after, bias } = mask.into();
    let row_len = shape.heads * shape.head_dim;
    let bf16 = |values: &[f32]| -> Vec<u16> {
        values.iter().map(|&v| half::bf16::from_f32(v).to_bits()).collect()
    };
    let f16 = |values: &[f32]| -> Vec<u16> {
        values.iter().map(|&v| half::f16::from_f32(v).to_bits()).collect()
    };
    let pairs = shape.stored == Stored::Bf16;
    let key_layout = KvLayout::of_keys(path, pairs, cache.block_size, shape.head_dim);
    let transposed = key_layout != KvLayout::Rows;
    let keys = if transposed {
        transpose(&cache.keys, shape, cache.block_size)
    } else {
        cache.keys.clone()
    };
    let planes = [&keys, &cache.values];
    let narrow = planes.map(|plane| match shape.stored {
        Stored::Bf16 => bf16(plane),
        _ => f16(plane),
    });
    // Scales are ordered by position and head in both layouts.
    let mut integers = [&cache.keys, &cache.values].map(|plane| quantized(plane, shape.head_dim));
    let stored = shape.stored.planes();
    let mut codes = [(&cache.keys, stored[0]), (&cache.values, stored[1])].map(
        |(plane, stored)| match stored {
            Stored::Int4 => packed(plane, shape.head_dim),
            _ => Default::default(),
        },
    );
    if transposed {
        integers[0].0 =
            transpose(&integers[0].0, Shape { stored: Stored::Int8, ..shape }, cache.block_size);
        codes[0].0 =
            transpose(&codes[0].0, Shape { stored: Stored::Int4, ..shape }, cache.block_size);
    }
    let [keys, values] = [0, 1].map(|index| match stored[index] {
        Stored::F32 => KvSlice::F32(planes[index]),
        Stored::Bf16 => KvSlice::Bf16(&narrow[index]),
        Stored::F16 => KvSlice::F16(&narrow[index]),
        Stored::Int8 => KvSlice::Int8 { values: &integers[index].0, scales: &integers[index].1 },
        Stored::Int4 => KvSlice::Int4 { packed: &codes[index].0, scales: &codes[index].1 },
        Stored::Int8Int4 => unreachable!("a plane has one type"),
    });
    let q: Vec<f32> = parts
        .iter()
        .flat_map(|&(index, start, count)| {
            sequences[index].q[start * row_len..(start + count) * row_len].to_vec()
        })
        .collect();
    let described: Vec<AttentionSequence<'_>> = parts
        .iter()
        .map(|&(index, start, count)| AttentionSequence {
            start,
            count,
            full,
            block_table: &cache.tables[index],
        })
        .collect();
    let args = AttentionArgs {
        path,
        q: &q,
        sequences: &described,
        keys,
        key_layout,
        values,
        block_size: cache.block_size,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        scale: 1.0 / (shape.head_dim as f32).sqrt(),
        softcap: shape.softcap,
        sliding_window: shape.window,
        window_after: after,
        bias: bias.map(|(values, reach)| RelativeBias::new(values, reach)),
        sinks,
    };
    let mut out = vec![f32::NAN; q.len()];
    attention(threads, &args, &mut out);
    let mut rest = out.as_slice();
    parts
        .iter()
        .map(|&(_, _, count)| {
            let (part, left) = rest.split_at(count * row_len);
            rest = left;
            part.to_vec()
        })
        .collect()
}

/// Goal: three sequences in one call agree with the formula on every path, shape and block size.
#[test]
fn attention_matches_its_formula() {
    let threads = Threads::new(3);
    for path in Path::supported() {
        for shape in SHAPES {
            let sequences: Vec<Sequence> =
                [130, 1, 67].into_iter().zip(0..).map(|(len, i)| sequence(shape, len, i)).collect();
            for block_size in [1, 16, 256] {
                let cache = cache(shape, &sequences, block_size);
                let parts: Vec<_> = (0..3).map(|i| (i, 0, sequences[i].len)).collect();
                let got = run(path, &threads, shape, &sequences, &cache, &parts);
                for (sequence, got) in sequences.iter().zip(&got) {
                    let (difference, at) = worst(got, &expected(shape, sequence, 0..sequence.len));
                    let tolerance = tolerance(path, shape);
                    assert!(
                        difference < tolerance,
                        "{path} {shape:?}: off by {difference} at {at}"
                    );
                }
            }
        }
    }
}

/// Whether the path multiplies keys and values of this shape as bf16, and so rounds queries and
/// weights to bf16.
fn computes_in_bf16(path: Path, shape: Shape) -> bool {
    match (path.kind(), shape.stored) {
        (PathKind::Amx, Stored::Bf16) => shape.head_dim.is_multiple_of(32),
        (PathKind::Avx512Bf16, stored) => {
            !matches!(stored, Stored::F32 | Stored::F16) && shape.head_dim.is_multiple_of(2)
        }
        _ => false,
    }
}

/// The error that the arithmetic of the path allows for values below one. Rounding to bf16 has a
/// relative error of up to 1/512.
fn tolerance(path: Path, shape: Shape) -> f64 {
    if computes_in_bf16(path, shape) { 6e-3 } else { 3e-5 }
}

/// Goal: batch invariance. The output of a query has the same bits whatever the chunks, the block
/// size, the other sequences and the number of threads are. Portable loops, which are slow, compute a
/// third of the cases.
#[test]
fn bits_do_not_depend_on_chunks_blocks_batch_or_threads() {
    let mut rng = SmallRng::seed_from_u64(1);
    let (one, three) = (Threads::new(1), Threads::new(3));
    for path in Path::supported() {
        for shape in SHAPES {
            // The first sequence reaches into a third span.
            let sequences: Vec<Sequence> =
                [1100, 90].into_iter().zip(5..).map(|(len, i)| sequence(shape, len, i)).collect();
            let caches = [16, 1, 64].map(|block_size| cache(shape, &sequences, block_size));
            let want = run(path, &one, shape, &sequences, &caches[0], &[(0, 0, 1100), (1, 0, 90)]);
            for round in (0..6).step_by(if path == Path::PORTABLE { 3 } else { 1 }) {
                let cache = &caches[round % 3];
                let (index, threads) = (round % 2, if round < 3 { &three } else { &one });
                let len = sequences[index].len;
                let mut start = 0;
                while start < len {
                    let count = match round {
                        0 | 1 => rng.random_range(1..200).min(len - start),
                        _ => [1, 7, 64, 100][rng.random_range(0..4)].min(len - start),
                    };
                    // Single positions of a long sequence are slow, so most of them are left out.
                    if count > 1 || start % 16 < 5 {
                        let parts = [(index, start, count), (1 - index, 60, 30)];
                        let got = run(path, threads, shape, &sequences, cache, &parts);
                        let row_len = shape.heads * shape.head_dim;
                        let want = &want[index][start * row_len..(start + count) * row_len];
                        assert!(
                            got[0].iter().map(|v| v.to_bits()).eq(want.iter().map(|v| v.to_bits())),
                            "{path} {shape:?} round {round}: {count} from {start}"
                        );
                    }
                    start += count;
                }
            }
        }
    }
}

/// Goal: a query over many spans has the same bits whether one thread computes them all or several
/// threads some each.
#[test]
fn bits_do_not_depend_on_how_a_long_context_is_divided() {
    let pools = [1, 2, 3, 8].map(Threads::new);
    for path in Path::supported() {
        for stored in [Stored::Bf16, Stored::F32] {
            let shape =
                Shape { heads: 4, kv_heads: 2, head_dim: 32, softcap: None, window: None, stored };
            for shape in [shape, Shape { window: Some(1300), ..shape }] {
                let sequences = [sequence(shape, 2600, 3)];
                let cache = cache(shape, &sequences, 16);
                for parts in [(0, 2599, 1), (0, 2500, 7)] {
                    let got = pools
                        .each_ref()
                        .map(|pool| run(path, pool, shape, &sequences, &cache, &[parts]));
                    let bits =
                        got.map(|got| got[0].iter().map(|v| v.to_bits()).collect::<Vec<_>>());
                    assert!(bits.iter().all(|other| *other == bits[0]), "{path} {shape:?}");
                }
            }
        }
    }
}

/// Goal: a block table that names a block which does not exist is an error, and the block is not
/// read.
#[test]
#[should_panic(expected = "block 99 of 4")]
fn nonexistent_block_is_refused() {
    let store = [0.0; 4 * 16 * 8];
    let sequence =
        AttentionSequence { start: 0, count: 1, full: false, block_table: &[BlockId(99)] };
    let args = AttentionArgs {
        path: Path::PORTABLE,
        q: &[0.0; 8],
        sequences: &[sequence],
        keys: KvSlice::F32(&store),
        key_layout: KvLayout::Rows,
        values: KvSlice::F32(&store),
        block_size: 16,
        heads: 1,
        kv_heads: 1,
        head_dim: 8,
        scale: 1.0,
        softcap: None,
        sliding_window: None,
        window_after: None,
        bias: None,
        sinks: None,
    };
    attention(&Threads::new(1), &args, &mut [0.0; 8]);
}
