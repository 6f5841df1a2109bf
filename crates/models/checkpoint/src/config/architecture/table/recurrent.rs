//! The rows of architectures with recurrent layers.

use super::super::Architecture::*;
use super::super::{
    Bias, Defaults, Description, ExpertLayers, ExpertsDefaults, Gate, Gguf, GroupScore, Mamba,
    Rotation, Scores, Shared, Windows,
};
use super::deepseek::{DEEPSEEK_V3, V3_EXPERTS};
use super::mixtures::MIXTRAL_EXPERTS;
use super::{LLAMA, QWEN3, gguf};
use crate::config::{DeltaNetConfig, DeltaNetKind, LatentSizes, MtpInput};

const DELTA_NET: DeltaNetConfig = DeltaNetConfig {
    kind: DeltaNetKind::Gated,
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    taps: 4,
    grouped: true,
    log_rates: true,
};

pub(super) const QWEN35: Description = Description {
    architecture: Qwen35,
    model_types: &["qwen3_5_text", "qwen3_5"],
    classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    multimodal: &["qwen3_5"],
    defaults: Defaults {
        vocab_size: 248_320,
        hidden_size: 4096,
        intermediate_size: 12_288,
        num_layers: 32,
        num_heads: 16,
        num_kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 32_768,
        rms_norm_eps: 1e-6,
        sliding_window: None,
        ..QWEN3.defaults
    },
    output_gate: true,
    norm_offset: 1.0,
    rotation: Rotation { partial: Some(0.25), sections: Some([11, 11, 10]), ..QWEN3.rotation },
    windows: Windows::Nowhere,
    windows_need_flag: false,
    delta_net: Some(DELTA_NET),
    mtp: Some(MtpInput::TokenFirst),
    gguf: Gguf { tiled_heads: true, ..gguf(&["qwen35"]) },
    ..QWEN3
};

pub(super) const QWEN35_MOE: Description = Description {
    architecture: Qwen35Moe,
    model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    multimodal: &["qwen3_5_moe"],
    defaults: Defaults {
        hidden_size: 2048,
        num_layers: 40,
        num_kv_heads: Some(2),
        ..QWEN35.defaults
    },
    experts: Some(ExpertsDefaults {
        count: 256,
        per_token: 8,
        width: Some(512),
        shared: Shared::Gated(512),
        ..MIXTRAL_EXPERTS
    }),
    gguf: Gguf { tiled_heads: true, ..gguf(&["qwen35moe"]) },
    ..QWEN35
};

pub(super) const QWEN3_NEXT: Description = Description {
    architecture: Qwen3Next,
    model_types: &["qwen3_next"],
    classes: &["Qwen3NextForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 5632,
        num_layers: 48,
        num_kv_heads: Some(2),
        ..QWEN35.defaults
    },
    experts: Some(ExpertsDefaults {
        count: 512,
        per_token: 10,
        width: Some(512),
        shared: Shared::Gated(512),
        normalized: Some(true),
        ..MIXTRAL_EXPERTS
    }),
    rotation: Rotation { sections: None, ..QWEN35.rotation },
    gguf: gguf(&["qwen3next"]),
    ..QWEN35
};

pub(super) const KIMI_LINEAR: Description = Description {
    architecture: KimiLinear,
    model_types: &["kimi_linear"],
    classes: &["KimiLinearForCausalLM"],
    defaults: Defaults {
        vocab_size: 163_840,
        hidden_size: 2304,
        intermediate_size: 9216,
        num_layers: 27,
        max_positions: 1_048_576,
        rms_norm_eps: 1e-5,
        eos_token_ids: &[163_586],
        bos_token_id: Some(163_584),
        ..LLAMA.defaults
    },
    latent: Some(LatentSizes {
        width: 512,
        rotary_dim: 64,
        key_dim: 128,
        value_dim: 128,
        query_rank: None,
    }),
    // The pairs are not rotated, but this order puts the part that other models rotate first.
    rotation: Rotation { adjacent: true, nowhere: true, ..LLAMA.rotation },
    experts: Some(ExpertsDefaults {
        width: Some(1024),
        groups: Some(GroupScore::BestTwo([1, 1])),
        scale: Some(2.446),
        layers: ExpertLayers::Types(1),
        ..V3_EXPERTS
    }),
    delta_net: Some(DeltaNetConfig::kimi(32, 128, 4, true)),
    gguf: Gguf { adjacent: true, ..gguf(&["kimi-linear"]) },
    ..DEEPSEEK_V3
};

pub(super) const NEMOTRON_H: Description = Description {
    architecture: NemotronH,
    model_types: &["nemotron_h"],
    classes: &["NemotronHForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 131_072,
        intermediate_size: 21_504,
        num_kv_heads: Some(8),
        head_dim: Some(128),
        max_positions: 4096,
        rms_norm_eps: 1e-5,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Key("attention_bias", false),
    output_bias: Bias::Key("attention_bias", false),
    mlp_gate: false,
    gate: Gate::SquaredRelu,
    norm_eps: "layer_norm_epsilon",
    rotation: Rotation { nowhere: true, ..LLAMA.rotation },
    experts: Some(ExpertsDefaults {
        count: 8,
        per_token: 2,
        width: Some(7688),
        shared: Shared::Width(7688),
        normalized: Some(true),
        scores: Scores::Sigmoid,
        scale: Some(1.0),
        layers: ExpertLayers::Kinds,
        ..MIXTRAL_EXPERTS
    }),
    mamba: Some(Mamba::Nemotron),
    gguf: gguf(&["nemotron_h", "nemotron_h_moe"]),
    ..LLAMA
};

pub(super) const FALCON_H1: Description = Description {
    architecture: FalconH1,
    model_types: &["falcon_h1"],
    classes: &["FalconH1ForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 128_000,
        intermediate_size: 14_336,
        num_kv_heads: Some(8),
        max_positions: 8192,
        rms_norm_eps: 1e-5,
        ..LLAMA.defaults
    },
    multipliers: true,
    logit_scale: Some(("lm_head_multiplier", 1.0)),
    mamba: Some(Mamba::Falcon),
    gguf: gguf(&["falcon-h1"]),
    ..LLAMA
};
