//! The kernel that writes new keys and values to the KV store.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

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
/// the store are replaced, in both unit sizes.
#[test]
fn rows_are_written_where_the_indices_say() {
    let program = Program::compile("kv_write.cpp");
    let mut random = SmallRng::seed_from_u64(1);
    for round in 0..60 {
        let len = random.random_range(1..200);
        let launch = Launch {
            unit_bytes: [4, 16][round % 2],
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
