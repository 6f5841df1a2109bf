//! Moondream. Its `config.json` has keys of its own, see `config/hf/moondream.rs`.

use super::super::Architecture::Moondream2;
use super::super::{Bias, Defaults, Description, Gate, Rotation};
use super::{LLAMA, NO_GGUF};
use crate::config::NormPlacement;

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
    norms: NormPlacement::Parallel,
    gate: Gate::Gelu,
    rotation: Rotation { partial: Some(0.5), ..LLAMA.rotation },
    gguf: NO_GGUF,
    ..LLAMA
};
