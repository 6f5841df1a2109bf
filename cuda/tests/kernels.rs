//! Tests the CUDA kernels without a GPU: their source is compiled as C++ for the host, where the
//! threads run one after the other, and its results are compared with those of a plain loop. This
//! checks the arithmetic of the indices, not the launch. It needs a C++ compiler, `c++` or `$CXX`.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Compiles the harness with the kernels to `program`.
fn compile(program: &Path) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/host.cpp");
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-Wall", "-Werror", "-o"]).arg(program).arg(source);
    let output = command.output().unwrap_or_else(|error| panic!("`{compiler}`: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

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
fn run(program: &Path, launch: Launch, rows: &[u8], indices: &[u32], store: &[u8]) -> Vec<u8> {
    let Launch { unit_bytes, grid, block, count, width, len } = launch;
    let arguments = [unit_bytes, grid, block, count, width, len].map(|number| number.to_string());
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the harness starts");
    let mut input = rows.to_vec();
    input.extend(indices.iter().flat_map(|index| index.to_ne_bytes()));
    input.extend(store);
    child.stdin.take().expect("a pipe").write_all(&input).expect("the harness reads everything");
    let output = child.wait_with_output().expect("the harness ends");
    assert!(output.status.success(), "{launch:?}");
    output.stdout
}

/// Goal: for grids and blocks that are smaller and larger than the data, exactly the named rows of the
/// store are replaced, in both unit sizes.
#[test]
fn rows_are_written_where_the_indices_say() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("host");
    compile(&program);
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
