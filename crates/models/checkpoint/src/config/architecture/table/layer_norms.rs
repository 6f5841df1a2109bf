//! The rows of architectures with layer norms.

use super::super::Architecture::*;
use super::super::{Bias, Defaults, Description, Dialect, Gate, Gguf, Pattern, Rotation, Windows};
use super::{LLAMA, NO_GGUF, gguf};
use crate::config::{GateFunction, NormKind, NormPlacement};

pub(super) const STARCODER2: Description = Description {
    architecture: StarCoder2,
    model_types: &["starcoder2"],
    classes: &["Starcoder2ForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 49_152,
        hidden_size: 3072,
        intermediate_size: 12_288,
        num_layers: 30,
        num_heads: 24,
        num_kv_heads: Some(2),
        max_positions: 4096,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        eos_token_ids: &[50_256],
        bos_token_id: Some(50_256),
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Key("use_bias", true),
    output_bias: Bias::Key("use_bias", true),
    mlp_bias: Bias::Key("use_bias", true),
    mlp_gate: false,
    norm_kind: NormKind::Layer,
    norm_eps: "norm_epsilon",
    gate: Gate::Key("hidden_act", GateFunction::GeluTanh),
    windows: Windows::Everywhere,
    gguf: gguf(&["starcoder2"]),
    ..LLAMA
};

pub(super) const COHERE2: Description = Description {
    architecture: Cohere2,
    model_types: &["cohere2"],
    classes: &["Cohere2ForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 256_000,
        hidden_size: 8192,
        intermediate_size: 22_528,
        num_layers: 40,
        num_heads: 64,
        max_positions: 8192,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        sliding_window: Some(4096),
        eos_token_ids: &[255_001],
        bos_token_id: Some(5),
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    norms: NormPlacement::Parallel,
    norm_kind: NormKind::LayerWithoutBias,
    norm_eps: "layer_norm_eps",
    logit_scale: Some(("logit_scale", 0.0625)),
    rotation: Rotation { adjacent: true, local_only: true, ..LLAMA.rotation },
    windows: Windows::Some(Pattern::AllButEvery(4)),
    gguf: Gguf { adjacent: true, ..gguf(&["cohere2"]) },
    ..LLAMA
};

/// Its `config.json` has keys of its own, see `config/hf/moondream.rs`.
pub(super) const MOONDREAM2: Description = Description {
    architecture: Moondream2,
    model_types: &["moondream1"],
    classes: &["HfMoondream"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 51_200,
        hidden_size: 2048,
        intermediate_size: 8192,
        num_layers: 24,
        num_heads: 32,
        num_kv_heads: Some(32),
        head_dim: None,
        max_positions: 2048,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
        sliding_window: None,
        eos_token_ids: &[0],
        bos_token_id: Some(0),
    },
    qkv_bias: Bias::Always,
    output_bias: Bias::Always,
    mlp_bias: Bias::Always,
    mlp_gate: false,
    norms: NormPlacement::Parallel,
    norm_kind: NormKind::Layer,
    dialect: Dialect::Moondream,
    gate: Gate::Key("hidden_activation", GateFunction::GeluTanh),
    rotation: Rotation { partial: Some(0.5), ..LLAMA.rotation },
    gguf: NO_GGUF,
    ..LLAMA
};

/// Moondream 2 with the object `moe` and the key `tau_attn`, whose defaults are different.
pub(super) const MOONDREAM3: Description = Description {
    architecture: Moondream3,
    model_types: &["moondream3"],
    classes: &["Moondream3ForCausalLM"],
    defaults: Defaults { max_positions: 32_768, ..MOONDREAM2.defaults },
    rotation: Rotation { theta: 1.5e6, ..MOONDREAM2.rotation },
    ..MOONDREAM2
};
