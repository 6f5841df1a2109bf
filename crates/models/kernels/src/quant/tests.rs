//! Conversion to f32 is compared with the `gguf` package, and packing with unpacking.

use super::*;
use crate::reference::blocks::{fixtures, random_blocks};

/// Goal: every value of random blocks of every type of GGUF files has the same bits as in the
/// `gguf` package.
#[test]
fn values_have_the_bits_of_the_gguf_package() {
    let fixtures = fixtures();
    let quantized = TensorType::ALL.into_iter().filter(|dtype| dtype.is_quantized());
    for dtype in quantized.filter(|dtype| dtype.gguf_id().is_some()) {
        let fixture = fixtures.iter().find(|fixture| fixture.dtype == dtype).unwrap();
        let mut got = vec![f32::NAN; fixture.values.len()];
        widen(dtype, &fixture.blocks, &mut got);
        for (index, (got, want)) in got.iter().zip(&fixture.values).enumerate() {
            let same = got.to_bits() == want.to_bits();
            assert!(same, "{dtype:?}: value {index} is {got}, expected {want}");
        }
    }
}

/// Goal: rows of every type can be unpacked from a panel without a change, also if some lanes are
/// empty.
#[test]
fn unpacked_rows_are_those_that_were_packed() {
    for dtype in TensorType::ALL.into_iter().filter(|dtype| dtype.is_quantized()) {
        for (rows, blocks) in [(16, 3), (16, 1), (5, 2)] {
            let row_bytes = blocks * dtype.block_bytes();
            let bytes = random_blocks(dtype, 3, rows * blocks);
            let mut panel = vec![0; LANES * row_bytes];
            pack(dtype, row_bytes, &bytes, &mut panel);
            let mut got = vec![0; row_bytes];
            for (lane, row) in bytes.chunks_exact(row_bytes).enumerate() {
                unpack(dtype, &panel, lane, &mut got);
                assert!(got == row, "{dtype:?}, lane {lane} of {rows}");
            }
        }
    }
}
