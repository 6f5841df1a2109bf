//! Comparisons of logits: with those of the CPU backend, and with a cold cache.

use anyhow::ensure;
use stolon::Backend as _;
use stolon_checkpoint::kv::{KvLayout, KvShape};
use stolon_checkpoint::{DecoderConfig, KvBudget, KvType, ModelError, TensorType};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_cuda::{ComputeType, DeviceChoice};
use stolon_loadgen::rng::SeededRng;

use super::report::Outcome;
use super::step::{
    Part, batch, check_draws, difference, rows, rows_of, rows_that_differ, step, table,
};
use super::subject::{BLOCK_SIZE, Setup, Subject, Target};

/// Number of positions of the compared sequences: more than the rows of a product with batch
/// invariance, several blocks, and more than a part of split-KV decoding.
pub(super) const POSITIONS: usize = 300;
/// Positions that the second sequence of the check of the cache has in common with the first.
const SHARED: usize = 3 * BLOCK_SIZE;

/// A device whose default is the type of the weights.
const GPU: DeviceChoice = DeviceChoice::Cuda(0);

/// The values that are rounded, so that logits may differ.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rounding {
    /// Everything, to this type.
    To(ComputeType),
    /// The inputs of products with quantized weights, to 8 bits, and not by both backends in the
    /// same way.
    ProductInputs,
    /// Keys and values to 8 bits by both backends, and by the CPU backend also the queries where
    /// its instructions need that.
    KeysAndValues,
}

impl Rounding {
    /// The limit of differences in standard deviations of the logits. In f32 it applies to the
    /// worst row. Otherwise it applies to the median of the rows, because rounding sometimes
    /// changes the choice of an expert, and with it a whole row. With quantized weights, the logits
    /// of small models differ by 0.3 to 0.8; logits that have nothing in common differ by 5 or
    /// more.
    fn limit(self) -> f64 {
        match self {
            Self::To(ComputeType::F32) => 0.001,
            Self::To(ComputeType::F16) => 0.03,
            Self::To(ComputeType::Bf16) | Self::KeysAndValues => 0.25,
            Self::ProductInputs => 2.0,
        }
    }
}

/// Compares rows by their differences.
pub(super) fn compare(got: &[Vec<f32>], expected: &[Vec<f32>], rounding: Rounding) -> Outcome {
    let mut differences: Vec<f32> =
        got.iter().zip(expected).map(|(got, expected)| difference(got, expected)).collect();
    differences.sort_by(f32::total_cmp);
    let (median, worst) = match differences[..] {
        [] => (f32::INFINITY, f32::INFINITY),
        [.., worst] => (differences[differences.len() / 2], worst),
    };
    let limit = rounding.limit();
    // Except in f32, the worst row may differ by any finite amount.
    let value = if let Rounding::To(ComputeType::F32) = rounding { worst } else { median };
    let is_good = got.len() == expected.len() && worst.is_finite() && f64::from(value) <= limit;
    let detail =
        format!("{} rows, standard deviations: median {median:.1e}, worst {worst:.1e}", got.len());
    Outcome { is_good, value: Some(value.into()), limit: Some(limit), detail }
}

/// Compares the logits of all positions with those of the CPU backend in f32, with keys and values in
/// f32 or in the type of `setup`, and the tokens that the backend draws itself with those that are
/// drawn from the row.
pub(super) fn with_cpu<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
    compute_type: ComputeType,
) -> anyhow::Result<Outcome> {
    let blocks = POSITIONS.div_ceil(BLOCK_SIZE) + 2;
    let (config, weights) = subject.load()?;
    ensure!(config.max_positions >= POSITIONS, "the context is shorter than {POSITIONS} tokens");
    let is_quantized = |name| weights.dtype(name).is_some_and(TensorType::is_quantized);
    let rounding = match compute_type {
        _ if weights.names().any(is_quantized) => Rounding::ProductInputs,
        _ if setup.kv_type.is_some() => Rounding::KeysAndValues,
        // The CPU backend rounds the inputs of products with weights in half precision, too.
        ComputeType::F32 => Rounding::To(ComputeType::default_for(GPU, config.dtype)),
        // A row with other experts changes what later rows read.
        ComputeType::F16 if config.experts().is_some() => Rounding::To(ComputeType::Bf16),
        half => Rounding::To(half),
    };
    let tokens = SeededRng::new(1).tokens(POSITIONS, config.vocab_size);
    let options = CpuOptions {
        block_size: BLOCK_SIZE,
        kv_budget: KvBudget::Blocks(blocks),
        kv_type: Some(setup.kv_type.unwrap_or(KvType::F32)),
        ..CpuOptions::default()
    };
    let table = table(1, POSITIONS, BLOCK_SIZE);
    let mut cpu = match CpuBackend::new(config, weights, options) {
        Err(error @ ModelError::OutOfMemory { .. }) => {
            let detail = format!("left out: {error}");
            return Ok(Outcome { is_good: true, value: None, limit: None, detail });
        }
        opened => opened?,
    };
    let expected = rows(&mut cpu, &tokens, 0, 64, &table)?;
    drop(cpu);
    let (config, weights) = subject.load()?;
    let mut backend = target.open(config, weights, setup.options(blocks))?;
    let got = rows(&mut backend, &tokens, 0, 150, &table)?;
    // Without states, the last position alone can be computed several times.
    let from = if backend.spec().state.is_some() { 0 } else { POSITIONS - 1 };
    let last = Part::new(&tokens, from, POSITIONS, &table);
    let batch = batch(backend.spec(), &[last]);
    check_draws(&mut backend, &batch)?;
    Ok(compare(&got, &expected, rounding))
}

/// Compares the logits of sequences that read cached prefixes, in chunks and in batches, with those
/// of the same sequences alone in one step: bit for bit with batch invariance, else by their
/// differences.
pub(super) fn with_cold<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
    compute_type: ComputeType,
) -> anyhow::Result<Outcome> {
    let (config, weights) = subject.load()?;
    ensure!(config.max_positions >= POSITIONS, "the context is shorter than {POSITIONS} tokens");
    let mut random = SeededRng::new(2);
    let first = random.tokens(POSITIONS, config.vocab_size);
    let mut second = first[..SHARED].to_vec();
    second.extend(random.tokens(POSITIONS - SHARED, config.vocab_size));
    let per_sequence = POSITIONS.div_ceil(BLOCK_SIZE);
    let blocks = 4 * per_sequence + 2 * checkpoint_blocks_max(&config);
    let mut backend = target.open(config, weights, setup.options(blocks))?;
    let own = |index: usize| table(index * per_sequence, POSITIONS, BLOCK_SIZE);

    let table = own(0);
    let whole = Part::new(&first, 0, POSITIONS, &table).writing(0, SHARED);
    let cold_first = rows_of(&mut backend, whole, POSITIONS)?;
    let cold_second = rows(&mut backend, &second, 0, POSITIONS, &own(1))?;
    let (mut got, mut expected) = (Vec::new(), Vec::new());
    // The second sequence reads the first blocks of the first one.
    let mut mixed = own(0)[..SHARED / BLOCK_SIZE].to_vec();
    mixed.extend(own(2));
    mixed.truncate(per_sequence);
    let rest = Part::new(&second, SHARED, POSITIONS, &mixed).resuming(0);
    got.extend(rows_of(&mut backend, rest, 33)?);
    expected.extend_from_slice(&cold_second[SHARED..]);
    // The first one is computed again in one chunk and single tokens, next to the second one.
    let (prefilled, again) = (POSITIONS - 20, own(3));
    got.extend(rows(&mut backend, &first[..prefilled], 0, 70, &again)?);
    expected.extend_from_slice(&cold_first[..prefilled]);
    for (count, position) in (prefilled..POSITIONS).enumerate() {
        let (from, to) = (SHARED + 5 * count, SHARED + 5 * count + 5);
        let mut one = Part::new(&first, position, position + 1, &again);
        if position + 1 == POSITIONS - 1 {
            one = one.writing(1, position + 1);
        }
        let mut other = Part::new(&second, from, to, &mixed);
        if count == 0 {
            other = other.resuming(0);
        }
        let both = step(&mut backend, &[one, other])?;
        got.extend(both.into_iter().flatten());
        expected.push(cold_first[position].clone());
        expected.extend_from_slice(&cold_second[from..to]);
    }
    // The whole prompt is cached: only the last position is computed, and not written.
    let last = Part::new(&first, POSITIONS - 1, POSITIONS, &again).cached(1);
    got.extend(step(&mut backend, &[last])?.remove(0));
    expected.push(cold_first[POSITIONS - 1].clone());

    let compared = compare(&got, &expected, Rounding::To(compute_type));
    if !setup.batch_invariant {
        return Ok(compared);
    }
    let different = rows_that_differ(&got, &expected);
    let finite = expected.iter().flatten().all(|logit| logit.is_finite());
    Ok(Outcome {
        is_good: different == 0 && finite,
        value: Some(different as f64),
        limit: Some(0.0),
        detail: format!("{different} rows differ of {}", compared.detail),
    })
}

/// An upper bound of the number of blocks of a checkpoint, with keys and values of at least 8 bits.
fn checkpoint_blocks_max(config: &DecoderConfig) -> usize {
    let Some(shape) = config.recurrent_shape() else { return 0 };
    let values = shape.inputs_len() + shape.heads * shape.key_dim * shape.value_dim;
    let bytes = config.recurrent_layers() * values * size_of::<f32>();
    let block = KvShape::of(config, BLOCK_SIZE, KvType::Int8, |_| KvLayout::Rows).block_bytes();
    // Checkpoints are rounded up to the blocks that tiers store together.
    bytes.div_ceil(block.max(1)) + 64 / BLOCK_SIZE
}
