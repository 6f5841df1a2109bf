//! The kernel that draws tokens from rows of logits.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use stolon_backend::Draw;

use super::host::Program;

/// Returned instead of a token if the host has to choose it from the row.
const UNUSABLE: u32 = u32::MAX;
/// Number of threads of the kernel.
const THREADS: usize = 512;

/// The token that the kernel draws from each row; `None` if the host has to choose it.
fn run(program: &Program, rows: &[Vec<f32>], draws: &[Draw], descending: bool) -> Vec<Option<u32>> {
    let arguments = [usize::from(descending), rows.len(), rows[0].len()];
    let mut input: Vec<u8> = rows.iter().flatten().flat_map(|logit| logit.to_ne_bytes()).collect();
    for draw in draws {
        for number in [draw.temperature, draw.top_p, draw.min_p] {
            input.extend(number.to_ne_bytes());
        }
        input.extend((draw.top_k.unwrap_or(0) as u32).to_ne_bytes());
        let uniform = draw.uniform.to_bits();
        input.extend([uniform as u32, (uniform >> 32) as u32].map(u32::to_ne_bytes).concat());
    }
    let output = program.run(&arguments.map(|number| number.to_string()), &input);
    let tokens = output.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
    tokens.map(|token| (token != UNUSABLE).then_some(token)).collect()
}

/// A row of one of several kinds: like a model's, nearly flat, with many equal logits, all equal,
/// ascending, descending, with excluded tokens.
fn row(kind: usize, len: usize, random: &mut SmallRng) -> Vec<f32> {
    let mut row: Vec<f32> = (0..len).map(|_| random.random_range(-10.0_f32..10.0)).collect();
    match kind {
        0 => row.iter_mut().for_each(|logit| *logit = logit.powi(3) / 40.0),
        1 => row.iter_mut().for_each(|logit| *logit /= 100.0),
        2 => row.iter_mut().for_each(|logit| *logit = logit.round()),
        3 => row.fill(-0.0),
        4 => row.sort_unstable_by(f32::total_cmp),
        5 => row.sort_unstable_by(|a, b| b.total_cmp(a)),
        _ => row.iter_mut().step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY),
    }
    if row.iter().all(|logit| *logit == f32::NEG_INFINITY) {
        row[0] = 1.0;
    }
    row
}

/// A draw of one of several kinds: greedy, of the whole row, with min-p, with top-k, with top-p,
/// with all.
fn draw(kind: usize, random: &mut SmallRng) -> Draw {
    let uniform = match random.random_range(0..8) {
        0 => 0.0,
        1 => 1.0 - f64::EPSILON / 2.0,
        _ => random.random(),
    };
    let all = Draw { temperature: random.random_range(0.1..1.5), uniform, ..Draw::GREEDY };
    let top_p = random.random_range(0.05..1.0);
    let top_k = Some([1, 2, 50, 255, 256][random.random_range(0..5)]);
    match kind {
        0 => Draw { uniform, ..Draw::GREEDY },
        1 => all,
        2 => Draw { min_p: random.random_range(0.0..1.0), ..all },
        3 => Draw { top_k, ..all },
        4 => Draw { top_p, ..all },
        5 => Draw { top_p, min_p: 0.05, ..all },
        _ => Draw { top_k, top_p, min_p: 0.1, ..all },
    }
}

/// Goal: for vocabularies that are smaller and larger than a block of threads and than a block of
/// weights, also not a multiple of any, the kernel draws the token that the engine draws, and the
/// order in which threads run changes nothing. Only rows from which top-p keeps more tokens than
/// the kernel orders are left to the host.
#[test]
fn the_kernel_draws_what_the_engine_draws() {
    let program = Program::compile("draw.cpp");
    let mut random = SmallRng::seed_from_u64(3);
    let (mut drawn, mut left) = (0, 0);
    for len in [1, 7, 256, 257, THREADS, 1024, 1029, 5_000, 32_000, 33_001] {
        for kind in 0..7 {
            let rows: Vec<Vec<f32>> = (0..14).map(|_| row(kind, len, &mut random)).collect();
            let draws: Vec<Draw> = (0..14).map(|at| draw(at % 7, &mut random)).collect();
            let got = run(&program, &rows, &draws, false);
            for ((row, draw), got) in rows.iter().zip(&draws).zip(&got) {
                let Some(token) = got else {
                    assert!(draw.top_k.is_none_or(|count| count >= len) && draw.top_p < 1.0);
                    assert!(len > Draw::TOP_P_FIRST, "{len} logits, {draw:?}");
                    left += 1;
                    continue;
                };
                assert_eq!(draw.of(row), Ok(*token), "{len} logits of kind {kind}, {draw:?}");
                drawn += 1;
            }
            assert_eq!(run(&program, &rows, &draws, true), got, "another order");
        }
    }
    assert!(drawn > 850 && left > 20, "{drawn} drawn, {left} left to the host");
}

/// Goal: a row with a NaN or +infinity, with no finite logit, with a larger top-k than the kernel
/// allows, or whose largest logits all belong to few threads, is left to the host, and does not
/// disturb others.
#[test]
fn rows_that_are_unusable_are_left_to_the_host() {
    let program = Program::compile("draw.cpp");
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
    let rows = [
        with(f32::NAN, 0),
        with(-f32::NAN, 59_999),
        with(f32::INFINITY, 12_345),
        vec![f32::NEG_INFINITY; 60_000],
        few_threads,
        good.clone(),
        good.clone(),
    ];
    let top_40 = Draw { temperature: 1.0, top_k: Some(40), uniform: 0.4, ..Draw::GREEDY };
    let mut draws = [top_40; 7];
    draws[5].top_k = Some(257);
    let got = run(&program, &rows, &draws, false);
    assert_eq!(got[..6], [None; 6]);
    assert_eq!(got[6], Some(top_40.of(&good).expect("a good row")));
}
