//! A cost model of the CPU backend's steps, with measured coefficients.
//!
//! The time of a step is the sum of:
//!
//! 1. the layers' matrix products, by a table over the number of tokens in the step. The weights
//!    are read once per step, so this is far from linear;
//! 2. for each decode, one row of logits and the sampling from it;
//! 3. for each decode, the keys and values that it attends to;
//! 4. for all decodes together, the keys and values that are read from memory: blocks that several
//!    decodes share are read once;
//! 5. for each prompt chunk, the pairs of query and key;
//! 6. the overhead outside the backend, part of it for each sequence in the step.

use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use stolon::{Engine, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_backend::{Backend, LogitRows, SequenceSlice, StepBatch};
use stolon_kernels::{AttentionSequence, positions_read};
use stolon_kvcache::BlockId;

/// The measured coefficients. All times are in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// The model on which it was measured.
    pub model: String,
    /// Description of the machine on which it was measured.
    pub machine: String,
    /// `(tokens in a step, time)` of the layers, ascending by tokens. Times between the entries are
    /// interpolated linearly, times beyond them extrapolated.
    pub layers: Vec<(usize, f64)>,
    /// Time of one row of logits and of the sampling from it.
    pub row: f64,
    /// Time of one key and value that a decode attends to.
    pub decode_position: f64,
    /// Time of one key and value that is read from memory for decodes. 0 if each decode reads for
    /// itself, as on AMX when it was measured; the cost of reading is then part of
    /// `decode_position`.
    #[serde(default)]
    pub decode_read: f64,
    /// Time of one pair of query and key in a prompt chunk.
    pub prefill_pair: f64,
    /// Overhead of a step outside the backend.
    pub overhead: f64,
    /// Overhead outside the backend for each sequence in the step.
    pub overhead_sequence: f64,
}

impl CostModel {
    /// A built-in cost model (`demo`, `100m`, and from another machine `demo-amx` and `100m-amx`)
    /// or one from a file.
    ///
    /// # Errors
    /// If the file cannot be read or does not contain a cost model.
    pub fn named(name: &str) -> anyhow::Result<CostModel> {
        let text = match name {
            "demo" => include_str!("../calibration/demo.json").to_owned(),
            "100m" => include_str!("../calibration/100m.json").to_owned(),
            "demo-amx" => include_str!("../calibration/demo-amx.json").to_owned(),
            "100m-amx" => include_str!("../calibration/100m-amx.json").to_owned(),
            path => std::fs::read_to_string(path).with_context(|| path.to_owned())?,
        };
        serde_json::from_str(&text).with_context(|| format!("the calibration `{name}`"))
    }

    /// Time of a step with KV blocks of `block_size` positions.
    #[must_use]
    pub fn step(&self, batch: &StepBatch, block_size: usize) -> Duration {
        let mut micros = self.overhead + self.layers_at(batch.tokens.len());
        for slice in &batch.sequences {
            micros += self.overhead_sequence;
            if slice.logit_rows != LogitRows::None {
                micros += self.row;
            }
            micros += match slice.token_count {
                1 => self.decode_position * (slice.start + 1) as f64,
                _ => self.prefill_pair * pairs(slice.start, slice.token_count),
            };
        }
        if self.decode_read > 0.0 {
            let decodes = batch.sequences.iter().filter(|slice| slice.token_count == 1);
            let decodes: Vec<_> = decodes.map(attention_sequence).collect();
            micros += self.decode_read * positions_read(&decodes, block_size) as f64;
        }
        Duration::from_secs_f64(micros / 1e6)
    }

    fn layers_at(&self, tokens: usize) -> f64 {
        let upper = self.layers.partition_point(|&(count, _)| count < tokens);
        let upper = upper.clamp(1, self.layers.len().max(2) - 1);
        let (Some(&(x0, y0)), Some(&(x1, y1))) =
            (self.layers.get(upper - 1), self.layers.get(upper))
        else {
            return self.layers.first().map_or(0.0, |&(_, time)| time);
        };
        let share = (tokens as f64 - x0 as f64) / (x1 - x0).max(1) as f64;
        (y0 + (y1 - y0) * share).max(0.0)
    }
}

fn attention_sequence(slice: &SequenceSlice) -> AttentionSequence<'_> {
    AttentionSequence {
        start: slice.start,
        count: slice.token_count,
        full: false,
        block_table: &slice.block_table,
    }
}

/// Number of query and key pairs of `count` tokens that follow `start` others.
fn pairs(start: usize, count: usize) -> f64 {
    let (start, count) = (start as f64, count as f64);
    count * start + count * (count + 1.0) / 2.0
}

/// Numbers of tokens for which the layers are measured.
const TOKEN_COUNTS: [usize; 12] = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 384, 512];
/// Short context length at which attention is measured.
const SHORT: usize = 64;
/// Long context length at which attention is measured.
const LONG: usize = 2048;
/// Number of steps per measurement. The result is their median.
const REPEATS: usize = 15;

/// Number of sequences with which attention of decodes is measured.
const SEQUENCES: usize = 16;
/// Number of the [`LONG`] positions that the sequences share when the effect of sharing is
/// measured.
const SHARED: usize = LONG - 128;

/// Measures the cost model of a backend, whose KV cache must hold 18 sequences of 2,048 positions.
///
/// # Errors
/// If a step fails or the KV cache is too small.
pub fn measure(
    backend: &mut dyn Backend,
    model: String,
    machine: String,
) -> anyhow::Result<CostModel> {
    let spec = backend.spec().clone();
    let needed = (SEQUENCES + 2) * LONG.div_ceil(spec.block_size);
    anyhow::ensure!(
        spec.block_count >= needed && spec.max_positions > LONG + 512,
        "expected at least {needed} blocks and {} positions, got {} and {}",
        LONG + 513,
        spec.block_count,
        spec.max_positions
    );
    fill(backend)?;
    let mut time = |slices: &[(usize, usize)]| median_micros(backend, slices);
    let decodes = |count: usize, context: usize| vec![(context - 1, 1); count];
    let (near, far) = (time(&decodes(SEQUENCES, SHORT))?, time(&decodes(SEQUENCES, LONG))?);
    let both = (far - near).max(0.0) / (SEQUENCES * (LONG - SHORT)) as f64;
    // The same decodes with shared blocks for all but their last positions: the difference in time
    // is the time of the saved reads.
    let mut shared = batch(&decodes(SEQUENCES, LONG), spec.block_size, LogitRows::Last);
    let head = shared.sequences[0].block_table[..SHARED / spec.block_size].to_vec();
    for slice in &mut shared.sequences {
        slice.block_table[..head.len()].copy_from_slice(&head);
    }
    let saved = (far - median_micros_of(backend, &shared)?).max(0.0);
    let decode_read = (saved / ((SEQUENCES - 1) * SHARED) as f64).min(both);
    let decode_position = both - decode_read;
    let mut time = |slices: &[(usize, usize)]| median_micros(backend, slices);
    let (near, far) = (time(&[(0, 256)])?, time(&[(LONG, 256)])?);
    let prefill_pair = (far - near).max(0.0) / (pairs(LONG, 256) - pairs(0, 256));
    // One row of logits: sixteen short prompts with and without one.
    let short: Vec<_> = vec![(0, 2); 16];
    let with = time(&short)?;
    let silent = batch(&short, spec.block_size, LogitRows::None);
    let without = median_micros_of(backend, &silent)?;
    let row = (with - without).max(0.0) / 16.0;
    let mut layers = Vec::with_capacity(TOKEN_COUNTS.len());
    for tokens in TOKEN_COUNTS {
        let micros = if tokens <= 32 {
            let attention = both * (SHORT * tokens) as f64;
            median_micros(backend, &decodes(tokens, SHORT))? - attention - row * tokens as f64
        } else {
            median_micros(backend, &[(0, tokens)])? - prefill_pair * pairs(0, tokens) - row
        };
        layers.push((tokens, micros.max(0.0)));
    }
    let (overhead, overhead_sequence) = measure_overhead()?;
    Ok(CostModel {
        model,
        machine,
        layers,
        row,
        decode_position,
        decode_read,
        prefill_pair,
        overhead,
        overhead_sequence,
    })
}

/// Writes every position that is read later. Pages that were never written are not backed by memory
/// of their own, so that reading them would be too fast.
fn fill(backend: &mut dyn Backend) -> anyhow::Result<()> {
    const CHUNK: usize = 512;
    let block_size = backend.spec().block_size;
    let blocks = LONG.div_ceil(block_size) as u32;
    for sequence in 0..(SEQUENCES + 2) as u32 {
        let table: Vec<BlockId> =
            (sequence * blocks..(sequence + 1) * blocks).map(BlockId).collect();
        for start in (0..LONG).step_by(CHUNK) {
            let slice = SequenceSlice {
                token_count: CHUNK,
                start,
                write_from: start,
                block_table: table.clone(),
                logit_rows: LogitRows::None,
                ..SequenceSlice::default()
            };
            let tokens = (0..CHUNK).map(|index| index as u32 % 97).collect();
            backend.step(&StepBatch { tokens, sequences: vec![slice] })?;
        }
    }
    Ok(())
}

/// The median time of a step with these `(start, token count)` slices, in microseconds.
fn median_micros(backend: &mut dyn Backend, slices: &[(usize, usize)]) -> anyhow::Result<f64> {
    let batch = batch(slices, backend.spec().block_size, LogitRows::Last);
    median_micros_of(backend, &batch)
}

/// A step with these `(start, token count)` slices, each in blocks of its own.
fn batch(slices: &[(usize, usize)], block_size: usize, logit_rows: LogitRows) -> StepBatch {
    let mut batch = StepBatch::default();
    let mut next_block = 0;
    for &(start, token_count) in slices {
        let blocks = (start + token_count).div_ceil(block_size) as u32;
        batch.tokens.extend((0..token_count).map(|index| index as u32 % 97));
        batch.sequences.push(SequenceSlice {
            token_count,
            start,
            write_from: start,
            block_table: (next_block..next_block + blocks).map(BlockId).collect(),
            logit_rows,
            ..SequenceSlice::default()
        });
        next_block += blocks;
    }
    batch
}

fn median_micros_of(backend: &mut dyn Backend, batch: &StepBatch) -> anyhow::Result<f64> {
    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        let begun = Instant::now();
        backend.step(batch)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}

/// Overhead of a step outside the backend, and of each sequence in it, in microseconds. Measured
/// with an engine whose backend computes almost nothing.
fn measure_overhead() -> anyhow::Result<(f64, f64)> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let one = runtime.block_on(step_micros(1))?;
    let many = runtime.block_on(step_micros(32))?;
    let each = (many - one).max(0.0) / 31.0;
    Ok(((one - each).max(0.0), each))
}

async fn step_micros(streams: u32) -> anyhow::Result<f64> {
    const TOKENS: usize = 200;
    let options = FakeOptions { block_count: 4096, strict: false, ..FakeOptions::default() };
    let backend = Box::new(FakeBackend::new(options));
    let engine = Engine::builder().backend("fake", backend).build().await?;
    let begun = Instant::now();
    let mut readers = Vec::new();
    for stream in 0..streams {
        let request = Request::tokens(vec![stream; 16]).max_tokens(TOKENS);
        readers.push(tokio::spawn(engine.generate(request).await?.collect_text()));
    }
    for reader in readers {
        reader.await??;
    }
    Ok(begun.elapsed().as_secs_f64() * 1e6 / engine.stats().steps as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> CostModel {
        CostModel {
            model: String::new(),
            machine: String::new(),
            layers: vec![(1, 100.0), (16, 130.0), (256, 1000.0)],
            row: 2.0,
            decode_position: 0.01,
            decode_read: 0.0,
            prefill_pair: 0.001,
            overhead: 30.0,
            overhead_sequence: 1.0,
        }
    }

    fn slice(start: usize, token_count: usize) -> SequenceSlice {
        SequenceSlice {
            token_count,
            start,
            write_from: start,
            block_table: Vec::new(),
            logit_rows: LogitRows::Last,
            ..SequenceSlice::default()
        }
    }

    /// Goal: the time of a step is the sum of its parts.
    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let batch =
            StepBatch { tokens: vec![0; 16], sequences: vec![slice(999, 1), slice(100, 15)] };
        let expected = 30.0 + 130.0 + 2.0 * 1.0 + 2.0 * 2.0 + 10.0 + 0.001 * (1500.0 + 120.0);
        let micros = model().step(&batch, 16).as_secs_f64() * 1e6;
        assert!((micros - expected).abs() < 1e-6, "{micros} {expected}");
    }

    /// Goal: blocks that two decodes share are read once and attended to by each.
    #[test]
    fn a_shared_prefix_is_read_once() {
        let model = CostModel { decode_read: 0.1, ..model() };
        let decode = |own: u32| SequenceSlice {
            block_table: (0..8).chain(own..own + 4).map(BlockId).collect(),
            ..slice(191, 1)
        };
        let of = |tables: [u32; 2]| {
            let sequences = tables.map(decode).to_vec();
            let batch = StepBatch { tokens: vec![0; 2], sequences };
            model.step(&batch, 16).as_secs_f64() * 1e6
        };
        // Two decodes at 192 positions: they share eight of twelve blocks, then all twelve.
        let (some, all) = (of([100, 200]), of([100, 100]));
        let rest = 30.0 + 102.0 + 2.0 + 4.0 + 0.01 * 384.0;
        assert!((some - rest - 0.1 * (192.0 + 64.0)).abs() < 1e-6, "{some}");
        assert!((all - rest - 0.1 * 192.0).abs() < 1e-6, "{all}");
    }

    /// Goal: the table of the layers is interpolated between its entries and extrapolated beyond.
    #[test]
    fn the_table_is_extrapolated_beyond_its_ends() {
        let model = model();
        for (tokens, expected) in [(1, 100.0), (6, 110.0), (16, 130.0), (136, 565.0), (496, 1870.0)]
        {
            assert!((model.layers_at(tokens) - expected).abs() < 1e-9, "{tokens}");
        }
    }

    /// Goal: the built-in cost models can be parsed and are plausible.
    #[test]
    fn built_in_calibrations_are_parsed() {
        for name in ["demo", "100m", "demo-amx", "100m-amx"] {
            let model = CostModel::named(name).expect("a cost model");
            assert!(model.layers.is_sorted_by_key(|&(tokens, _)| tokens), "{name}");
            assert!(model.layers.len() > 2 && model.decode_position > 0.0, "{name}");
        }
    }
}
