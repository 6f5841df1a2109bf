//! Measures the tokens per second of the CPU backend on random models.
//!
//! `cargo bench -p stolon-model --bench decoder [-- PRESET ... | --threads=N | --work=decode]`.
//! Without `--bench` and presets (as under `cargo test`), only the smallest model runs once.
#![allow(clippy::print_stdout, reason = "prints its figures")]

use std::time::{Duration, Instant};

use stolon_backend::{Backend, BackendSpec, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_kvcache::BlockId;
use stolon_model::{CpuBackend, CpuOptions, KvBudget, LoadOptions, ModelError, ModelSource, load};

/// Number of positions of a prompt, and of cached positions when decoding is measured.
const CONTEXT: usize = 512;

fn main() -> Result<(), ModelError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|name| !name.starts_with('-')).collect();
    let full = arguments.iter().any(|argument| argument == "--bench") || !named.is_empty();
    let presets = match (named.is_empty(), full) {
        (false, _) => named,
        (true, true) => vec!["tiny", "20m", "100m"],
        (true, false) => vec!["tiny"],
    };
    let threads = arguments.iter().find_map(|argument| argument.strip_prefix("--threads="));
    let threads = threads.and_then(|count| count.parse().ok());
    let time = if full { Duration::from_secs(2) } else { Duration::ZERO };
    let work = arguments.iter().find_map(|argument| argument.strip_prefix("--work="));
    println!("| model | path | threads | weights MB | work | ms/step | tokens/s |");
    println!("|---|---|---|---|---|---|---|");
    for preset in presets {
        measure(preset, threads, work.unwrap_or(""), time)?;
    }
    Ok(())
}

/// One sequence of a batch: `count` tokens from position `start` on, with its own blocks and, if the
/// model has recurrent layers, its own state.
fn slice(sequence: usize, start: usize, count: usize, spec: &BackendSpec) -> SequenceSlice {
    let blocks = (2 * CONTEXT).div_ceil(spec.block_size);
    let first = (sequence * blocks) as u32;
    SequenceSlice {
        token_count: count,
        start,
        write_from: start,
        block_table: (first..first + blocks as u32).map(BlockId).collect(),
        logit_rows: LogitRows::Last,
        state: spec.state.map(|_| SliceState::in_slot(sequence as u32)),
    }
}

fn measure(
    preset: &str,
    threads: Option<usize>,
    work: &str,
    time: Duration,
) -> Result<(), ModelError> {
    const SEQUENCES: usize = 16;
    let source = ModelSource::Random { preset: preset.to_owned(), seed: 1 };
    let model = load(&source, &LoadOptions::default())?;
    let block_size = CpuOptions::default().block_size;
    let blocks = SEQUENCES * (2 * CONTEXT).div_ceil(block_size);
    let kv_budget = KvBudget::Blocks(blocks);
    let options = CpuOptions { kv_budget, threads, ..CpuOptions::default() };
    let mut backend = CpuBackend::new(model.config, model.weights, options)?;
    let spec = &backend.spec().clone();
    let batch = |sequences: Vec<SequenceSlice>| StepBatch {
        tokens: (0..sequences.iter().map(|slice| slice.token_count).sum())
            .map(|index: usize| (index * 31 % spec.vocab_size) as u32)
            .collect(),
        sequences,
    };
    let works = [
        ("prefill 512", batch(vec![slice(0, 0, CONTEXT, spec)])),
        ("prefill 64", batch(vec![slice(0, 0, 64, spec)])),
        ("decode 1", batch(vec![slice(0, CONTEXT, 1, spec)])),
        ("decode 16", batch((0..16).map(|s| slice(s, CONTEXT, 1, spec)).collect())),
        ("decode 8", batch((0..8).map(|s| slice(s, CONTEXT, 1, spec)).collect())),
        (
            "mixed 7 + 128",
            batch(
                (0..7)
                    .map(|s| slice(s, CONTEXT, 1, spec))
                    .chain([slice(7, 0, 128, spec)])
                    .collect(),
            ),
        ),
    ];
    for (name, batch) in works.into_iter().filter(|(name, _)| name.starts_with(work)) {
        let step_ms = step_time(&mut backend, &batch, time) * 1e3;
        println!(
            "| {preset} | {} | {} | {:.1} | {name} | {step_ms:.3} | {:.0} |",
            backend.path().name(),
            backend.thread_count(),
            backend.weight_bytes() as f64 / 1e6,
            batch.tokens.len() as f64 / step_ms * 1e3,
        );
    }
    Ok(())
}

/// The median time of a step in seconds, measured for about `time`.
fn step_time(backend: &mut CpuBackend, batch: &StepBatch, time: Duration) -> f64 {
    let mut times = Vec::new();
    let start = Instant::now();
    loop {
        let begun = Instant::now();
        let output = backend.step(batch).expect("a valid batch");
        times.push(begun.elapsed().as_secs_f64());
        assert!(!output.logits.is_empty());
        if start.elapsed() >= time && times.len() > 2 {
            times.sort_by(f64::total_cmp);
            return times[times.len() / 2];
        }
    }
}
