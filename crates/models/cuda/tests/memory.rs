//! The memory of a step is not more than what is kept free for it.

use peak_alloc::PeakAlloc;
use stolon_backend::{Backend, Draw, LogitRows, SequenceSlice, StepBatch};
use stolon_checkpoint::{KvBudget, LoadOptions, LoadedModel, ModelSource, load};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType};
use stolon_kvcache::BlockId;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// A backend of a random model of 20 M parameters.
fn backend(options: CandleOptions) -> CandleBackend {
    let source = ModelSource::Random { preset: "20m".to_owned(), seed: 0 };
    let LoadedModel { config, weights, .. } =
        load(&source, &LoadOptions::default()).expect("a preset");
    CandleBackend::open(config, weights, options).expect("it opens")
}

/// As many decodes as sequences may run, and a prefill chunk of all other tokens.
fn largest_step(options: &CandleOptions, logit_rows: LogitRows) -> StepBatch {
    let decode = SequenceSlice {
        token_count: 1,
        start: 0,
        write_from: 1,
        block_table: vec![BlockId(0)],
        logit_rows,
        ..SequenceSlice::default()
    };
    let mut sequences = vec![decode; options.step_sequences];
    sequences.push(SequenceSlice {
        token_count: options.step_tokens - options.step_sequences,
        start: 0,
        write_from: 0,
        block_table: (1..64).map(BlockId).collect(),
        logit_rows: LogitRows::None,
        ..SequenceSlice::default()
    });
    StepBatch { tokens: vec![0; options.step_tokens], sequences }
}

/// Goal: on the CPU, where all memory can be counted, a step of as many tokens and sequences as the
/// options say needs at most what is estimated, and at least a third of it.
#[test]
fn a_step_needs_at_most_what_is_estimated() {
    let types = [(ComputeType::F32, true), (ComputeType::F32, false), (ComputeType::F16, true)];
    for (step_tokens, step_sequences) in [(256, 8), (256, 200), (1024, 1)] {
        for (compute_type, batch_invariant) in types {
            if step_tokens > 256 && compute_type == ComputeType::F16 {
                // On a CPU, many tokens take long in f16.
                continue;
            }
            let options = CandleOptions {
                kv_budget: KvBudget::Blocks(64),
                step_tokens,
                step_sequences,
                compute_type: Some(compute_type),
                batch_invariant,
                ..CandleOptions::default()
            };
            let mut backend = backend(options);
            let memory = backend.step_memory();
            assert_eq!(memory.measured_bytes, None);
            let mut needed = 0;
            for logit_rows in [LogitRows::Last, LogitRows::Drawn(Draw::GREEDY)] {
                let batch = largest_step(&options, logit_rows);
                // The first step makes the rotary tables, which are kept.
                backend.step(&batch).expect("a valid batch");
                let before = ALLOCATOR.current_usage();
                ALLOCATOR.reset_peak_usage();
                backend.step(&batch).expect("a valid batch");
                needed = needed.max((ALLOCATOR.peak_usage() - before) as u64);
            }
            let bounds = memory.estimated_bytes / 3..=memory.estimated_bytes;
            assert!(bounds.contains(&needed), "{options:?}: expected {bounds:?}, got {needed}");
        }
    }
}
