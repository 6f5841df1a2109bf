//! Measures the time of each stage of a step and compares it with the limits of the machine.
//!
//! `cargo bench --workspace --bench roofline [-- PRESET | --model=FILE.gguf | --vocab=N |
//! --threads=N | --weights=q8_0 | --only=NAME]`. The default is the shape of Qwen3-0.6B with a
//! vocabulary of 32,768 and random bf16 weights. `--model` measures a model of attention and dense
//! MLPs. `--only` selects the steps with this name. The limit of a stage is the longer of
//! two times: that of reading its operands from memory, at the bandwidth with which all threads
//! read a large array, and that of its multiplications, at the rate of the largest GEMM that this
//! program measures. Without `--bench` (as under `cargo test`), only the smallest preset runs once.
#![allow(clippy::print_stdout, reason = "prints its figures")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_checkpoint::{
    AttentionConfig, DecoderConfig, FeedForwardConfig, KvBudget, LoadOptions, ModelError,
    ModelSource, WeightType, load, random_model,
};
use stolon_cpu::{CpuBackend, CpuOptions, Stage, StageTimes};
use stolon_kernels::{self as kernels, Matrix, TensorType, Threads};
use stolon_kvcache::BlockId;

/// The limits of the machine with all threads.
struct Limits {
    /// Memory bandwidth in bytes per second.
    read: f64,
    /// Multiplications and additions per second.
    compute: f64,
}

/// A step to measure.
struct Work {
    name: &'static str,
    /// Number of sequences in the batch.
    sequences: usize,
    /// Number of cached positions per sequence.
    cached: usize,
    /// Number of new positions per sequence.
    new: usize,
}

const WORKS: [Work; 8] = [
    Work { name: "prefill of 512", sequences: 1, cached: 0, new: 512 },
    Work { name: "prefill of 1,088", sequences: 1, cached: 0, new: 1088 },
    Work { name: "decode of 1 at 512", sequences: 1, cached: 512, new: 1 },
    Work { name: "decode of 2 at 512", sequences: 2, cached: 512, new: 1 },
    Work { name: "decode of 4 at 512", sequences: 4, cached: 512, new: 1 },
    Work { name: "decode of 8 at 512", sequences: 8, cached: 512, new: 1 },
    Work { name: "decode of 16 at 512", sequences: 16, cached: 512, new: 1 },
    Work { name: "decode of 1 at 8,191", sequences: 1, cached: 8191, new: 1 },
];

fn main() -> Result<(), ModelError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let full = arguments.iter().any(|argument| argument == "--bench");
    let option = |name: &str| arguments.iter().find_map(|argument| argument.strip_prefix(name));
    let preset = arguments.iter().find(|argument| !argument.starts_with('-'));
    let preset = preset.map_or(if full { "qwen3-0.6b" } else { "tiny" }, String::as_str);
    let vocab = option("--vocab=").map_or(Some(32_768), |count| count.parse().ok());
    let threads = option("--threads=").and_then(|count| count.parse().ok());
    let threads = threads.unwrap_or_else(Threads::default_count);
    let weight_type: WeightType = option("--weights=").unwrap_or("stored").parse()?;

    let random = ModelSource::Random { preset: preset.to_owned(), seed: 1 };
    let file = option("--model=").map(PathBuf::from);
    let source = file.clone().map_or(random, ModelSource::Gguf);
    let model = load(&source, &LoadOptions::default())?;
    let (mut config, mut weights) = (model.config, model.weights);
    if file.is_none() && full {
        config.vocab_size = vocab.unwrap_or(config.vocab_size);
        weights = random_model(&config, 1)?;
    }
    let only = option("--only=").unwrap_or(if full { "" } else { "decode of 1 at 512" });
    let works: Vec<&Work> = WORKS.iter().filter(|work| work.name.contains(only)).collect();
    let block_size = CpuOptions::default().block_size;
    let of = |work: &&Work| work.sequences * (work.cached + work.new).div_ceil(block_size);
    let blocks = works.iter().map(of).max().unwrap_or(0);
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(blocks),
        threads: Some(threads),
        weight_type,
        ..CpuOptions::default()
    };
    let mut backend = CpuBackend::new(config.clone(), weights, options)?;
    fill(&mut backend);
    let limits = limits(&Threads::new(threads), backend.path(), full);
    println!(
        "{preset}, weights {weight_type}, path {}, {threads} threads: reads {:.1} GB/s, multiplies {:.0} GFLOP/s",
        backend.path(),
        limits.read / 1e9,
        limits.compute / 1e9,
    );
    let weight_bytes = match (weight_type, file) {
        (WeightType::Stored, None) => block_bytes(config.dtype),
        (WeightType::Stored, Some(file)) => file_bytes(&file) / weight_count(&config) as f64,
        (WeightType::Q8_0, _) => block_bytes(TensorType::Q8_0),
    };
    for work in works {
        let (seconds, times) = measure(&mut backend, work, if full { 9 } else { 1 });
        let needs = |stage| needs(&config, &backend, weight_bytes, work, stage);
        print_table(config.layers.len(), work, seconds, &times, &limits, needs);
    }
    Ok(())
}

/// Number of bytes per weight of a type.
fn block_bytes(dtype: TensorType) -> f64 {
    dtype.block_bytes() as f64 / dtype.block_len() as f64
}

/// Size of a model file.
fn file_bytes(file: &Path) -> f64 {
    file.metadata().expect("the model was loaded from it").len() as f64
}

/// The attention of the first layer, and the width of its MLP.
fn parts(config: &DecoderConfig) -> (AttentionConfig, usize) {
    let layer = &config.layers[0];
    let mlp = layer.mlp.as_ref().and_then(FeedForwardConfig::dense);
    let (attention, mlp) = layer.attention().zip(mlp).expect("attention and an MLP");
    (*attention, mlp.width)
}

/// Number of weights that a token is multiplied with.
fn weight_count(config: &DecoderConfig) -> usize {
    let (attention, inner) = parts(config);
    let heads = 2 * (attention.heads + attention.kv_heads) * attention.head_dim;
    let layer = config.hidden_size * (heads + 3 * inner);
    config.layers.len() * layer + config.vocab_size * config.hidden_size
}

/// Writes every block of the KV store. Reading memory that was never written would only read the
/// system's single zero page.
fn fill(backend: &mut CpuBackend) {
    /// Number of blocks of a prompt.
    const BLOCKS: usize = 32;
    let spec = backend.spec().clone();
    let blocks: Vec<BlockId> = (0..spec.block_count).map(|block| BlockId(block as u32)).collect();
    for block_table in blocks.chunks(BLOCKS) {
        let token_count = block_table.len() * spec.block_size;
        let block_table = block_table.to_vec();
        let logit_rows = LogitRows::None;
        let slice = SequenceSlice {
            token_count,
            start: 0,
            write_from: 0,
            block_table,
            logit_rows,
            state: spec.state.map(|_| SliceState::in_slot(0)),
            ..SequenceSlice::default()
        };
        let tokens = (0..token_count).map(|i| (i % spec.vocab_size) as u32).collect();
        backend.step(&StepBatch { sequences: vec![slice], tokens }).expect("a valid batch");
    }
}

/// The median time of the step in seconds, and the stage times of that step.
fn measure(backend: &mut CpuBackend, work: &Work, repeats: usize) -> (f64, StageTimes) {
    let spec = backend.spec().clone();
    let blocks = (work.cached + work.new).div_ceil(spec.block_size);
    let slices = (0..work.sequences).map(|sequence| SequenceSlice {
        token_count: work.new,
        start: work.cached,
        write_from: work.cached,
        // 7919 is prime, so consecutive blocks are scattered over the KV store.
        block_table: (0..blocks)
            .map(|i| BlockId(((sequence * blocks + i) * 7919 % spec.block_count) as u32))
            .collect(),
        logit_rows: LogitRows::Last,
        state: spec.state.map(|_| SliceState::in_slot(sequence as u32)),
        ..SequenceSlice::default()
    });
    let batch = StepBatch {
        sequences: slices.collect(),
        tokens: (0..work.sequences * work.new).map(|i| (i * 31 % spec.vocab_size) as u32).collect(),
    };
    let mut steps: Vec<(f64, StageTimes)> = (0..repeats + 1)
        .map(|_| {
            let before = backend.stage_times();
            let begun = Instant::now();
            backend.step(&batch).expect("a valid batch");
            (begun.elapsed().as_secs_f64(), backend.stage_times().since(&before))
        })
        .skip(1)
        .collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    steps[steps.len() / 2]
}

/// The number of operations of a stage and the number of bytes that it reads.
fn needs(
    config: &DecoderConfig,
    backend: &CpuBackend,
    weight_bytes: f64,
    work: &Work,
    stage: Stage,
) -> (f64, f64) {
    let (attention, inner) = parts(config);
    let AttentionConfig { heads, kv_heads, head_dim, .. } = attention;
    let (hidden, queries, keys) = (config.hidden_size, heads * head_dim, kv_heads * head_dim);
    let layers = config.layers.len();
    let rows = work.sequences * work.new;
    let product = |rows: usize, weights: usize| {
        (2.0 * rows as f64 * weights as f64, weights as f64 * weight_bytes)
    };
    match stage {
        Stage::Qkv => product(rows, layers * hidden * (queries + 2 * keys)),
        Stage::Output => product(rows, layers * hidden * queries),
        Stage::GateUp => product(rows, layers * 2 * hidden * inner),
        Stage::Down => product(rows, layers * hidden * inner),
        Stage::Logits => product(work.sequences, config.vocab_size * hidden),
        Stage::Attention => {
            // The last layer computes only the rows that get logits.
            let end = work.cached + work.new;
            let pairs: usize = (work.cached + 1..=end).sum();
            let pairs = work.sequences * ((layers - 1) * pairs + end);
            let elements = backend.kv_type().elements();
            let head_bytes: usize = elements.map(|kind| kind.head_bytes(head_dim)).iter().sum();
            let bytes = work.sequences * layers * end * kv_heads * head_bytes;
            (4.0 * (pairs * queries) as f64, bytes as f64)
        }
        _ => (0.0, 0.0),
    }
}

fn print_table(
    layers: usize,
    work: &Work,
    seconds: f64,
    times: &StageTimes,
    limits: &Limits,
    needs: impl Fn(Stage) -> (f64, f64),
) {
    println!("\n{}: {:.2} ms per step", work.name, seconds * 1e3);
    println!("| stage | us/layer | share of the step | GFLOP/s | GB/s | of the limit |");
    println!("|---|---|---|---|---|---|");
    let mut kernels = 0.0;
    for stage in Stage::ALL {
        let time = times.of(stage).as_secs_f64();
        let (operations, bytes) = needs(stage);
        let layer = match stage {
            Stage::Batch | Stage::Logits => "-".to_owned(),
            _ => format!("{:.0}", time / layers as f64 * 1e6),
        };
        print!("| {stage:?} | {layer} | {:.1} % |", time / seconds * 100.0);
        if operations == 0.0 {
            println!(" | | |");
            continue;
        }
        kernels += time;
        let least = (operations / limits.compute).max(bytes / limits.read);
        let rates = (operations / time / 1e9, bytes / time / 1e9);
        println!(" {:.0} | {:.1} | {:.0} % |", rates.0, rates.1, least / time * 100.0);
    }
    println!("Outside of GEMMs and attention: {:.1} %", (1.0 - kernels / seconds) * 100.0);
}

fn limits(threads: &Threads, path: kernels::Path, full: bool) -> Limits {
    let words = if full { 64 << 20 } else { 1 << 10 };
    let memory = vec![1_u64; words];
    let part = words / threads.count();
    let read = best(5, || {
        let sum = AtomicU64::new(0);
        threads.for_each(threads.count(), |index| {
            let mut sums = [0_u64; 16];
            for line in memory[index * part..(index + 1) * part].chunks_exact(16) {
                for (sum, word) in sums.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(*word);
                }
            }
            sum.fetch_add(sums.iter().sum(), Ordering::Relaxed);
        });
        assert!(sum.into_inner() > 0);
    });
    let (size, rows) = if full { (2048, 1024) } else { (64, 16) };
    let weights = vec![0x3c_u8; 2 * size * size];
    let matrix = Matrix::pack(TensorType::Bf16, size, size, &weights, path).expect("a valid shape");
    let x = vec![0.5; rows * size];
    let mut out = vec![0.0; rows * size];
    let product = best(9, || matrix.matmul(threads, &x, rows, &mut out));
    Limits { read: (8 * words) as f64 / read, compute: (2 * rows * size * size) as f64 / product }
}

/// The shortest time of `repeats` runs, in seconds.
fn best(repeats: usize, mut run: impl FnMut()) -> f64 {
    let times = (0..repeats).map(|_| {
        let begun = Instant::now();
        run();
        begun.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}
