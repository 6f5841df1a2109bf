//! The rows of architectures with latent attention.

use super::super::Architecture::*;
use super::super::{
    Bias, Defaults, Description, ExpertLayers, ExpertsDefaults, Gguf, GroupScore, Rotation, Scores,
    Shared,
};
use super::mixtures::MIXTRAL_EXPERTS;
use super::{LLAMA, gguf};
use crate::config::{LatentSizes, MtpInput, RopeScaling};

/// No name in GGUF files, which have the name of DeepSeek-V3.
const NO_NAME: Gguf = Gguf { adjacent: true, normalized_experts: false, ..gguf(&[]) };

pub(super) const DEEPSEEK_V2: Description = Description {
    architecture: DeepseekV2,
    model_types: &["deepseek_v2"],
    classes: &["DeepseekV2ForCausalLM"],
    multimodal: &[],
    defaults: Defaults { vocab_size: 102_400, ..LLAMA.defaults },
    // There is an option for biases of latent attention, which no model uses.
    qkv_bias: Bias::Never,
    output_bias: Bias::Never,
    latent: Some(LatentSizes {
        width: 512,
        rotary_dim: 64,
        key_dim: 128,
        value_dim: 128,
        query_rank: Some(1536),
    }),
    rotation: Rotation { adjacent: true, ..LLAMA.rotation },
    experts: Some(ExpertsDefaults {
        count: 64,
        per_token: 6,
        width: Some(1407),
        shared: Shared::Times(2),
        normalized: Some(false),
        groups: Some(GroupScore::Best),
        scale: Some(1.0),
        layers: ExpertLayers::AllButFirst("first_k_dense_replace", 0),
        ..MIXTRAL_EXPERTS
    }),
    gguf: NO_NAME,
    ..LLAMA
};

pub(super) const V3_EXPERTS: ExpertsDefaults = ExpertsDefaults {
    count: 256,
    per_token: 8,
    width: Some(2048),
    shared: Shared::Times(1),
    normalized: Some(true),
    scores: Scores::Sigmoid,
    groups: Some(GroupScore::BestTwo([8, 4])),
    scale: Some(2.5),
    layers: ExpertLayers::AllButFirst("first_k_dense_replace", 3),
    ..MIXTRAL_EXPERTS
};

pub(super) const DEEPSEEK_V3: Description = Description {
    architecture: DeepseekV3,
    model_types: &["deepseek_v3", "kimi_k2"],
    classes: &["DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM"],
    multimodal: &[],
    defaults: Defaults {
        vocab_size: 129_280,
        hidden_size: 7168,
        intermediate_size: 18_432,
        num_layers: 61,
        num_heads: 128,
        max_positions: 4096,
        eos_token_ids: &[1],
        bos_token_id: Some(0),
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    experts: Some(V3_EXPERTS),
    mtp: Some(MtpInput::TokenFirst),
    gguf: Gguf { names: &["deepseek2"], ..NO_NAME },
    ..DEEPSEEK_V2
};

pub(super) const GLM4_MOE_LITE: Description = Description {
    architecture: Glm4MoeLite,
    model_types: &["glm4_moe_lite"],
    classes: &["Glm4MoeLiteForCausalLM"],
    defaults: Defaults {
        vocab_size: 154_880,
        hidden_size: 2048,
        intermediate_size: 10_240,
        num_layers: 47,
        num_heads: 20,
        max_positions: 202_752,
        rms_norm_eps: 1e-5,
        ..DEEPSEEK_V3.defaults
    },
    latent: Some(LatentSizes {
        width: 512,
        rotary_dim: 64,
        key_dim: 192,
        value_dim: 256,
        query_rank: Some(768),
    }),
    experts: Some(ExpertsDefaults {
        count: 64,
        per_token: 4,
        width: Some(1536),
        groups: Some(GroupScore::BestTwo([1, 1])),
        scale: Some(1.8),
        layers: ExpertLayers::Types(1),
        ..V3_EXPERTS
    }),
    gguf: NO_NAME,
    ..DEEPSEEK_V3
};

pub(super) const YOUTU: Description = Description {
    architecture: Youtu,
    model_types: &["youtu", "youtu_llm"],
    classes: &["YoutuForCausalLM", "YoutuForCausalLM"],
    defaults: Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_layers: 32,
        num_heads: 16,
        max_positions: 131_072,
        tie_word_embeddings: true,
        eos_token_ids: &[128_001],
        bos_token_id: Some(128_000),
        ..LLAMA.defaults
    },
    experts: None,
    gguf: NO_NAME,
    ..DEEPSEEK_V3
};

static MISTRAL4_SCALING: RopeScaling = RopeScaling::Yarn {
    factor: 128.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    truncate: true,
    original_max_position_embeddings: 8192,
    attention_factor: 1.0,
};

pub(super) const MISTRAL4: Description = Description {
    architecture: Mistral4,
    model_types: &["mistral4"],
    classes: &["Mistral4ForCausalLM"],
    multimodal: &["mistral3"],
    defaults: Defaults {
        vocab_size: 131_072,
        hidden_size: 4096,
        intermediate_size: 12_288,
        num_layers: 36,
        max_positions: 1_048_576,
        ..LLAMA.defaults
    },
    latent: Some(LatentSizes {
        width: 256,
        rotary_dim: 64,
        key_dim: 64,
        value_dim: 128,
        query_rank: Some(1024),
    }),
    query_scaling: Some(0.1),
    rotation: Rotation {
        adjacent: true,
        // The share of a query that is rotated. It also follows from the sizes of latent attention.
        partial: Some(1.0),
        scaling: Some(&MISTRAL4_SCALING),
        ..LLAMA.rotation
    },
    experts: Some(ExpertsDefaults {
        count: 128,
        per_token: 4,
        scores: Scores::Softmax,
        groups: Some(GroupScore::BestTwo([1, 1])),
        scale: Some(1.0),
        layers: ExpertLayers::AllButFirst("first_k_dense_replace", 0),
        ..V3_EXPERTS
    }),
    gguf: Gguf { names: &["mistral4"], ..NO_NAME },
    ..DEEPSEEK_V3
};
