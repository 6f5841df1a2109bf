//! The weights of per-layer embeddings (Gemma 4).

use super::{LinearWeights, NormWeights, TensorRole, TensorSpec, linear, matrix, norm};
use crate::config::{DecoderConfig, PerLayerInput};

/// The weights with which one layer applies its per-layer embeddings. It adds
/// `norm(projection(activation(gate(x)) * input))` to the residual stream `x`.
#[derive(Clone, Debug, PartialEq)]
pub struct PerLayerWeights {
    /// The configuration of per-layer embeddings.
    pub config: PerLayerInput,
    /// The projection to the gate, `[per_layer_input, hidden_size]`.
    pub gate: LinearWeights,
    /// The projection of the product, `[hidden_size, per_layer_input]`.
    pub projection: LinearWeights,
    /// The norm of the result.
    pub norm: NormWeights,
}

/// The per-layer embeddings of all layers. Rows have `per_layer_input` values for each layer. The
/// inputs of layers are `(norm(projection(x) / sqrt(hidden_size)) + embedding * sqrt(
/// per_layer_input)) / sqrt(2)` where `x` are the rows before the first layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerLayerEmbeddingWeights {
    /// The embedding, `[vocab_size, layers * per_layer_input]`.
    pub embedding: TensorSpec,
    /// The projection of the usual embeddings, `[layers * per_layer_input, hidden_size]`.
    pub projection: LinearWeights,
    /// The norm of the part of the projection for each layer, `[per_layer_input]`.
    pub norm: TensorSpec,
}

impl DecoderConfig {
    /// The weights of one layer. `at` returns the full name of a module of the layer.
    pub(super) fn per_layer_weights(
        &self,
        config: PerLayerInput,
        at: &dyn Fn(&str) -> String,
    ) -> PerLayerWeights {
        let PerLayerInput { width, .. } = config;
        PerLayerWeights {
            config,
            gate: linear(&at("per_layer_input_gate"), [width, self.hidden_size], false),
            projection: linear(&at("per_layer_projection"), [self.hidden_size, width], false),
            norm: self.residual_norm(&at("post_per_layer_input_norm")),
        }
    }

    /// The weights of the per-layer embeddings, with `width` values for each layer.
    pub(super) fn per_layer_embedding(&self, width: usize) -> PerLayerEmbeddingWeights {
        let all = self.layers.len() * width;
        let shape = [self.vocab_size, all];
        PerLayerEmbeddingWeights {
            embedding: matrix("model.embed_tokens_per_layer", shape, TensorRole::Table),
            projection: linear("model.per_layer_model_projection", [all, self.hidden_size], false),
            norm: norm("model.per_layer_projection_norm", width),
        }
    }
}
