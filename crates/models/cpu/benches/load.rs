//! Measures the time and peak memory of loading a model directory, up to the first step.
//!
//! `cargo bench -p stolon-cpu --bench load -- DIRECTORY [q8_0]` measures one load. If the
//! directory does not exist, the program writes a model with random weights to it (preset `474m`,
//! 0.95 GB) and must be called again. Without a directory (as under `cargo test`), it writes and
//! loads the smallest preset in a temporary directory.
#![allow(clippy::print_stdout, reason = "prints its figures")]

use std::path::Path;
use std::time::Instant;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_checkpoint::random::preset;
use stolon_checkpoint::{
    DecoderConfig, KvBudget, LoadOptions, ModelSource, TensorType, load, random_model,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kvcache::BlockId;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let Some(directory) = arguments.first().map(Path::new) else {
        let directory = tempfile::tempdir()?;
        write("tiny", directory.path())?;
        return measure(directory.path(), "stored");
    };
    if directory.exists() {
        return measure(directory, arguments.get(1).map_or("stored", String::as_str));
    }
    write("474m", directory)?;
    println!("wrote {}: run the same command again to measure", directory.display());
    Ok(())
}

/// Loads the model, computes one token, and prints time and memory.
fn measure(directory: &Path, weights: &str) -> Result<(), Failure> {
    let begun = Instant::now();
    let source = ModelSource::Directory(directory.to_owned());
    let model = load(&source, &LoadOptions::default())?;
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(64),
        weight_type: weights.parse()?,
        ..CpuOptions::default()
    };
    let mut backend = CpuBackend::new(model.config, model.weights, options)?;
    let loaded = begun.elapsed().as_secs_f64();
    let slice = SequenceSlice {
        token_count: 1,
        start: 0,
        write_from: 0,
        block_table: vec![BlockId(0)],
        logit_rows: LogitRows::Last,
        state: backend.spec().state.map(|_| SliceState::in_slot(0)),
        ..SequenceSlice::default()
    };
    backend.step(&StepBatch { tokens: vec![1], sequences: vec![slice] })?;
    let spec = backend.spec();
    println!("| weights MB | KV MB | load s | first step s | resident MB | peak MB |");
    println!("|---|---|---|---|---|---|");
    println!(
        "| {:.1} | {:.1} | {loaded:.2} | {:.2} | {} | {} |",
        backend.weight_bytes() as f64 / 1e6,
        (spec.block_count * spec.block_bytes) as f64 / 1e6,
        begun.elapsed().as_secs_f64() - loaded,
        memory("VmRSS:"),
        memory("VmHWM:"),
    );
    Ok(())
}

/// The value of a line of `/proc/self/status` in MB, or `?` if the system does not have this file.
fn memory(name: &str) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.map_or_else(|| "?".to_owned(), |kib| format!("{:.0}", kib * 1024.0 / 1e6))
}

/// Writes a preset with random weights to a model directory.
fn write(name: &str, directory: &Path) -> Result<(), Failure> {
    let config = preset(name)?;
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("config.json"), config_json(&config).to_string())?;
    let weights = random_model(&config, 1)?;
    let mut tensors = Vec::new();
    for spec in config.tensors() {
        tensors.push((spec.name.clone(), weights.tensor(&spec.name, &spec.shape)?));
    }
    let views = tensors.iter().map(|(name, tensor)| {
        let dtype = if tensor.dtype == TensorType::F32 { Dtype::F32 } else { Dtype::BF16 };
        TensorView::new(dtype, tensor.shape.clone(), &tensor.bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    safetensors::serialize_to_file(views, None, &directory.join("model.safetensors"))?;
    Ok(())
}

/// The `config.json` of a preset of the architecture `llama` or `qwen3`.
fn config_json(config: &DecoderConfig) -> serde_json::Value {
    let attention = config.attention().expect("a preset with attention");
    let mut mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    json!({
        "model_type": if attention.qk_norm.is_some() { "qwen3" } else { "llama" },
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlps.next().map(|mlp| mlp.width),
        "num_hidden_layers": config.layers.len(),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": if config.dtype == TensorType::F32 { "float32" } else { "bfloat16" },
    })
}
