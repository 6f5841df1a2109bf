//! The speed of a model's steps, as a share of the speed of a large copy and of a large matrix
//! product.

use std::time::Instant;

use stolon::backend::{Draw, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon::{Backend, KvBudget};
use stolon_checkpoint::{DecoderConfig, ModelError, Weights};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType, DeviceChoice, OpenError};
use stolon_loadgen::metrics::median;
use stolon_loadgen::rng::SeededRng;

use super::report::{Decode, Prefill, Run, Speed};
use super::step::{check_draws, table};
use super::subject::{BLOCK_SIZE, Setup, Subject};

/// The sizes of the measurements on a device.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    /// Bytes of a large copy.
    pub(super) copy_bytes: usize,
    /// Rows of the matrices of a large product.
    pub(super) product_rows: usize,
    /// Types of products.
    pub(super) compute_types: &'static [ComputeType],
    /// Tokens of a step that computes a prompt.
    pub(super) prefill_tokens: &'static [usize],
    /// Steps that compute one token of each sequence: numbers of sequences, and of tokens of each.
    pub(super) decodes: &'static [(usize, usize)],
    /// Tokens that the prompts of requests have in common.
    pub(super) shared_tokens: &'static [usize],
    /// Model to measure, if the user names none.
    pub(super) model: &'static str,
    /// Time for all of it in seconds. Later measurements are left out.
    pub(super) seconds: f64,
}

impl Sizes {
    pub(super) fn of(device: DeviceChoice) -> Self {
        if device == DeviceChoice::Cpu {
            return Self {
                copy_bytes: 64 << 20,
                product_rows: 512,
                compute_types: &[ComputeType::F32],
                prefill_tokens: &[128],
                decodes: &[(1, 128), (4, 128), (1, 1024)],
                shared_tokens: &[1024],
                model: "random:20m",
                seconds: 240.0,
            };
        }
        Self {
            copy_bytes: 1 << 30,
            product_rows: 8192,
            compute_types: &[ComputeType::F32, ComputeType::F16, ComputeType::Bf16],
            prefill_tokens: &[128, 512, 2048, 8192],
            decodes: &[(1, 1024), (4, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32_768)],
            shared_tokens: &[1024, 4096, 8192, 16_384, 32_768],
            model: "random:llama3.2-1b",
            seconds: 170.0,
        }
    }
}

/// Measures the limits of the device. Failures are noted in `speed`.
pub(super) fn limits(device: DeviceChoice, sizes: &Sizes, speed: &mut Speed) {
    match device.copy_speed(sizes.copy_bytes) {
        Ok(bytes) => speed.copy_bytes_per_second = Some(bytes),
        Err(error) => speed.errors.push(format!("a large copy: {error}")),
    }
    for compute_type in sizes.compute_types {
        match device.product_speed(*compute_type, sizes.product_rows) {
            Ok(flops) => drop(speed.product_flops.insert(compute_type.name(), flops)),
            Err(error) => {
                speed.errors.push(format!("a product in {}: {error}", compute_type.name()));
            }
        }
    }
}

/// The operations of a model and the bytes that it reads for a token.
struct Work {
    /// Elements of the matrices that each token is multiplied by, without the output matrix.
    elements: f64,
    /// Bytes of the weights that a step reads.
    weight_bytes: f64,
    /// Bytes of keys and values of a position.
    kv_bytes: f64,
}

impl Work {
    fn new(config: &DecoderConfig, stored_bytes: u64, block_bytes: usize) -> Self {
        let mut elements = 0.0;
        let mut embedding = 0.0;
        let mut all = 0.0;
        for spec in config.tensors() {
            let count = spec.shape.iter().product::<usize>() as f64;
            all += count;
            let share = match config.experts() {
                Some(experts) if spec.name.contains(".experts.") => {
                    experts.per_token as f64 / experts.count as f64
                }
                _ => 1.0,
            };
            match spec.name.as_str() {
                "model.embed_tokens.weight" => embedding = count,
                "lm_head.weight" => {}
                _ if spec.shape.len() >= 2 => elements += share * count,
                _ => {}
            }
        }
        // Only a few rows are read of an embedding that is not the output matrix as well.
        let unread = if config.tie_word_embeddings { 0.0 } else { embedding };
        let weight_bytes = stored_bytes as f64 * (all - unread) / all;
        let kv_bytes = block_bytes as f64 / BLOCK_SIZE as f64;
        Self { elements, weight_bytes, kv_bytes }
    }

    /// Floating-point operations of a prompt of `tokens` tokens.
    fn prefill_flops(&self, config: &DecoderConfig, tokens: usize) -> f64 {
        let pairs = |window: Option<usize>| {
            let window = window.unwrap_or(usize::MAX);
            (1..=tokens).map(|position| position.min(window) as f64).sum::<f64>()
        };
        let attention: f64 = config
            .layers
            .iter()
            .filter_map(|layer| layer.attention())
            .map(|attention| {
                let head_elements = (attention.heads * attention.head_dim) as f64;
                4.0 * head_elements * pairs(attention.sliding_window)
            })
            .sum();
        2.0 * self.elements * tokens as f64 + attention
    }
}

/// Measures prefill and decode of `subject` without an engine, until `until`.
///
/// # Errors
/// If the model cannot be opened, or a step fails.
pub(super) fn steps(
    subject: &Subject,
    setup: &Setup,
    sizes: &Sizes,
    until: Instant,
    speed: &mut Speed,
) -> anyhow::Result<Run> {
    let (config, weights) = subject.load()?;
    let stored_bytes = weights.total_bytes();
    let compute_type = ComputeType::default_for(setup.device, config.dtype);
    let flops = speed.product_flops.get(compute_type.name()).copied();
    let copies = speed.copy_bytes_per_second;
    let longest = sizes.prefill_tokens.iter().max().copied().unwrap_or_default();
    let decoded = sizes.decodes.iter().map(|&(batch, context)| batch * blocks(context));
    let wanted = decoded.max().unwrap_or_default().max(blocks(longest)) + 1;
    let mut backend = open_with_room(subject, setup, (config.clone(), weights), wanted)?;
    let work = Work::new(&config, stored_bytes, backend.spec().block_bytes);
    let memory = backend.step_memory();
    let mut run = Run {
        batch_invariant: setup.batch_invariant,
        cuda_graphs: setup.cuda_graphs,
        attention: backend.attention().to_owned(),
        step_memory_estimated_bytes: memory.estimated_bytes,
        step_memory_measured_bytes: memory.measured_bytes,
        ..Run::default()
    };
    let mut random = SeededRng::new(4);
    let prefills = if setup.cuda_graphs { &[] } else { sizes.prefill_tokens };
    for &tokens in prefills {
        let batch = StepBatch {
            tokens: random.tokens(tokens, config.vocab_size),
            sequences: vec![slice(tokens, 0, 0, (LogitRows::Last, slot(&backend, 0)))],
        };
        let what = format!("prefill of {tokens} tokens");
        let Some(seconds) = measure(&mut backend, &batch, until, &what, speed)? else { continue };
        let share = flops.map(|flops| work.prefill_flops(&config, tokens) / seconds / flops);
        let tokens_per_second = tokens as f64 / seconds;
        run.prefill.push(Prefill { tokens, seconds, tokens_per_second, share });
    }
    // This is how an engine decodes, unless a request needs whole rows.
    let decoded = match backend.spec().draws {
        true => LogitRows::Drawn(Draw::GREEDY),
        false => LogitRows::Last,
    };
    for &(batch, context) in sizes.decodes {
        // The time does not depend on the content of the store, so nothing has to be computed
        // before.
        let step = StepBatch {
            tokens: random.tokens(batch, config.vocab_size),
            sequences: (0..batch)
                .map(|index| {
                    let rows = (decoded, slot(&backend, index));
                    slice(1, context - 1, index * blocks(context), rows)
                })
                .collect(),
        };
        let what = format!("decode of {batch} sequences of {context} tokens");
        let Some(seconds) = measure(&mut backend, &step, until, &what, speed)? else { continue };
        // The vocabulary is larger than in the models that are compared with the CPU backend.
        check_draws(&mut backend, &step)?;
        let bytes = work.weight_bytes + (batch * context) as f64 * work.kv_bytes;
        let share = copies.map(|copies| bytes / seconds / copies);
        let tokens_per_second = batch as f64 / seconds;
        run.decode.push(Decode { batch, context, seconds, tokens_per_second, share });
    }
    run.captured_graphs = backend.captured_graphs();
    Ok(run)
}

/// Opens the model with `wanted` blocks, or with as many as fit in the device.
pub(super) fn open_with_room(
    subject: &Subject,
    setup: &Setup,
    (config, weights): (DecoderConfig, Weights),
    wanted: usize,
) -> Result<CandleBackend, OpenError> {
    let open = CandleBackend::open;
    match open(config, weights, setup.options(wanted)) {
        Err(OpenError::Model(ModelError::OutOfMemory { .. })) => {
            let (config, weights) = subject.load()?;
            open(config, weights, CandleOptions { kv_budget: KvBudget::Auto, ..setup.options(0) })
        }
        opened => opened,
    }
}

/// Number of blocks for `positions` positions.
pub(super) fn blocks(positions: usize) -> usize {
    positions.div_ceil(BLOCK_SIZE)
}

/// The slot with this number, if the model has recurrent states.
fn slot(backend: &impl Backend, index: usize) -> Option<SliceState> {
    backend.spec().state.map(|_| SliceState::in_slot(index as u32))
}

/// The last `count` positions of a sequence, after `start` earlier ones.
fn slice(
    count: usize,
    start: usize,
    first_block: usize,
    (logit_rows, state): (LogitRows, Option<SliceState>),
) -> SequenceSlice {
    SequenceSlice {
        token_count: count,
        start,
        write_from: start,
        block_table: table(first_block, start + count, BLOCK_SIZE),
        logit_rows,
        state,
        ..SequenceSlice::default()
    }
}

/// The time of a step in seconds: the median of some, after a first one. `None` if it does not fit.
fn measure(
    backend: &mut impl Backend,
    batch: &StepBatch,
    until: Instant,
    what: &str,
    speed: &mut Speed,
) -> anyhow::Result<Option<f64>> {
    let spec = backend.spec();
    let fits = batch.sequences.iter().all(|slice| {
        let last = slice.block_table.last().map_or(0, |block| block.0 as usize);
        last < spec.block_count && slice.start + slice.token_count <= spec.max_positions
    });
    if !fits || Instant::now() > until {
        let reason = if fits { "no time was left" } else { "it does not fit" };
        speed.left_out.push(format!("{what}: {reason}"));
        return Ok(None);
    }
    backend.step(batch)?;
    let mut times = Vec::new();
    while times.len() < 5 && (times.is_empty() || Instant::now() < until) {
        let start = Instant::now();
        backend.step(batch)?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(Some(median(times)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the operations and bytes of a model are those that its shapes give.
    #[test]
    fn the_work_of_a_token_follows_from_the_shapes() {
        let value = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
            "moe_intermediate_size": 3, "num_experts": 4, "num_experts_per_tok": 2,
            "max_position_embeddings": 64, "tie_word_embeddings": false, "dtype": "float32",
        });
        let config = DecoderConfig::from_json("test", &value).expect("a configuration");
        let elements = |name: &str| -> usize {
            let specs = config.tensors();
            specs
                .iter()
                .filter(|spec| spec.name.contains(name))
                .map(|s| s.shape.iter().product::<usize>())
                .sum()
        };
        let all = elements("");
        let work = Work::new(&config, 4 * all as u64, 32 * 16);
        // q and output 4 x 4, k and v 4 x 2, the router 4 x 4, and two of four experts of 3 x 4 x
        // 3.
        assert_eq!(work.elements, f64::from(2 * 16 + 2 * 8 + 16 + 2 * 36));
        assert!((work.weight_bytes - 4.0 * (all - 40) as f64).abs() < 1e-6);
        assert_eq!(work.kv_bytes, 16.0);
        // 1 + 2 + 3 pairs of positions with heads of 4 elements together, for scores and sums.
        assert_eq!(work.prefill_flops(&config, 3), 6.0 * work.elements + 4.0 * 4.0 * 6.0);
    }
}
