//! Tests batch invariance: a row of logits depends, bit for bit, only on the tokens of its
//! sequence.

use std::collections::{BTreeMap, BTreeSet};

use stolon_checkpoint::config::NormPlacement;
use stolon_checkpoint::{
    AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, KvType, LayerConfig,
    LoadedModel, MixerConfig, MlpConfig, Rope, TensorType, WindowKv, random_model,
};
use stolon_kernels::{Path, PathKind};

use super::fixture::{self, Setup};
use crate::suite::invariance::Subject;

const THREADS: [usize; 2] = [1, 2];

/// Gives a mixer larger sizes. Heads of other sizes than `usual_heads` keep them.
fn widen_mixer(mixer: &mut MixerConfig, usual_heads: Option<(usize, usize)>) {
    match mixer {
        MixerConfig::Attention(attention) => {
            (attention.heads, attention.scale) = (6, 0.125);
            if Some((attention.kv_heads, attention.head_dim)) == usual_heads {
                attention.kv_heads = if attention.selective { 6 } else { 2 };
                (attention.head_dim, attention.rotary_dim) = (64, 64);
            }
        }
        MixerConfig::Latent(latent) => (latent.heads, latent.scale) = (6, 0.125),
        MixerConfig::DeltaNet(delta_net) => {
            (delta_net.key_dim, delta_net.value_dim) = (64, 40);
        }
        MixerConfig::Convolution(_) | MixerConfig::Mamba2(_) => {}
    }
}

/// A model that is large enough for all work to run on several threads: its configuration, and a
/// function that returns it.
pub(super) fn wide_model(
    fixture: &'static str,
    dtype: TensorType,
) -> (DecoderConfig, impl Fn() -> LoadedModel) {
    let LoadedModel { config, .. } = fixture::model(fixture);
    let mut config = DecoderConfig {
        vocab_size: 500,
        hidden_size: 256,
        ropes: config.ropes.into_iter().map(|rope| Rope { sections: None, ..rope }).collect(),
        dtype,
        ..config
    };
    let heads = |attention: &AttentionConfig| (attention.kv_heads, attention.head_dim);
    let usual_heads = config.attention().map(heads);
    let dense = |layer: &LayerConfig| Some(layer.mlp.as_ref()?.dense()?.width);
    let usual_width = config.layers.iter().find_map(dense);
    for layer in &mut config.layers {
        layer.mixers.iter_mut().for_each(|mixer| widen_mixer(mixer, usual_heads));
        if let Some(FeedForwardConfig::Dense(mlp) | FeedForwardConfig::DenseAndExperts(mlp, _)) =
            &mut layer.mlp
            && Some(mlp.width) == usual_width
        {
            mlp.width = 600;
        }
        if let Some(
            FeedForwardConfig::Experts(experts) | FeedForwardConfig::DenseAndExperts(_, experts),
        ) = &mut layer.mlp
        {
            experts.width = 320;
            experts.shared_width = experts.shared_width.map(|_| 480);
        }
    }
    let own = config.clone();
    let model = move || {
        let weights = random_model(&own, 7).expect("a valid configuration");
        LoadedModel { weights, config: own.clone(), ..fixture::model(fixture) }
    };
    (config, model)
}

/// The tokens of a sequence for a wide model: enough for work to run on several threads, and few for
/// portable loops, which are slow.
pub(super) fn wide_tokens(path: Path) -> Vec<u32> {
    let count = if path == Path::PORTABLE { 80 } else { 140 };
    (0..count).map(|i| i * i % 499).collect()
}

/// A wide model and a sequence.
fn wide(fixture: &'static str, dtype: TensorType, path: Path) -> Subject<'static> {
    let (_, model) = wide_model(fixture, dtype);
    let kv_type = if dtype == TensorType::F32 { KvType::F32 } else { KvType::Bf16 };
    let open = fixture::open(Setup { kv_type, path: Some(path), ..Setup::default() });
    let label = format!("wide {fixture}, {dtype:?}, {path:?}");
    Subject::new(label, Box::new(model), open, &THREADS, wide_tokens(path))
}

/// Goal: logits and hidden states are batch invariant for every architecture and every element type
/// of the KV store. Each model has half of the types, in turn: others of its family have the rest.
#[test]
fn every_architecture_is_batch_invariant() {
    let paths = Path::supported();
    let path = paths[paths.len() - 1];
    for (number, name) in fixture::names().into_iter().enumerate() {
        for kv_type in KvType::ALL.into_iter().skip(number % 2).step_by(2) {
            let open = fixture::open(Setup { kv_type, path: Some(path), ..Setup::default() });
            let label = format!("{kv_type}, {path:?}");
            Subject::fixture(&name, &label, open, &THREADS).check();
        }
    }
}

/// The name of the kind of a mixer.
fn kind(mixer: &MixerConfig) -> &'static str {
    match mixer {
        MixerConfig::Attention(_) => "attention",
        MixerConfig::Latent(_) => "latent attention",
        MixerConfig::Convolution(_) => "convolution",
        MixerConfig::DeltaNet(_) => "delta rule",
        MixerConfig::Mamba2(_) => "Mamba-2",
    }
}

/// An MLP for all tokens, as the model has it or as its experts are.
fn dense(config: &DecoderConfig) -> MlpConfig {
    let mut mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    let of_expert = |experts: &ExpertsConfig| {
        let ExpertsConfig { width, activation, bias, .. } = *experts;
        MlpConfig { width, activation, bias, output_factor: 1.0 }
    };
    let mlp = mlps.next().copied().or(config.experts().map(of_expert));
    mlp.expect("an MLP or experts")
}

/// The indices of the last layer with each kind of mixer that keeps something of positions.
fn last_of_each_kind(config: &DecoderConfig) -> BTreeSet<usize> {
    let keeping = config.layers.iter().enumerate().filter(|(_, layer)| layer.keeps_positions());
    let kinds = |layer: &LayerConfig| layer.mixers.iter().map(kind).collect::<Vec<_>>();
    let last: BTreeMap<_, _> = keeping.map(|(index, layer)| (kinds(layer), index)).collect();
    last.into_values().collect()
}

/// Goal: an MLP may follow every kind of layer as a layer of its own. Rows without an output are
/// dropped in the last layer that keeps something of positions, which is not the last one then.
#[test]
fn layers_without_mixers_may_follow_all_others() {
    let mut kinds = BTreeSet::new();
    for name in fixture::names() {
        let LoadedModel { config: whole, .. } = fixture::model(&name);
        if whole.norms.placement != NormPlacement::Input {
            // Such models have no norm that the MLP could have for itself, and are refused.
            continue;
        }
        for index in last_of_each_kind(&whole) {
            let last = &whole.layers[index];
            let mlp = Some(FeedForwardConfig::Dense(dense(&whole)));
            let mlps = [mlp, last.mlp.or(mlp)].map(|mlp| LayerConfig { mixers: Vec::new(), mlp });
            let layers = [&whole.layers[..=index], &mlps].concat();
            let config = DecoderConfig { layers, ..whole.clone() };
            kinds.extend(last.mixers.iter().map(kind));
            let model = || {
                let weights = random_model(&config, 7).expect("a valid configuration");
                LoadedModel { weights, config: config.clone(), ..fixture::model(&name) }
            };
            let tokens = (0..90).map(|i| i * i % 89).collect();
            let open = fixture::open(Setup::default());
            let label = format!("{name} to layer {index} and MLPs");
            Subject::new(label, Box::new(model), open, &[1], tokens).check_outputs();
        }
    }
    assert_eq!(kinds.len(), 5, "the last mixers are {kinds:?}");
}

/// Goal: with windows in the states of sequences, logits have the bits that they have with windows
/// in blocks, however a prompt is cut and from wherever it resumes. Each model has half of the types
/// of the KV store, in turn.
#[test]
fn windows_in_states_change_no_bit() {
    let names = ["gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2", "olmo3", "exaone4"];
    for (number, name) in names.into_iter().enumerate() {
        // The longest slice of the checks is the whole sequence.
        let step_tokens = fixture::expected(name).prompt.len() + 30;
        for kv_type in KvType::ALL.into_iter().skip(number % 2).step_by(2) {
            let [blocks, states] = [WindowKv::Blocks, WindowKv::States].map(|window_kv| {
                let open =
                    fixture::open(Setup { kv_type, window_kv, step_tokens, ..Setup::default() });
                Subject::fixture(
                    name,
                    &format!("{kv_type}, windows in {window_kv}"),
                    open,
                    &THREADS,
                )
            });
            let bytes = |subject: &Subject<'_>| subject.backend(16, 1).spec().block_bytes;
            assert!(bytes(&states) < bytes(&blocks), "{name}");
            let bits = |subject: &Subject<'_>| {
                let logits = subject.reference(&subject.tokens).concat();
                logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert!(bits(&states) == bits(&blocks), "{name}, {kv_type}");
            states.check();
        }
    }
}

/// Goal: logits are batch invariant on every instruction set, with GEMMs that run on several
/// threads. The portable loops, which are slow, compute one of the models, and instructions that only
/// products have no recurrent layers.
#[test]
fn every_instruction_set_is_batch_invariant() {
    let paths = Path::supported();
    for &path in &paths {
        for dtype in [TensorType::F32, TensorType::Bf16] {
            wide("qwen3", dtype, path).check();
        }
        let more: &[&str] = match path.kind() {
            PathKind::Portable => &[],
            PathKind::Avx512Bf16 | PathKind::Amx => &["qwen2_moe"],
            _ => &["qwen2_moe", "qwen3_5", "falcon_h1"],
        };
        for name in more {
            wide(name, TensorType::Bf16, path).check();
        }
    }
    // What these have of their own does not depend on the instruction set.
    for name in ["gemma4", "gemma4_moe", "moondream2", "moondream3"] {
        wide(name, TensorType::Bf16, paths[paths.len() - 1]).check();
    }
}
