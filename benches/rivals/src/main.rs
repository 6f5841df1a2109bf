//! The Stolon worker of `rivals.py`: `stolon-rivals MODEL THREADS` reads commands from standard
//! input, one per line, and prints for each the seconds that it took.
//!
//! * `prefill N`: computes a prompt of N tokens and the logits of the last.
//! * `first S N`: computes the prompts of N tokens of S sequences together, and their first tokens.
//! * `decode S N`: generates N tokens greedily for each of S sequences of 512 cached tokens; prints
//!   seconds per step.
//! * `deep D N`: the same for one sequence of D cached tokens.
//!
//! The first line of output is `ready`, the seconds that loading took, and the instruction set.

use std::io::{BufRead, Write};
use std::time::Instant;

use stolon_kvcache::BlockId;
use stolon_backend::{Backend, LogitRows, SequenceSlice, StepBatch};
use stolon_checkpoint::{KvBudget, LoadOptions, ModelSource, load};
use stolon_cpu::{CpuBackend, CpuOptions};

/// Positions in the cache when `decode` begins.
const CONTEXT: usize = 512;
/// Positions of each sequence. A single sequence may have as many as all together.
const POSITIONS: usize = 2048;
/// Maximum number of sequences.
const SEQUENCES: usize = 16;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, threads] = arguments.as_slice() else {
        return Err("expected: stolon-rivals MODEL THREADS".into());
    };
    let begun = Instant::now();
    let model = load(&ModelSource::from(std::path::Path::new(model)), &LoadOptions::default())?;
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(SEQUENCES * POSITIONS / CpuOptions::default().block_size),
        threads: Some(threads.parse()?),
        ..CpuOptions::default()
    };
    let mut backend = CpuBackend::new(model.config, model.weights, options)?;
    println!("ready {:.3} {}", begun.elapsed().as_secs_f64(), backend.path());
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let seconds = match words.as_slice() {
            ["prefill", count] => first(&mut backend, 1, count.parse()?)?,
            ["first", sequences, count] => {
                first(&mut backend, sequences.parse()?, count.parse()?)?
            }
            ["decode", sequences, steps] => {
                decode(&mut backend, sequences.parse()?, CONTEXT, steps.parse()?)?
            }
            ["deep", depth, steps] => decode(&mut backend, 1, depth.parse()?, steps.parse()?)?,
            _ => return Err(format!("no such command: {line}").into()),
        };
        println!("{seconds:.6}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// A slice of `count` tokens of a sequence from position `start` on, with the logits of the last.
fn slice(backend: &CpuBackend, sequence: usize, start: usize, count: usize) -> SequenceSlice {
    let block_size = backend.spec().block_size;
    let first = sequence * POSITIONS / block_size;
    let blocks = POSITIONS.max(start + count).div_ceil(block_size);
    let ids = (first..first + blocks).filter_map(|id| u32::try_from(id).ok());
    SequenceSlice {
        token_count: count,
        start,
        write_from: start,
        block_table: ids.map(BlockId).collect(),
        logit_rows: LogitRows::Last,
        ..SequenceSlice::default()
    }
}

fn first(backend: &mut CpuBackend, sequences: usize, count: usize) -> Result<f64, Error> {
    let vocab_size = backend.spec().vocab_size;
    let prompt = (0..count).map(|index| (index * 31 % vocab_size) as u32);
    let batch = StepBatch {
        tokens: (0..sequences).flat_map(|_| prompt.clone()).collect(),
        sequences: (0..sequences).map(|s| slice(backend, s, 0, count)).collect(),
    };
    let begun = Instant::now();
    let output = backend.step(&batch)?;
    let tokens: Vec<u32> = output.logits.chunks(vocab_size).map(likeliest).collect();
    let seconds = begun.elapsed().as_secs_f64();
    assert_eq!(tokens.len(), sequences);
    Ok(seconds)
}

fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id as u32)
}

fn decode(
    backend: &mut CpuBackend,
    sequences: usize,
    depth: usize,
    steps: usize,
) -> Result<f64, Error> {
    let vocab_size = backend.spec().vocab_size;
    // The KV cache holds the last prefill or zeros; both take the same time to read.
    let mut tokens: Vec<u32> = (0..sequences as u32).collect();
    let begun = Instant::now();
    for step in 0..steps {
        let slices = (0..sequences).map(|s| slice(backend, s, depth + step, 1)).collect();
        let output = backend.step(&StepBatch { tokens: tokens.clone(), sequences: slices })?;
        for (token, logits) in tokens.iter_mut().zip(output.logits.chunks(vocab_size)) {
            *token = likeliest(logits);
        }
    }
    Ok(begun.elapsed().as_secs_f64() / steps as f64)
}
