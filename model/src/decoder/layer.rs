//! One layer's weights.

use super::linear::{Linear, load_vector};
use crate::config::DecoderConfig;
use crate::error::ModelError;
use crate::kernels::Path;
use crate::weights::Weights;

/// One layer. Norm weights are `[hidden_size]` but for those of heads.
#[derive(Debug)]
pub(super) struct Layer {
    /// Before attention.
    pub(super) input_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    /// Of each head's query, `[head_dim]`.
    pub(super) q_norm: Option<Vec<f32>>,
    /// Of each head's key, `[head_dim]`.
    pub(super) k_norm: Option<Vec<f32>>,
    /// Of attention's output before it is added (Gemma).
    pub(super) post_attention_norm: Option<Vec<f32>>,
    /// Before the MLP.
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    /// Of the MLP's output before it is added (Gemma).
    pub(super) post_mlp_norm: Option<Vec<f32>>,
}

impl Layer {
    /// Loads layer `index`.
    pub(super) fn load(
        config: &DecoderConfig,
        index: usize,
        weights: &Weights,
        path: Path,
    ) -> Result<Self, ModelError> {
        let prefix = format!("model.layers.{index}");
        let linear = |name: &str, shape, bias| {
            Linear::load(weights, &format!("{prefix}.{name}_proj"), shape, bias, path)
        };
        let norm = |name: &str, len| load_vector(weights, &format!("{prefix}.{name}.weight"), len);
        let optional = |wanted: bool, name: &str, len| match wanted {
            true => norm(name, len).map(Some),
            false => Ok(None),
        };
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        let sandwich = config.sandwich_norms;
        let mlp_norm =
            if sandwich { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            q: linear("self_attn.q", [queries, hidden], config.qkv_bias)?,
            k: linear("self_attn.k", [keys, hidden], config.qkv_bias)?,
            v: linear("self_attn.v", [keys, hidden], config.qkv_bias)?,
            o: linear("self_attn.o", [hidden, queries], config.output_bias)?,
            q_norm: optional(config.qk_norm, "self_attn.q_norm", config.head_dim)?,
            k_norm: optional(config.qk_norm, "self_attn.k_norm", config.head_dim)?,
            post_attention_norm: optional(sandwich, "post_attention_layernorm", hidden)?,
            mlp_norm: norm(mlp_norm, hidden)?,
            gate: linear("mlp.gate", [inner, hidden], config.mlp_bias)?,
            up: linear("mlp.up", [inner, hidden], config.mlp_bias)?,
            down: linear("mlp.down", [hidden, inner], config.mlp_bias)?,
            post_mlp_norm: optional(sandwich, "post_feedforward_layernorm", hidden)?,
        })
    }

    /// Bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let all = [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down];
        all.iter().map(|linear| linear.bytes()).sum()
    }
}
