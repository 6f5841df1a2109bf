//! The weights of one layer.

use super::experts::Experts;
use super::linear::{Linear, Loader};
use crate::config::DecoderConfig;
use crate::error::ModelError;

/// The weights of one layer. Norm weights are `[hidden_size]` unless stated otherwise.
#[derive(Debug)]
pub(super) struct Layer {
    /// Norm before attention.
    pub(super) input_norm: Option<Vec<f32>>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    /// Norm of queries; its size depends on [`DecoderConfig::qk_norm`].
    pub(super) q_norm: Option<Vec<f32>>,
    /// Norm of keys; its size depends on [`DecoderConfig::qk_norm`].
    pub(super) k_norm: Option<Vec<f32>>,
    /// The score of the attention sink of each head, `[num_heads]`.
    pub(super) sinks: Option<Vec<f32>>,
    /// Norm of attention's output before it is added to the residual stream.
    pub(super) post_attention_norm: Option<Vec<f32>>,
    /// Norm before the MLP.
    pub(super) mlp_norm: Option<Vec<f32>>,
    pub(super) mlp: Mlp,
    /// Norm of the MLP's output before it is added to the residual stream.
    pub(super) post_mlp_norm: Option<Vec<f32>>,
}

/// What a layer computes after attention.
#[derive(Debug)]
pub(super) enum Mlp {
    /// One MLP for all rows.
    Dense(GatedMlp),
    /// A mixture of experts.
    Experts(Experts),
}

/// An MLP with a gate: `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub(super) struct GatedMlp {
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

impl GatedMlp {
    /// Loads the MLP `module` with `width` inner features.
    pub(super) fn load(
        config: &DecoderConfig,
        module: &str,
        width: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        let mut linear = |part, shape| loader.linear(&format!("{module}.{part}"), shape, bias);
        Ok(Self {
            gate: linear("gate_proj", [width, hidden])?,
            up: linear("up_proj", [width, hidden])?,
            down: linear("down_proj", [hidden, width])?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.gate.bytes() + self.up.bytes() + self.down.bytes()
    }
}

impl Layer {
    /// Loads layer `index`.
    pub(super) fn load(
        config: &DecoderConfig,
        index: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let hidden = config.hidden_size;
        let queries = config.num_heads * config.head_dim;
        let keys = config.num_kv_heads * config.head_dim;
        let qkv = config.qkv_bias;
        let norms = config.norms.names();
        let mut norm = |part: Option<&str>, len| {
            part.map(|part| loader.vector(&name(&format!("{part}.weight")), len)).transpose()
        };
        let input_norm = norm(norms.attention_input, hidden)?;
        let mlp_norm = norm(norms.mlp_input, hidden)?;
        let post_attention_norm = norm(norms.attention_output, hidden)?;
        let post_mlp_norm = norm(norms.mlp_output, hidden)?;
        let (q_norm, k_norm) = match config.qk_norm_sizes() {
            Some([q, k]) => {
                (norm(Some("self_attn.q_norm"), q)?, norm(Some("self_attn.k_norm"), k)?)
            }
            None => (None, None),
        };
        let sinks = match config.attention_sinks {
            true => Some(loader.vector(&name("self_attn.sinks"), config.num_heads)?),
            false => None,
        };
        let mut linear = |part: &str, shape, bias| loader.linear(&name(part), shape, bias);
        Ok(Self {
            input_norm,
            q: linear("self_attn.q_proj", [queries, hidden], qkv)?,
            k: linear("self_attn.k_proj", [keys, hidden], qkv)?,
            v: linear("self_attn.v_proj", [keys, hidden], qkv)?,
            o: linear("self_attn.o_proj", [hidden, queries], config.output_bias)?,
            q_norm,
            k_norm,
            sinks,
            post_attention_norm,
            mlp_norm,
            mlp: match config.experts.filter(|_| config.layers[index].experts) {
                Some(experts) => {
                    Mlp::Experts(Experts::load(config, &experts, &name("mlp"), loader)?)
                }
                None => {
                    let width = config.intermediate_size;
                    Mlp::Dense(GatedMlp::load(config, &name("mlp"), width, loader)?)
                }
            },
            post_mlp_norm,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let attention = [&self.q, &self.k, &self.v, &self.o];
        let mlp = match &self.mlp {
            Mlp::Dense(mlp) => mlp.bytes(),
            Mlp::Experts(experts) => experts.bytes(),
        };
        attention.iter().map(|linear| linear.bytes()).sum::<usize>() + mlp
    }
}
