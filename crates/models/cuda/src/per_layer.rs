//! Per-layer embeddings (Gemma 4). Each token has a vector for each layer, the sum of an embedding
//! of its own and of a projection of the usual embedding. At the end of a layer, a gate computed
//! from the residual stream is multiplied with this vector, and the projection of the product is
//! added to the residual stream.

use std::f64::consts::FRAC_1_SQRT_2;

use candle_core::{DType, Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::config::{
    GateFunction, PerLayerEmbeddingWeights, PerLayerInput, PerLayerWeights,
};

use crate::OpenError;
use crate::gate::gate;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::norm::Norm;

/// The per-layer embeddings of a model: the fields of [`PerLayerEmbeddingWeights`].
#[derive(Debug)]
pub(crate) struct PerLayerEmbedding {
    /// `[vocab_size, layers * width]` in the compute type.
    embedding: Tensor,
    projection: Linear,
    norm: Norm,
    /// Number of values of a token for each layer.
    width: usize,
}

impl PerLayerEmbedding {
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &PerLayerEmbeddingWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let PerLayerEmbeddingWeights { embedding: embedding_spec, projection, norm } = spec;
        let embedding = loader.dense(embedding_spec)?;
        loader.weights.remove(&embedding_spec.name);
        Ok(Self {
            embedding,
            projection: loader.linear(projection)?,
            width: norm.shape[0],
            norm: Norm::of_parts(config, norm, loader)?,
        })
    }

    /// The per-layer embeddings of `tokens`, `[rows, layers, width]` in f32. `x` are the usual
    /// embeddings, `[rows, hidden_size]`.
    pub(crate) fn of(&self, tokens: &Tensor, x: &Tensor) -> Result<Tensor> {
        let by_layer = |x: Tensor| x.reshape((x.dim(0)?, (), self.width));
        let scale = (x.dim(1)? as f64).powf(-0.5);
        let projected = by_layer(self.projection.forward(x)?.affine(scale, 0.0)?)?;
        let own = self.embedding.index_select(tokens, 0)?.to_dtype(DType::F32)?;
        let own = by_layer(own)?.affine((self.width as f64).sqrt(), 0.0)?;
        (self.norm.apply(&projected)? + own)?.affine(FRAC_1_SQRT_2, 0.0)
    }
}

/// The weights with which one layer applies its per-layer embeddings: the fields of
/// [`PerLayerWeights`].
#[derive(Debug)]
pub(crate) struct PerLayer {
    gate: Linear,
    function: GateFunction,
    projection: Linear,
    norm: Norm,
}

impl PerLayer {
    pub(crate) fn load(
        spec: &PerLayerWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let PerLayerWeights {
            config: PerLayerInput { width: _, gate: function },
            gate,
            projection,
            norm,
        } = spec;
        Ok(Self {
            gate: loader.linear(gate)?,
            function: *function,
            projection: loader.linear(projection)?,
            norm: Norm::load(norm, loader)?,
        })
    }

    /// Adds the result of the layer's per-layer embeddings `values`, `[rows, width]`, to the
    /// residual stream `x`, `[rows, hidden_size]`.
    pub(crate) fn add(&self, x: &Tensor, values: &Tensor) -> Result<Tensor> {
        let gated = gate(&Tensor::cat(&[&self.gate.forward(x)?, values], 1)?, self.function)?;
        x + self.norm.apply(&self.projection.forward(&gated)?)?
    }
}
