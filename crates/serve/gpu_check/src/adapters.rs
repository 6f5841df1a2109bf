//! LoRA adapters: logits with an adapter are those of the CPU backend, and in a batch of several
//! adapters and the model itself, each row has the bits that it has alone.

use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::{Map, json};
use stolon::Backend;
use stolon::backend::Adapter;
use stolon_checkpoint::config::{FeedForwardWeights, LinearWeights, MixerWeights, MlpWeights};
use stolon_checkpoint::{DecoderConfig, KvBudget, KvType};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_cuda::ComputeType;
use stolon_loadgen::rng::SeededRng;

use super::parity::{Rounding, compare};
use super::report::Outcome;
use super::step::{Part, rows_of, rows_that_differ, step, table};
use super::subject::{BLOCK_SIZE, Setup, Subject, Target};

/// Number of positions of each sequence: more than the rows of a product with batch invariance.
const POSITIONS: usize = 150;
/// Size of the chunks in which the sequences of a batch are computed.
const CHUNK: usize = 47;
/// Ranks of the adapters.
const RANKS: [usize; 2] = [8, 24];
/// Maximum size of an adapter in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The projections of attention, MLPs and experts of a model.
fn linears(config: &DecoderConfig) -> Vec<LinearWeights> {
    let mut linears = Vec::new();
    for layer in config.weights().layers {
        for mixer in layer.mixers {
            if let MixerWeights::Attention(attention) = mixer {
                linears.extend(attention.qkv.parts().chain([attention.output]));
            }
        }
        let mlps: Vec<MlpWeights> = match layer.mlp {
            Some(FeedForwardWeights::Dense(mlp)) => vec![mlp],
            Some(FeedForwardWeights::Experts(experts)) => experts.experts,
            Some(FeedForwardWeights::DenseAndExperts(both)) => vec![both.mlp],
            None => Vec::new(),
        };
        linears.extend(mlps.into_iter().flat_map(MlpWeights::linears));
    }
    linears
}

/// Writes a random adapter for the model with the configuration `config` in the format of PEFT. Its
/// updates are about as large as the results that they are added to.
fn write(directory: &Path, config: &DecoderConfig, rank: usize) -> anyhow::Result<()> {
    let mut random = SeededRng::new(rank as u64);
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for LinearWeights { weight, .. } in linears(config) {
        let module = weight.name.strip_suffix(".weight").context("a matrix")?;
        let (out, input) = (weight.shape[0], weight.shape[1]);
        let scale = 2.0 / ((rank * input) as f64).sqrt();
        for (matrix, shape, scale) in [("A", [rank, input], 1.0), ("B", [out, rank], scale)] {
            let start = data.len();
            for _ in 0..shape[0] * shape[1] {
                let value = (scale * (random.unit() - 0.5)) as f32;
                // f32, because the CPU backend may round the inputs of matrices in bf16, too; and
                // exact in bf16, so that only the device's products round.
                data.extend(half::bf16::from_f32(value).to_f32().to_le_bytes());
            }
            let name = format!("base_model.model.{module}.lora_{matrix}.weight");
            let place = [start, data.len()];
            header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": place }));
        }
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(directory.join("adapter_model.safetensors"), file)?;
    let settings = json!({ "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank });
    std::fs::write(directory.join("adapter_config.json"), settings.to_string())?;
    Ok(())
}

/// Loads an adapter of each rank.
fn load(backend: &impl Backend, config: &DecoderConfig) -> anyhow::Result<Vec<Adapter>> {
    let loader = backend.adapters().context("the backend does not support adapters")?;
    let adapters = RANKS.map(|rank| {
        let directory = tempfile::tempdir()?;
        write(directory.path(), config, rank)?;
        Ok(loader.load(directory.path(), BYTES_MAX)?)
    });
    adapters.into_iter().collect()
}

/// Compares the logits of sequences with two adapters with those of the CPU backend, and the rows
/// of a batch of both and the model itself with those of the sequences alone.
pub(super) fn in_one_batch<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
    compute_type: ComputeType,
) -> anyhow::Result<Outcome> {
    ensure!(setup.batch_invariant, "rows are comparable with batch invariance only");
    let (config, weights) = subject.load()?;
    let own = config.clone();
    let tokens = SeededRng::new(4).tokens(POSITIONS, config.vocab_size);
    let per_sequence = POSITIONS.div_ceil(BLOCK_SIZE);
    let blocks = (RANKS.len() + 1) * per_sequence;
    let options = CpuOptions {
        block_size: BLOCK_SIZE,
        kv_budget: KvBudget::Blocks(blocks),
        kv_type: Some(KvType::F32),
        ..CpuOptions::default()
    };
    let tables: Vec<_> =
        (0..=RANKS.len()).map(|index| table(index * per_sequence, POSITIONS, BLOCK_SIZE)).collect();
    let mut cpu = CpuBackend::new(config, weights, options)?;
    let mut expected = Vec::new();
    for adapter in &load(&cpu, &own)? {
        let part = Part::new(&tokens, 0, POSITIONS, &tables[0]).with(Some(adapter));
        expected.extend(rows_of(&mut cpu, part, POSITIONS)?);
    }
    drop(cpu);
    let (config, weights) = subject.load()?;
    let mut backend = target.open(config, weights, setup.options(blocks))?;
    let adapters = load(&backend, &own)?;
    let adapters: Vec<Option<&Adapter>> =
        [None].into_iter().chain(adapters.iter().map(Some)).collect();
    let mut alone = Vec::new();
    for adapter in &adapters {
        let part = Part::new(&tokens, 0, POSITIONS, &tables[0]).with(*adapter);
        alone.push(rows_of(&mut backend, part, POSITIONS)?);
    }
    let rounding = match compute_type {
        // A row with other experts changes what later rows read.
        ComputeType::F16 if own.experts().is_some() => Rounding::To(ComputeType::Bf16),
        own => Rounding::To(own),
    };
    let compared = compare(&alone[1..].concat(), &expected, rounding);
    let mut different = 0;
    for from in (0..POSITIONS).step_by(CHUNK) {
        let to = POSITIONS.min(from + CHUNK);
        let parts: Vec<_> = adapters
            .iter()
            .zip(&tables)
            .map(|(adapter, table)| Part::new(&tokens, from, to, table).with(*adapter))
            .collect();
        for (got, alone) in step(&mut backend, &parts)?.iter().zip(&alone) {
            different += rows_that_differ(got, &alone[from..to]);
        }
    }
    let detail = format!("{}; {different} rows differ in a batch", compared.detail);
    Ok(Outcome { is_good: compared.is_good && different == 0, detail, ..compared })
}
