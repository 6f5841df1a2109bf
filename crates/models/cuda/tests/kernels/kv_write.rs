//! The kernels that write new keys and values to the KV store.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use stolon_kernels::int8_head;

use super::host::Program;

/// The sizes of a launch.
#[derive(Clone, Copy, Debug)]
struct Launch {
    unit_bytes: usize,
    grid: usize,
    block: usize,
    /// Number of rows to copy.
    count: usize,
    /// Number of units of a row.
    width: usize,
    /// Number of rows of the store.
    len: usize,
}

/// The store after the kernel has run on it.
fn run(program: &Program, launch: Launch, rows: &[u8], indices: &[u32], store: &[u8]) -> Vec<u8> {
    let Launch { unit_bytes, grid, block, count, width, len } = launch;
    let arguments = [unit_bytes, grid, block, count, width, len].map(|number| number.to_string());
    let mut input = rows.to_vec();
    input.extend(indices.iter().flat_map(|index| index.to_ne_bytes()));
    input.extend(store);
    program.run(&arguments, &input)
}

/// Goal: for grids and blocks that are smaller and larger than the data, exactly the named rows of
/// the store are replaced, in all unit sizes.
#[test]
fn rows_are_written_where_the_indices_say() {
    let program = Program::compile("kv_write.cpp");
    let mut random = SmallRng::seed_from_u64(1);
    for round in 0..60 {
        let len = random.random_range(1..200);
        let launch = Launch {
            unit_bytes: [4, 16, 1][round % 3],
            grid: random.random_range(1..60),
            block: [1, 3, 32, 128][round % 4],
            count: random.random_range(1..=len.min(50)),
            width: random.random_range(1..150),
            len,
        };
        let row_bytes = launch.width * launch.unit_bytes;
        let mut bytes = |rows: usize| {
            let mut bytes = vec![0_u8; rows * row_bytes];
            random.fill(&mut bytes[..]);
            bytes
        };
        let (rows, store) = (bytes(launch.count), bytes(launch.len));
        let mut indices: Vec<u32> = (0..len as u32).collect();
        indices.shuffle(&mut random);
        indices.truncate(launch.count);
        let mut expected = store.clone();
        for (row, index) in rows.chunks_exact(row_bytes).zip(&indices) {
            expected[*index as usize * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        let got = run(&program, launch, &rows, &indices, &store);
        assert!(got == expected, "{launch:?}");
    }
}

/// A head of `dim` values of some kind: usual ones, ones halfway between two codes, zeros and tiny
/// ones, very large ones, and one that is not finite.
fn head(kind: usize, dim: usize, random: &mut SmallRng) -> Vec<f32> {
    let mut value = |range: f32| random.random_range(-range..range);
    let mut head: Vec<f32> = match kind % 6 {
        0 | 1 => (0..dim).map(|_| value(3.0)).collect(),
        2 => (0..dim).map(|i| if i == 0 { 127.0 } else { value(127.0).trunc() + 0.5 }).collect(),
        3 => (0..dim).map(|_| value(1e-36)).collect(),
        4 => vec![-0.0; dim],
        _ => (0..dim).map(|_| 3e38 * value(1.0)).collect(),
    };
    if kind % 13 == 7 {
        head[dim / 2] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][kind % 3];
    }
    head
}

/// Goal: the codes and scales of each head are, bit for bit, those that the CPU backend stores, for
/// all sizes of heads and in any order of the threads, and other rows of the store do not change.
#[test]
fn heads_are_rounded_as_on_the_cpu() {
    let program = Program::compile("kv_write.cpp");
    let mut random = SmallRng::seed_from_u64(3);
    let mut wild = 0;
    for (round, dim) in [1, 8, 31, 32, 33, 80, 128, 576].into_iter().cycle().take(24).enumerate() {
        let (count, heads, len) = (random.random_range(1..9), 1 + round % 3, 12);
        let mut indices: Vec<u32> = (0..len as u32).collect();
        indices.shuffle(&mut random);
        indices.truncate(count);
        let mut codes = vec![0x55_u8; len * heads * dim];
        let mut scales = vec![9.0_f32; len * heads];
        let arguments = [round % 2, count, heads, dim, len].map(|number| number.to_string());
        let all = (0..count * heads).map(|at| head(at + 7 * round, dim, &mut random));
        let all: Vec<Vec<f32>> = all.collect();
        let mut input: Vec<u8> = all.iter().flatten().flat_map(|x| x.to_ne_bytes()).collect();
        input.extend(indices.iter().flat_map(|index| index.to_ne_bytes()));
        input.extend(&codes);
        input.extend(scales.iter().flat_map(|scale| scale.to_ne_bytes()));
        let output = program.run(&arguments, &input);
        let (got, got_scales) = output.split_at(codes.len());
        for (at, values) in all.iter().enumerate() {
            let stored = indices[at / heads] as usize * heads + at % heads;
            let mut rounded = vec![0; dim];
            scales[stored] = int8_head(values, &mut rounded);
            let to = &mut codes[stored * dim..][..dim];
            to.iter_mut().zip(&rounded).for_each(|(to, code)| *to = code.cast_unsigned());
            if scales[stored].is_nan() {
                // The codes mean nothing.
                wild += 1;
                to.copy_from_slice(&got[stored * dim..][..dim]);
            }
        }
        assert!(got == codes, "{arguments:?}: codes");
        let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
        assert!(got_scales == scales, "{arguments:?}: scales");
    }
    assert!(wild > 0, "no head has a number that is not finite");
}
