//! The rows of architectures whose attention rotates adjacent elements of heads.

use super::super::Architecture::*;
use super::super::{Bias, Defaults, Description, Gguf, Rotation};
use super::{LLAMA, gguf};
use crate::config::NormPlacement;

pub(super) const GLM4: Description = Description {
    architecture: Glm4,
    model_types: &["glm4"],
    classes: &["Glm4ForCausalLM"],
    defaults: Defaults {
        vocab_size: 151_552,
        intermediate_size: 13_696,
        num_layers: 40,
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_positions: 131_072,
        rms_norm_eps: 1.5625e-7,
        eos_token_ids: &[151_329, 151_336, 151_338],
        bos_token_id: None,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Key("attention_bias", true),
    output_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norms: NormPlacement::InputAndOutputOfGlm,
    rotation: Rotation { partial: Some(0.5), adjacent: true, ..LLAMA.rotation },
    gguf: Gguf { fused_mlp: true, adjacent: true, ..gguf(&["glm4"]) },
    ..LLAMA
};

pub(super) const ERNIE45: Description = Description {
    architecture: Ernie45,
    model_types: &["ernie4_5"],
    classes: &["Ernie4_5ForCausalLM"],
    defaults: Defaults {
        vocab_size: 103_424,
        hidden_size: 1024,
        intermediate_size: 3072,
        num_layers: 18,
        num_heads: 16,
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_positions: 131_072,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: true,
        ..LLAMA.defaults
    },
    qkv_bias: Bias::Key("use_bias", false),
    output_bias: Bias::Key("use_bias", false),
    mlp_bias: Bias::Key("use_bias", false),
    rotation: Rotation { theta: 5e5, adjacent: true, ..LLAMA.rotation },
    gguf: Gguf { adjacent: true, ..gguf(&["ernie4_5"]) },
    ..LLAMA
};
