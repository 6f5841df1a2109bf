//! Random blocks of all quantized types. For the types of GGUF files they come from
//! `fixtures/blocks.bin`, with the values that the `gguf` package gives them.

use super::{Rng, SeedableRng, SmallRng};
use crate::tensor_type::TensorType;

/// Some blocks of one type and their values.
pub(crate) struct Fixture {
    pub(crate) dtype: TensorType,
    pub(crate) blocks: Vec<u8>,
    pub(crate) values: Vec<f32>,
}

/// The blocks in the file, whose format `fixtures/make_blocks.py` describes.
pub(crate) fn fixtures() -> Vec<Fixture> {
    let mut file: &[u8] = include_bytes!("../../fixtures/blocks.bin");
    let mut fixtures = Vec::new();
    while !file.is_empty() {
        let number = |index: usize| u32::from_le_bytes(file.as_chunks().0[index]) as usize;
        let (id, block_len, block_bytes, count) = (number(0), number(1), number(2), number(3));
        let (blocks, rest) = file[16..].split_at(block_bytes * count);
        let (values, rest) = rest.split_at(4 * block_len * count);
        file = rest;
        let Some(dtype) = TensorType::from_gguf_id(id as u32) else { continue };
        assert_eq!((dtype.block_len(), dtype.block_bytes()), (block_len, block_bytes), "{dtype:?}");
        let values = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        fixtures.push(Fixture { dtype, blocks: blocks.to_vec(), values });
    }
    fixtures
}

/// `count` blocks whose values are between -1 and 1, and which depend on the seed alone.
pub(crate) fn random_blocks(dtype: TensorType, seed: u64, count: usize) -> Vec<u8> {
    let mut random = SmallRng::seed_from_u64(seed);
    if dtype.gguf_id().is_none() {
        return (0..count).flat_map(|_| random_group(dtype, &mut random)).collect();
    }
    let fixture = fixtures().into_iter().find(|fixture| fixture.dtype == dtype).unwrap();
    let blocks: Vec<_> = fixture.blocks.chunks_exact(dtype.block_bytes()).collect();
    (0..count).flat_map(|_| blocks[random.random_range(0..blocks.len())]).copied().collect()
}

/// A random block of one of the types that no file has.
fn random_group(dtype: TensorType, random: &mut SmallRng) -> Vec<u8> {
    let scales: &[f32] = match dtype {
        TensorType::I8Group16 => &[1.0 / 128.0, 1.0 / 128.0],
        TensorType::I8Group32 => &[1.0 / 128.0],
        // A scale and a minimum.
        TensorType::U4Group32 | TensorType::U4Group128 => &[1.0 / 16.0, 1.0],
        _ => panic!("{dtype:?} is a type of GGUF files"),
    };
    let mut block: Vec<u8> = scales
        .iter()
        .flat_map(|scale| (scale * random.random_range(0.1..1.0_f32)).to_le_bytes())
        .collect();
    block.resize_with(dtype.block_bytes(), || random.random());
    block
}
