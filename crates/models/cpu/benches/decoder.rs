//! Measures the tokens per second of the CPU backend on random models.
//!
//! `cargo bench -p stolon-cpu --bench decoder [-- PRESET ... | --threads=N | --work=decode]`.
//! A model with recurrent layers is also measured with attention in their place.
//! Without `--bench` and presets (as under `cargo test`), only the smallest model runs once.
#![allow(clippy::print_stdout, reason = "prints its figures")]

#[path = "support/steps.rs"]
mod steps;

use std::time::Duration;

use steps::{CONTEXT, slice, step_times};
use stolon_backend::{Backend, SequenceSlice, StepBatch};
use stolon_checkpoint::random::{preset, random_model};
use stolon_checkpoint::{DecoderConfig, KvBudget, ModelError};
use stolon_cpu::{CpuBackend, CpuOptions, Stage};

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
    println!("| model | path | threads | weights MB | work | ms/step | tokens/s | recurrence |");
    println!("|---|---|---|---|---|---|---|---|");
    for name in presets {
        let config = preset(name)?;
        let attention = config.delta_net().is_some().then(|| with_attention(config.clone()));
        let work = work.unwrap_or("");
        measure((name, config), threads, work, time)?;
        if let Some(config) = attention {
            measure((&format!("{name}, attention only"), config), threads, work, time)?;
        }
    }
    Ok(())
}

/// The same sizes with attention in all layers.
fn with_attention(mut config: DecoderConfig) -> DecoderConfig {
    let attention = config.layers.iter().find(|layer| layer.has_attention());
    if let Some(mixers) = attention.map(|layer| layer.mixers.clone()) {
        config.layers.iter_mut().for_each(|layer| layer.mixers.clone_from(&mixers));
    }
    config
}

fn measure(
    (name, config): (&str, DecoderConfig),
    threads: Option<usize>,
    work: &str,
    time: Duration,
) -> Result<(), ModelError> {
    const SEQUENCES: usize = 16;
    let weights = random_model(&config, 1)?;
    let block_size = CpuOptions::default().block_size;
    let blocks = SEQUENCES * (2 * CONTEXT).div_ceil(block_size);
    let kv_budget = KvBudget::Blocks(blocks);
    let options = CpuOptions { kv_budget, threads, ..CpuOptions::default() };
    let mut backend = CpuBackend::new(config, weights, options)?;
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
    for (work, batch) in works.into_iter().filter(|(name, _)| name.starts_with(work)) {
        // The first step touches the memory of states and blocks.
        backend.step(&batch).expect("a valid batch");
        let before = backend.stage_times();
        let [step] = step_times(&mut backend, [&batch], time);
        let step_ms = step * 1e3;
        let stages = backend.stage_times().since(&before);
        let share = stages.of(Stage::Recurrence).as_secs_f64() / stages.total().as_secs_f64();
        println!(
            "| {name} | {} | {} | {:.1} | {work} | {step_ms:.3} | {:.0} | {:.1} % |",
            backend.path().name(),
            backend.thread_count(),
            backend.weight_bytes() as f64 / 1e6,
            batch.tokens.len() as f64 / step_ms * 1e3,
            100.0 * share,
        );
    }
    Ok(())
}
