//! The rows of architectures with mixtures of experts.

use super::super::Architecture::*;
use super::super::{
    Bias, Defaults, Description, ExpertLayers, ExpertsDefaults, Gate, Gguf, Pattern, Rotation,
    Scores, Shared, Windows,
};
use super::{LFM2, LLAMA, MISTRAL, QWEN2, QWEN3, gguf};
use crate::config::{MtpInput, QkNorm, RopeScaling};

/// The scaling of gpt-oss.
static GPT_OSS_SCALING: RopeScaling = RopeScaling::Yarn {
    factor: 32.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    truncate: false,
    original_max_position_embeddings: 4096,
    // 0.1 ln(factor) + 1
    attention_factor: 1.346_573_6,
};

pub(super) const MIXTRAL_EXPERTS: ExpertsDefaults = ExpertsDefaults {
    count: 8,
    per_token: 2,
    width: None,
    shared: Shared::None,
    normalized: None,
    router_bias: false,
    scores: Scores::Softmax,
    groups: None,
    scale: None,
    layers: ExpertLayers::Steps,
};

pub(super) const MIXTRAL: Description = Description {
    architecture: Mixtral,
    model_types: &["mixtral"],
    classes: &["MixtralForCausalLM"],
    multimodal: &[],
    defaults: Defaults { sliding_window: None, rms_norm_eps: 1e-5, ..MISTRAL.defaults },
    rotation: Rotation { theta: 1e6, ..LLAMA.rotation },
    experts: Some(MIXTRAL_EXPERTS),
    ..MISTRAL
};

pub(super) const OLMOE: Description = Description {
    architecture: Olmoe,
    model_types: &["olmoe"],
    classes: &["OlmoeForCausalLM"],
    defaults: Defaults {
        vocab_size: 50_304,
        hidden_size: 2048,
        intermediate_size: 2048,
        num_layers: 16,
        num_heads: 16,
        max_positions: 4096,
        rms_norm_eps: 1e-5,
        eos_token_ids: &[50_279],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    qk_norm: Some(QkNorm::Position),
    experts: Some(ExpertsDefaults {
        count: 64,
        per_token: 8,
        normalized: Some(false),
        ..MIXTRAL_EXPERTS
    }),
    gguf: Gguf { normalized_experts: false, ..gguf(&["olmoe"]) },
    ..LLAMA
};

pub(super) const QWEN2_MOE: Description = Description {
    architecture: Qwen2Moe,
    model_types: &["qwen2_moe"],
    classes: &["Qwen2MoeForCausalLM"],
    defaults: Defaults {
        hidden_size: 2048,
        intermediate_size: 5632,
        num_layers: 24,
        num_heads: 16,
        num_kv_heads: Some(16),
        ..QWEN2.defaults
    },
    qkv_bias: Bias::Key("qkv_bias", true),
    windows: Windows::Some(Pattern::EvenBelow),
    experts: Some(ExpertsDefaults {
        count: 60,
        per_token: 4,
        width: Some(1408),
        shared: Shared::Gated(5632),
        normalized: Some(false),
        ..MIXTRAL_EXPERTS
    }),
    mtp: None,
    gguf: Gguf { normalized_experts: false, ..gguf(&["qwen2moe"]) },
    ..QWEN2
};

pub(super) const QWEN3_MOE: Description = Description {
    architecture: Qwen3Moe,
    model_types: &["qwen3_moe"],
    classes: &["Qwen3MoeForCausalLM"],
    defaults: Defaults {
        hidden_size: 2048,
        intermediate_size: 6144,
        num_layers: 24,
        num_kv_heads: Some(4),
        ..QWEN2.defaults
    },
    windows: Windows::Everywhere,
    experts: Some(ExpertsDefaults {
        count: 128,
        per_token: 8,
        width: Some(768),
        normalized: Some(false),
        ..MIXTRAL_EXPERTS
    }),
    gguf: gguf(&["qwen3moe"]),
    ..QWEN3
};

pub(super) const GPT_OSS: Description = Description {
    architecture: GptOss,
    model_types: &["gpt_oss"],
    classes: &["GptOssForCausalLM"],
    defaults: Defaults {
        vocab_size: 201_088,
        hidden_size: 2880,
        intermediate_size: 2880,
        num_layers: 36,
        num_heads: 64,
        num_kv_heads: Some(8),
        head_dim: Some(64),
        max_positions: 131_072,
        sliding_window: Some(128),
        rms_norm_eps: 1e-5,
        eos_token_ids: &[],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Key("attention_bias", true),
    output_bias: Bias::Key("attention_bias", true),
    mlp_bias: Bias::Always,
    gate: Gate::ClampedSwiglu,
    attention_sinks: true,
    rotation: Rotation { theta: 15e4, scaling: Some(&GPT_OSS_SCALING), ..LLAMA.rotation },
    windows: Windows::Some(Pattern::Even),
    experts: Some(ExpertsDefaults {
        count: 128,
        per_token: 4,
        router_bias: true,
        ..MIXTRAL_EXPERTS
    }),
    gguf: gguf(&["gpt-oss"]),
    ..LLAMA
};

pub(super) const GLM4_MOE: Description = Description {
    architecture: Glm4Moe,
    model_types: &["glm4_moe"],
    classes: &["Glm4MoeForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 151_552,
        intermediate_size: 10_944,
        num_layers: 46,
        num_heads: 96,
        num_kv_heads: Some(8),
        head_dim: Some(128),
        max_positions: 131_072,
        rms_norm_eps: 1e-5,
        eos_token_ids: &[],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    qk_norm: Some(QkNorm::Head),
    qk_norm_needs_flag: true,
    rotation: Rotation { partial: Some(0.5), ..LLAMA.rotation },
    experts: Some(ExpertsDefaults {
        count: 128,
        per_token: 8,
        width: Some(1408),
        shared: Shared::Times(1),
        normalized: Some(true),
        scores: Scores::Sigmoid,
        scale: Some(1.0),
        layers: ExpertLayers::AllButFirst("first_k_dense_replace", 1),
        ..MIXTRAL_EXPERTS
    }),
    mtp: Some(MtpInput::TokenFirst),
    gguf: gguf(&["glm4moe"]),
    ..LLAMA
};

pub(super) const LFM2_MOE: Description = Description {
    architecture: Lfm2Moe,
    model_types: &["lfm2_moe"],
    classes: &["Lfm2MoeForCausalLM"],
    defaults: Defaults { hidden_size: 2048, intermediate_size: 7168, ..LFM2.defaults },
    experts: Some(ExpertsDefaults {
        count: 32,
        per_token: 4,
        width: Some(1792),
        normalized: Some(true),
        scores: Scores::Sigmoid,
        scale: Some(1.0),
        layers: ExpertLayers::AllButFirst("num_dense_layers", 2),
        ..MIXTRAL_EXPERTS
    }),
    gguf: gguf(&["lfm2moe"]),
    ..LFM2
};
