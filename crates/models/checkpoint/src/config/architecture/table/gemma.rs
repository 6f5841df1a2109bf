//! The rows of Gemma.

use super::super::Architecture::*;
use super::super::{
    AttentionScale, Bias, Defaults, Description, Dialect, Gate, Gguf, Pattern, Rotation, Softcaps,
    Windows,
};
use super::{LLAMA, gguf};
use crate::config::{GateFunction, NormPlacement, QkNorm};

pub(super) const GEMMA3: Description = Description {
    architecture: Gemma3,
    model_types: &["gemma3_text", "gemma3"],
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    multimodal: &["gemma3"],
    defaults: Defaults {
        vocab_size: 262_208,
        hidden_size: 2304,
        intermediate_size: 9216,
        num_layers: 26,
        num_heads: 8,
        num_kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        tie_word_embeddings: true,
        sliding_window: Some(4096),
        eos_token_ids: &[1],
        bos_token_id: Some(2),
        ..LLAMA.defaults
    },
    mlp_bias: Bias::Never,
    norms: NormPlacement::InputAndOutput,
    norm_offset: 1.0,
    qk_norm: Some(QkNorm::Head),
    gate: Gate::Key("hidden_activation", GateFunction::GeluTanh),
    attention_scale: AttentionScale::QueryScalar,
    softcaps: Some(Softcaps { attention: None, logits: None }),
    scaled_embedding: true,
    rotation: Rotation { theta: 1e6, local_theta: Some(1e4), ..LLAMA.rotation },
    windows: Windows::Some(Pattern::AllButEvery(6)),
    gguf: Gguf { wide_scale_layers: Some(62), ..gguf(&["gemma3"]) },
    ..LLAMA
};

pub(super) const GEMMA2: Description = Description {
    architecture: Gemma2,
    model_types: &["gemma2"],
    classes: &["Gemma2ForCausalLM"],
    multimodal: &[],
    defaults: Defaults { vocab_size: 256_000, max_positions: 8192, ..GEMMA3.defaults },
    qk_norm: None,
    softcaps: Some(Softcaps { attention: Some(50.0), logits: Some(30.0) }),
    rotation: LLAMA.rotation,
    windows: Windows::Some(Pattern::Even),
    gguf: Gguf { wide_scale_layers: Some(46), window: Some(4096), ..gguf(&["gemma2"]) },
    ..GEMMA3
};

pub(super) const GEMMA4: Description = Description {
    architecture: Gemma4,
    model_types: &["gemma4_text", "gemma4"],
    classes: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    multimodal: &["gemma4"],
    defaults: Defaults {
        vocab_size: 262_144,
        num_layers: 30,
        sliding_window: Some(512),
        ..GEMMA3.defaults
    },
    norm_offset: 0.0,
    value_norm: true,
    dialect: Dialect::Gemma4,
    attention_scale: AttentionScale::One,
    rotation: Rotation { proportional: Some(0.25), ..GEMMA3.rotation },
    gguf: gguf(&["gemma4"]),
    ..GEMMA3
};
