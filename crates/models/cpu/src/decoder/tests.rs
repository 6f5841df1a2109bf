//! Runs the mixers of a layer on random rows. The tests of mixers compare the results with a plain
//! loop.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Value, json};
use stolon_backend::{LogitRows, SequenceSlice, SliceState};
use stolon_checkpoint::config::TensorRole;
use stolon_checkpoint::kv::{KvShape, KvType};
use stolon_checkpoint::{Tensor, TensorType, WeightType, Weights};
use stolon_kernels::KvLayout;
use stolon_kvcache::BlockId;

use super::*;

/// Width of the residual stream.
pub(super) const HIDDEN: usize = 32;

/// Number of positions.
pub(super) const TOKENS: usize = 21;

/// A layer without its MLP, and the outputs of its mixers.
pub(super) struct Case {
    pub(super) config: DecoderConfig,
    /// The weights in f64, by the names of their tensors. The names of the layer's tensors have
    /// neither the prefix of the layer nor the suffix `.weight`.
    weights: HashMap<String, Vec<f64>>,
    /// The normalized input of the layer, `[TOKENS, HIDDEN]`.
    pub(super) normed: Vec<Vec<f64>>,
    /// The outputs that the mixers have added to the residual stream, `[TOKENS, HIDDEN]`.
    added: Vec<Vec<f64>>,
}

/// Pseudorandom numbers from -1 to 1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).skip(8).take(count).collect()
}

impl Case {
    /// Runs the mixers of a layer of a model whose configuration has the keys `keys`, in two steps.
    /// The second step begins after `first` positions.
    pub(super) fn run(keys: &Value, first: usize) -> Self {
        let mut json = json!({
            "vocab_size": 8, "hidden_size": HIDDEN, "num_hidden_layers": 1,
            "intermediate_size": HIDDEN, "max_position_embeddings": 64,
        });
        for (key, value) in keys.as_object().expect("keys") {
            json[key] = value.clone();
        }
        let config = DecoderConfig::from_json("config.json", &json).expect("a configuration");
        let (mut weights, mut tensors) = (HashMap::new(), Vec::new());
        for (seed, spec) in (1..).zip(config.tensors()) {
            let values = noise(seed, spec.shape.iter().product());
            let scale = 2.0 / (*spec.shape.last().expect("a dimension") as f32).sqrt();
            let values: Vec<f32> = match spec.role {
                TensorRole::Norm | TensorRole::PlainNorm => {
                    values.iter().map(|value| 1.0 + 0.3 * value).collect()
                }
                _ => values.iter().map(|value| scale.min(0.7) * value).collect(),
            };
            let name = spec.name.trim_start_matches("model.layers.0.").trim_end_matches(".weight");
            weights.insert(name.to_owned(), values.iter().map(|v| f64::from(*v)).collect());
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (name, shape) = (spec.name, spec.shape);
            tensors.push(Tensor { name, dtype: TensorType::F32, shape, bytes: Cow::Owned(bytes) });
        }
        let tensors = Weights::from_tensors("memory", tensors).expect("tensors");
        let rows = noise(99, TOKENS * HIDDEN);
        let added = mixed(&config, tensors, &rows, first);
        let in_rows = |values: &[f32]| -> Vec<Vec<f64>> {
            let rows = values.chunks_exact(HIDDEN);
            rows.map(|row| row.iter().map(|value| f64::from(*value)).collect()).collect()
        };
        let mut case = Self { config, weights, normed: Vec::new(), added: in_rows(&added) };
        let offset = f64::from(case.config.norms.offset);
        let norm = case.weights["input_layernorm"].iter().map(|weight| weight + offset);
        let norm: Vec<f64> = norm.collect();
        case.normed = in_rows(&rows).iter().map(|row| case.rms_norm(row, &norm)).collect();
        case
    }

    /// The weights with this name.
    pub(super) fn weights(&self, name: &str) -> &[f64] {
        self.weights.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.weights.keys()))
    }

    /// The product of the matrix with this name and `x`.
    pub(super) fn project(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.weights(name).chunks_exact(x.len()).map(|row| dot(row, x)).collect()
    }

    /// `x` divided by the root of its mean square, times `weight`.
    pub(super) fn rms_norm(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        let mean = dot(x, x) / x.len() as f64 + f64::from(self.config.norms.eps);
        x.iter().zip(weight).map(|(x, weight)| x / mean.sqrt() * weight).collect()
    }

    /// Rotates the head `x` by the plain rotary embedding of `position`.
    pub(super) fn rotate(&self, x: &mut [f64], position: usize) {
        let half = x.len() / 2;
        for pair in 0..half {
            let angle =
                position as f64 * self.config.ropes[0].theta.powf(-(pair as f64) / half as f64);
            let (a, b) = (x[pair], x[half + pair]);
            x[pair] = a * angle.cos() - b * angle.sin();
            x[half + pair] = b * angle.cos() + a * angle.sin();
        }
    }

    /// Checks that the rows `expected` were added to the residual stream.
    pub(super) fn check(&self, expected: &[Vec<f64>]) {
        assert_eq!(expected.len(), TOKENS);
        let largest = expected.iter().flatten().fold(0.0_f64, |most, value| most.max(value.abs()));
        for (row, (got, expected)) in self.added.iter().zip(expected).enumerate() {
            for (got, expected) in got.iter().zip(expected) {
                let error = (got - expected).abs() / largest;
                assert!(error < 1e-4, "row {row}: {got}, expected {expected}");
            }
        }
    }
}

/// The dot product.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `x * sigmoid(x)`.
pub(super) fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`.
pub(super) fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

/// The average of `values`, weighted by the softmax of `scores`.
pub(super) fn attend(scores: &[f64], values: &[&[f64]]) -> Vec<f64> {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let element = |index: usize| {
        weights.iter().zip(values).map(|(weight, value)| weight / sum * value[index]).sum()
    };
    (0..values[0].len()).map(element).collect()
}

/// The causal convolution at `position`: for each channel, the weighted sum of its last inputs.
/// `taps` is `[channels, count]`, with the oldest position first.
pub(super) fn convolve(inputs: &[Vec<f64>], taps: &[f64], position: usize) -> Vec<f64> {
    let channels = inputs[0].len();
    let count = taps.len() / channels;
    let channel = |channel: usize| {
        let input = |tap: usize| Some(inputs[(position + tap + 1).checked_sub(count)?][channel]);
        (0..count).map(|tap| taps[channel * count + tap] * input(tap).unwrap_or(0.0)).sum()
    };
    (0..channels).map(channel).collect()
}

/// The outputs that the mixers of the first layer add to `rows` of the residual stream.
fn mixed(config: &DecoderConfig, weights: Weights, rows: &[f32], first: usize) -> Vec<f32> {
    let (path, workers) = (Path::PORTABLE, Workers::new(2));
    let (weight_type, map_tables) = (WeightType::Stored, false);
    let loader = Loader { weights, weight_type, map_tables, path, workers: &workers };
    let mut decoder = Decoder::load(config.clone(), loader).expect("a model");
    let shape = KvShape::of(config, 16, KvType::F32, |_| KvLayout::Rows);
    let mut kv = KvStore::new(shape, 4).expect("a store");
    let mut states = crate::state_store::StateStore::new(config, 1).expect("states");
    let mut added = Vec::new();
    for range in [0..first, first..TOKENS] {
        let count = range.len();
        let slice = SequenceSlice {
            token_count: count,
            start: range.start,
            write_from: range.start,
            block_table: vec![BlockId(1), BlockId(3)],
            logit_rows: LogitRows::All,
            // The second step resumes from the state in the slot.
            state: (config.recurrent_layers() > 0).then(|| SliceState::in_slot(0)),
            ..SequenceSlice::default()
        };
        let batch = StepBatch { tokens: vec![0; count], sequences: vec![slice] };
        let mut step = StepState { kv: &mut kv, states: &mut states };
        step.states.begin(&batch, step.kv, &workers);
        decoder.plan.fill(&batch, &[], 16);
        decoder.adapters.fill(&batch);
        decoder.activations.reserve(config, count);
        decoder.ropes.iter_mut().for_each(|rope| rope.grow(range.end));
        let sequences = Sequences::of(&batch, &[], &decoder.plan);
        decoder.activations.mixers.fill_taps(config, &sequences.blocks, 16);
        let own = &rows[range.start * HIDDEN..range.end * HIDDEN];
        decoder.activations.x[..own.len()].copy_from_slice(own);
        decoder.norm_for(0, count, &workers);
        decoder.project(0, Inputs::All, (&batch, &mut step), &workers);
        decoder.mix(0, count, step.kv, &sequences, &workers);
        added.extend(decoder.activations.x.iter().zip(own).map(|(after, before)| after - before));
    }
    added
}
