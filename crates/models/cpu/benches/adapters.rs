//! Measures what LoRA adapters cost: the time of a step with and without them, by turns, on random
//! models and random adapters of every projection of attention and of dense MLPs.
//!
//! `cargo bench -p stolon-cpu --bench adapters [-- PRESET ... | --threads=N | --rank=N]`. Without
//! `--bench` and presets (as under `cargo test`), only the smallest model runs once.
#![allow(clippy::print_stdout, reason = "prints its figures")]

#[path = "../../checkpoint/tests/it/support/adapter_writer.rs"]
mod adapter_writer;
#[path = "../../checkpoint/tests/it/support/model_adapter.rs"]
mod model_adapter;
#[path = "support/steps.rs"]
mod steps;

use std::time::Duration;

use model_adapter::whole_adapter;
use steps::{CONTEXT, slice, step_times};
use stolon_backend::{Adapter, Backend, StepBatch};
use stolon_checkpoint::KvBudget;
use stolon_checkpoint::random::{preset, random_model};
use stolon_cpu::{CpuBackend, CpuOptions};

/// Number of adapters, and of sequences that decode.
const ADAPTERS: usize = 8;
/// Maximum size of an adapter in bytes.
const BYTES_MAX: u64 = 4 << 30;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let named: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|name| !name.starts_with('-')).collect();
    let full = arguments.iter().any(|argument| argument == "--bench") || !named.is_empty();
    let presets = match (named.is_empty(), full) {
        (false, _) => named,
        (true, true) => vec!["100m", "474m"],
        (true, false) => vec!["tiny"],
    };
    let number = |flag: &str| {
        let value = arguments.iter().find_map(|argument| argument.strip_prefix(flag));
        value.and_then(|number| number.parse().ok())
    };
    let (threads, rank) = (number("--threads="), number("--rank=").unwrap_or(16));
    let time = if full { Duration::from_secs(6) } else { Duration::ZERO };
    println!(
        "| model | path | threads | rank | adapter MB | work | ms/step | with adapters | share |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for name in presets {
        measure(name, threads, rank, time)?;
    }
    Ok(())
}

fn measure(name: &str, threads: Option<usize>, rank: usize, time: Duration) -> Result<(), Error> {
    let config = preset(name)?;
    let blocks = ADAPTERS * (2 * CONTEXT).div_ceil(CpuOptions::default().block_size);
    let kv_budget = KvBudget::Blocks(blocks);
    let options = CpuOptions { kv_budget, threads, ..CpuOptions::default() };
    let mut backend = CpuBackend::new(config.clone(), random_model(&config, 1)?, options)?;
    let loader = backend.adapters().ok_or("the backend supports adapters")?;
    let directory = tempfile::tempdir()?;
    let mut adapters = Vec::new();
    for seed in 0..ADAPTERS as u64 {
        whole_adapter(&config, rank, "BF16", seed).write(directory.path());
        adapters.push(loader.load(directory.path(), BYTES_MAX)?);
    }
    let spec = backend.spec().clone();
    let decodes = |count| (0..count).map(|s| slice(s, CONTEXT, 1, &spec));
    for (work, sequences) in [
        ("decode 8", decodes(8).collect::<Vec<_>>()),
        ("decode 1", decodes(1).collect()),
        ("prefill 512", vec![slice(0, 0, CONTEXT, &spec)]),
        ("8 prefills of 64", (0..8).map(|s| slice(s, 0, 64, &spec)).collect()),
        ("mixed 7 + 128", decodes(7).chain([slice(7, 0, 128, &spec)]).collect()),
    ] {
        let count = sequences.iter().map(|slice| slice.token_count).sum();
        let tokens = (0..count).map(|index: usize| (index * 31 % spec.vocab_size) as u32).collect();
        let plain = StepBatch { tokens, sequences };
        let adapted = with_adapters(&plain, &adapters);
        let [base, with] = step_times(&mut backend, [&plain, &adapted], time);
        println!(
            "| {name} | {} | {} | {rank} | {:.1} | {work} | {:.3} | {:.3} | {:.2} |",
            backend.path().name(),
            backend.thread_count(),
            adapters[0].bytes() as f64 / 1e6,
            base * 1e3,
            with * 1e3,
            base / with,
        );
    }
    Ok(())
}

/// The batch with a different adapter for each sequence.
fn with_adapters(batch: &StepBatch, adapters: &[Adapter]) -> StepBatch {
    let mut batch = batch.clone();
    for (slice, adapter) in batch.sequences.iter_mut().zip(adapters) {
        slice.adapter = Some(adapter.clone());
    }
    batch
}
