//! Tests loading of hostile and damaged model files: every one is an error, without a panic, a
//! hang, or memory out of proportion to the file.
#[path = "hostile/adapters.rs"]
mod adapters;
#[path = "hostile/config.rs"]
mod config;
#[path = "hostile/gguf.rs"]
mod gguf;
#[path = "hostile/mutations.rs"]
mod mutations;
#[path = "hostile/quantized.rs"]
mod quantized;
#[path = "hostile/safetensors.rs"]
mod safetensors;
#[cfg(unix)]
#[path = "hostile/special_files.rs"]
mod special_files;
#[path = "hostile/split.rs"]
mod split;

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_checkpoint::{InspectOptions, KvBudget, LoadOptions, ModelSource, inspect, load};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kvcache::BlockId;
use stolon_text::TextModel;

/// Time after which loading counts as hung. It is a guard, not a measurement.
const HUNG: Duration = Duration::from_secs(120);
/// Maximum of the memory for loading a small file, in bytes.
const MEMORY_MAX: u64 = 64 << 20;

/// Does everything that an engine does with a model: reads it, creates its tokenizer, packs its
/// weights and computes a step. Returns the error as text.
fn run(path: &Path) -> Result<(), String> {
    let source = ModelSource::from(path);
    let loaded = load(&source, &LoadOptions::default());
    // Inspection finds an error exactly if loading does.
    let refused = match inspect(&source, &InspectOptions::default()) {
        Ok(inspection) => !inspection.refusals.is_empty(),
        Err(_) => true,
    };
    assert_eq!(refused, loaded.is_err(), "{}: {:?}", path.display(), loaded.as_ref().err());
    let loaded = loaded.map_err(|error| error.to_string())?;
    let text = TextModel::new(&loaded.text, &loaded.generation.eos_token_ids);
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(2),
        threads: Some(1),
        path: Some(stolon_kernels::Path::detect().unwrap()),
        ..CpuOptions::default()
    };
    let backend = CpuBackend::new(loaded.config, loaded.weights, options);
    let mut backend = backend.map_err(|error| error.to_string())?;
    let slice = SequenceSlice {
        token_count: 4,
        start: 0,
        write_from: 0,
        block_table: vec![BlockId(0)],
        logit_rows: LogitRows::Last,
        state: backend.spec().state.map(|_| SliceState::in_slot(0)),
        ..SequenceSlice::default()
    };
    let step = backend.step(&StepBatch { tokens: vec![0; 4], sequences: vec![slice] });
    step.map_err(|error| error.to_string())?;
    text.map(drop).map_err(|error| error.to_string())
}

/// Runs the model at `path` on a thread of its own. Fails if it panics, hangs, or allocates more
/// than `memory_max` bytes. Returns the result.
fn run_within(path: &Path, memory_max: u64) -> Result<(), String> {
    let (sender, receiver) = channel();
    let owned: PathBuf = path.to_owned();
    let thread = std::thread::spawn(move || {
        let mut result = Ok(());
        let memory = allocation_counter::measure(|| result = run(&owned));
        let _ = sender.send((result, memory.bytes_max));
    });
    match receiver.recv_timeout(HUNG) {
        Ok((result, bytes)) => {
            assert!(bytes <= memory_max, "{}: {bytes} bytes: {result:?}", path.display());
            if let Err(error) = &result {
                assert!(error.len() < 4000, "an error of {} bytes", error.len());
            }
            result
        }
        Err(_) if thread.is_finished() => panic!("{}: panicked", path.display()),
        Err(_) => panic!("{}: hangs", path.display()),
    }
}

/// Asserts that the model at `path` is refused with an error that contains `expected`.
fn refused(path: &Path, what: &str, expected: &str) {
    let error = run_within(path, MEMORY_MAX).expect_err(what);
    assert!(error.contains(expected), "{what}: `{error}` lacks `{expected}`");
}
