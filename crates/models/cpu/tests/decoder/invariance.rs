//! Tests batch invariance: a row of logits depends, bit for bit, only on the tokens of its
//! sequence.

use std::collections::{BTreeMap, BTreeSet};

use stolon_checkpoint::config::NormPlacement;
use stolon_checkpoint::{
    DecoderConfig, DeltaNetConfig, ExpertsConfig, KvType, LayerConfig, LoadedModel, MlpKind, Rope,
    TensorType, WindowKv, random_model,
};
use stolon_kernels::Path;

use super::fixture::{self, Setup};
use crate::suite::invariance::Subject;

const THREADS: [usize; 2] = [1, 2];

/// A model that is large enough for all work to run on several threads: its configuration, and a
/// function that returns it.
pub(super) fn wide_model(
    fixture: &'static str,
    dtype: TensorType,
) -> (DecoderConfig, impl Fn() -> LoadedModel) {
    let LoadedModel { config, .. } = fixture::model(fixture);
    let experts = config.experts.map(|experts| ExpertsConfig {
        width: 320,
        shared_width: experts.shared_width.map(|_| 480),
        ..experts
    });
    let config = DecoderConfig {
        vocab_size: 500,
        hidden_size: 256,
        intermediate_size: 600,
        experts,
        delta_net: config.delta_net.map(|delta_net| DeltaNetConfig {
            key_dim: 64,
            value_dim: 40,
            ..delta_net
        }),
        num_heads: 6,
        num_kv_heads: match config.latent {
            Some(_) => 1,
            None if config.selective_attention => 6,
            None => 2,
        },
        head_dim: config.latent.map_or(64, |latent| latent.kept_dim()),
        rotary_dim: config.latent.and(config.rotary_dim),
        ropes: config.ropes.into_iter().map(|rope| Rope { sections: None, ..rope }).collect(),
        attention_scale: 0.125,
        dtype,
        ..config
    };
    let own = config.clone();
    let model = move || {
        let weights = random_model(&own, 7).expect("a valid configuration");
        LoadedModel { weights, config: own.clone(), ..fixture::model(fixture) }
    };
    (config, model)
}

/// A wide model and a sequence.
fn wide(fixture: &'static str, dtype: TensorType, path: Path) -> Subject<'static> {
    let (_, model) = wide_model(fixture, dtype);
    let kv_type = if dtype == TensorType::F32 { KvType::F32 } else { KvType::Bf16 };
    let open = fixture::open(Setup { kv_type, path: Some(path), ..Setup::default() });
    let label = format!("wide {fixture}, {dtype:?}, {path:?}");
    let tokens = (0..140).map(|i| i * i % 499).collect();
    Subject::new(label, Box::new(model), open, &THREADS, tokens)
}

/// Goal: logits and hidden states are batch invariant for every architecture and every element type
/// of the KV store.
#[test]
fn every_architecture_is_batch_invariant() {
    let paths = Path::supported();
    let path = paths[paths.len() - 1];
    for name in fixture::names() {
        for kv_type in KvType::ALL {
            let open = fixture::open(Setup { kv_type, path: Some(path), ..Setup::default() });
            let label = format!("{kv_type}, {path:?}");
            Subject::fixture(&name, &label, open, &THREADS).check();
        }
    }
}

/// The indices of the last layer with each kind of mixer that keeps something of positions.
fn last_of_each_kind(config: &DecoderConfig) -> BTreeSet<usize> {
    let keeping = config.layers.iter().enumerate().filter(|(_, layer)| layer.keeps_positions());
    let last: BTreeMap<_, _> =
        keeping.map(|(index, layer)| (format!("{:?}", layer.mixers), index)).collect();
    last.into_values().collect()
}

/// Goal: an MLP may follow every kind of layer as a layer of its own. Rows without an output are
/// dropped in the last layer that keeps something of positions, which is not the last one then.
#[test]
fn layers_without_mixers_may_follow_all_others() {
    let mut kinds = BTreeSet::new();
    for name in fixture::names() {
        let LoadedModel { config: whole, .. } = fixture::model(&name);
        if whole.norms != NormPlacement::Input {
            // Such models have no norm that the MLP could have for itself, and are refused.
            continue;
        }
        for index in last_of_each_kind(&whole) {
            let last = whole.layers[index];
            let plain = LayerConfig {
                mixers: &[],
                rope: None,
                sliding_window: None,
                heads: None,
                kv_source: None,
                values_from_keys: false,
                mlp: Some(MlpKind::Dense),
                ..last
            };
            let mlps = [plain, LayerConfig { mlp: last.mlp.or(plain.mlp), ..plain }];
            let layers = [&whole.layers[..=index], &mlps].concat();
            let config = DecoderConfig { layers, ..whole.clone() };
            kinds.extend(last.mixers.iter().map(|mixer| format!("{mixer:?}")));
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
/// in blocks, however a prompt is cut and from wherever it resumes.
#[test]
fn windows_in_states_change_no_bit() {
    for name in ["gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2", "olmo3", "exaone4"] {
        // The longest slice of the checks is the whole sequence.
        let step_tokens = fixture::expected(name).prompt.len() + 30;
        for kv_type in KvType::ALL {
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
/// threads.
#[test]
fn every_instruction_set_is_batch_invariant() {
    for path in Path::supported() {
        for dtype in [TensorType::F32, TensorType::Bf16] {
            wide("qwen3", dtype, path).check();
        }
        wide("qwen2_moe", TensorType::Bf16, path).check();
        wide("qwen3_5", TensorType::Bf16, path).check();
        wide("falcon_h1", TensorType::Bf16, path).check();
        wide("moondream2", TensorType::Bf16, path).check();
        wide("moondream3", TensorType::Bf16, path).check();
    }
    // What these have of their own does not depend on the instruction set.
    let paths = Path::supported();
    for name in ["gemma4", "gemma4_moe"] {
        wide(name, TensorType::Bf16, paths[paths.len() - 1]).check();
    }
}
