//! The kernel that finds the largest logits.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use stolon_backend::TokenLogit;

use super::host::Program;

/// The count of a row that the host has to look at.
const UNUSABLE: u32 = u32::MAX;
/// Number of threads of the kernel.
const THREADS: usize = 512;

/// What the kernel finds in each row; `None` for a row that the host has to look at.
fn run(
    program: &Program,
    rows: &[Vec<f32>],
    counts: &[u32],
    descending: bool,
) -> Vec<Option<Vec<TokenLogit>>> {
    let count_max = counts.iter().max().copied().expect("a row") as usize;
    let arguments = [usize::from(descending), rows.len(), rows[0].len(), count_max];
    let mut input: Vec<u8> = rows.iter().flatten().flat_map(|logit| logit.to_ne_bytes()).collect();
    input.extend(counts.iter().flat_map(|count| count.to_ne_bytes()));
    let output = program.run(&arguments.map(|number| number.to_string()), &input);
    let numbers: Vec<u32> =
        output.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect();
    let row = |found: &[u32]| {
        let (&count, pairs) = found.split_first().expect("a count");
        let pairs = pairs.as_chunks().0.iter().take(count as usize);
        let top = pairs.map(|&[token, bits]| TokenLogit { token, logit: f32::from_bits(bits) });
        (count != UNUSABLE).then(|| top.collect())
    };
    numbers.chunks_exact(1 + 2 * count_max).map(row).collect()
}

/// A row of one of several kinds: random, with many equal logits, all equal, ascending, descending.
fn row(kind: usize, len: usize, random: &mut SmallRng) -> Vec<f32> {
    let mut row: Vec<f32> = (0..len).map(|_| random.random_range(-20.0..20.0)).collect();
    match kind {
        0 => {}
        1 => row.iter_mut().for_each(|logit| *logit = logit.round()),
        2 => row.fill(-0.0),
        3 => row.sort_unstable_by(f32::total_cmp),
        _ => row.sort_unstable_by(|a, b| b.total_cmp(a)),
    }
    row
}

/// Goal: for vocabularies that are smaller and larger than a block of threads, the kernel finds what the
/// engine's function finds, and the order in which threads run changes nothing.
#[test]
fn the_largest_logits_of_rows_are_found() {
    let program = Program::compile("top_logits.cpp");
    let mut random = SmallRng::seed_from_u64(3);
    for (round, len) in [1, 7, 300, THREADS, THREADS + 1, 5_000, 32_000].into_iter().enumerate() {
        let rows: Vec<Vec<f32>> = (0..10).map(|kind| row(kind % 5, len, &mut random)).collect();
        let counts: Vec<u32> = (0..10).map(|row| [1, 2, 50, 256][(row + round) % 4]).collect();
        let got = run(&program, &rows, &counts, false);
        for ((row, got), count) in rows.iter().zip(&got).zip(&counts) {
            let expected = TokenLogit::largest(row, *count as usize);
            assert_eq!(got.as_ref(), Some(&expected), "{len} logits, {count}");
        }
        assert_eq!(run(&program, &rows, &counts, true), got, "another order");
    }
}

/// Goal: a row with a NaN or +infinity, or whose largest logits all belong to few threads, is left to the
/// host, and does not disturb others.
#[test]
fn rows_that_are_unusable_are_left_to_the_host() {
    let program = Program::compile("top_logits.cpp");
    let mut random = SmallRng::seed_from_u64(4);
    let mut good = row(0, 60_000, &mut random);
    good[..30_000].fill(f32::NEG_INFINITY);
    good.shuffle(&mut random);
    let with = |value: f32, at: usize| {
        let mut row = good.clone();
        row[at] = value;
        row
    };
    let mut few_threads = good.clone();
    for (token, logit) in few_threads.iter_mut().enumerate() {
        if token % THREADS < 39 {
            *logit = 1000.0 - (token % 997) as f32;
        }
    }
    let bad = [
        with(f32::NAN, 0),
        with(-f32::NAN, 59_999),
        with(f32::INFINITY, 12_345),
        few_threads,
        good.clone(),
    ];
    let got = run(&program, &bad, &[40; 5], false);
    assert!(got[..4].iter().all(Option::is_none), "{got:?}");
    assert_eq!(got[4].as_ref(), Some(&TokenLogit::largest(&good, 40)));
}
