//! The weights of one layer, and the computations on single rows: everything but attention.

use candle_core::{DType, Result, Tensor};
use stolon_checkpoint::config::{
    AttentionWeights, FeedForwardWeights, LayerWeights, MixerWeights, MlpInputs, MlpWeights,
    NormWeights, NormsConfig, QkvWeights, TensorSpec,
};
use stolon_checkpoint::{DecoderConfig, GateFunction};

use crate::OpenError;
use crate::experts::Experts;
use crate::gate::gate;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::rope::Rotations;
use crate::supported::{Supported, refused};

/// An RMS norm.
#[derive(Debug)]
pub(crate) struct Norm {
    /// The factor of each element, in f32, with the configuration's offset added.
    weight: Tensor,
    eps: f32,
}

impl Norm {
    pub(crate) fn load(
        spec: &NormWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        // Models with norms of other kinds, which may have biases, are refused with the
        // configuration.
        let NormWeights { kind: _, eps, offset, weight, bias: _ } = spec;
        Ok(Self { weight: loader.vector(weight, *offset)?, eps: *eps })
    }

    /// The norm of queries or keys with the weights `spec`, if there is one.
    fn of_heads(
        config: &DecoderConfig,
        spec: Option<&TensorSpec>,
        loader: &mut Loader,
    ) -> std::result::Result<Option<Self>, OpenError> {
        let NormsConfig { eps, offset, .. } = config.norms;
        let weight = spec.map(|spec| loader.vector(spec, offset)).transpose()?;
        Ok(weight.map(|weight| Self { weight, eps }))
    }

    /// Normalizes the last dimension of `x`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

/// The weights of one layer: the fields of [`LayerWeights`], which describes them.
#[derive(Debug)]
pub(crate) struct Layer {
    attention_input_norm: Option<Norm>,
    /// The projections to queries, keys and values, concatenated along the output features.
    qkv: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    pub(crate) sinks: Option<Tensor>,
    output: Linear,
    attention_output_norm: Option<Norm>,
    mlp_input_norm: Option<Norm>,
    mlp: Mlp,
    mlp_output_norm: Option<Norm>,
}

/// The inputs of attention for the rows of a step.
#[derive(Debug)]
pub(crate) struct Projected {
    /// `[rows, num_heads, head_dim]` in f32.
    pub(crate) queries: Tensor,
    /// `[rows, num_kv_heads * head_dim]` in f32.
    pub(crate) keys: Tensor,
    /// Like `keys`, but in the type of the product, and possibly a view of a larger tensor.
    pub(crate) values: Tensor,
}

/// The second half of a layer, after attention.
#[derive(Debug)]
enum Mlp {
    Dense(GatedMlp),
    Experts(Box<Experts>),
}

impl Layer {
    /// Loads the tensors that `spec` describes.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &LayerWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let LayerWeights {
            attention_input_norm,
            mixers,
            attention_output_norm,
            mlp_input_norm,
            mlp,
            mlp_output_norm,
            // Models that have these are refused with the configuration.
            per_layer: _,
            scale: _,
        } = spec;
        let [MixerWeights::Attention(attention)] = &mixers[..] else {
            return Err(refused(config));
        };
        let AttentionWeights {
            config: _,
            qkv,
            q_norm,
            k_norm,
            sinks,
            // Not supported.
            selective: _,
            gate: _,
            output,
        } = attention;
        let q_norm = Norm::of_heads(config, q_norm.as_ref(), loader)?;
        let k_norm = Norm::of_heads(config, k_norm.as_ref(), loader)?;
        let mut norm =
            |spec: Option<&NormWeights>| spec.map(|spec| Norm::load(spec, loader)).transpose();
        let QkvWeights { name: _, query, key: Some(key), value: Some(value) } = qkv else {
            return Err(refused(config));
        };
        Ok(Self {
            attention_input_norm: norm(attention_input_norm.as_ref())?,
            attention_output_norm: norm(attention_output_norm.as_ref())?,
            mlp_input_norm: norm(mlp_input_norm.as_ref())?,
            mlp_output_norm: norm(mlp_output_norm.as_ref())?,
            q_norm,
            k_norm,
            qkv: loader.stacked(&[query, key, value].map(Clone::clone))?,
            sinks: sinks.as_ref().map(|sinks| loader.vector(sinks, 0.0)).transpose()?,
            output: loader.linear(output)?,
            mlp: match mlp {
                Some(FeedForwardWeights::Dense(mlp)) => {
                    Mlp::Dense(GatedMlp::load(config, mlp, loader)?)
                }
                Some(FeedForwardWeights::Experts(experts)) => {
                    Mlp::Experts(Box::new(Experts::load(config, experts, loader)?))
                }
                Some(FeedForwardWeights::DenseAndExperts(_)) | None => return Err(refused(config)),
            },
        })
    }

    /// Queries, keys and values of the rows of the residual stream `x`.
    pub(crate) fn project(
        &self,
        supported: &Supported,
        x: &Tensor,
        rotation: Option<&Rotations>,
    ) -> Result<Projected> {
        let normed = self
            .attention_input_norm
            .as_ref()
            .map_or_else(|| Ok(x.clone()), |norm| norm.apply(x))?;
        let qkv = self.qkv.tiled(&normed)?;
        let Supported { heads: queries, kv_heads: keys, head_dim, norms_positions, .. } =
            *supported;
        let columns =
            |first: usize, heads: usize| qkv.narrow(1, first * head_dim, heads * head_dim);
        let rotated = |first: usize, count: usize, norm: Option<&Norm>| {
            let norm = norm.map(|norm| (norm, norms_positions));
            heads(columns(first, count)?.to_dtype(DType::F32)?, [count, head_dim], norm, rotation)
        };
        Ok(Projected {
            queries: rotated(0, queries, self.q_norm.as_ref())?,
            keys: rotated(queries, keys, self.k_norm.as_ref())?.flatten_from(1)?,
            values: columns(queries + keys, keys)?,
        })
    }

    /// Adds the projection of attention's output, `[rows, num_heads * head_dim]`, to `x`.
    pub(crate) fn add_attention(
        &self,
        config: &DecoderConfig,
        x: &Tensor,
        attended: &Tensor,
    ) -> Result<Tensor> {
        add(config, x, self.output.forward(attended)?, self.attention_output_norm.as_ref())
    }

    /// Adds the output of the MLP or the experts to the rows of `x`.
    pub(crate) fn add_mlp(&self, config: &DecoderConfig, x: &Tensor) -> Result<Tensor> {
        let normed = match &self.mlp_input_norm {
            Some(norm) => norm.apply(x)?,
            None => x.clone(),
        };
        match &self.mlp {
            Mlp::Dense(mlp) => add(config, x, mlp.forward(&normed)?, self.mlp_output_norm.as_ref()),
            Mlp::Experts(experts) => experts.add(x, &normed),
        }
    }
}

/// Divides rows into heads, normalizes and rotates them. `norm` is the norm, and whether it
/// normalizes all heads of a row together instead of each head.
fn heads(
    x: Tensor,
    [count, head_dim]: [usize; 2],
    norm: Option<(&Norm, bool)>,
    rotation: Option<&Rotations>,
) -> Result<Tensor> {
    let split = |x: &Tensor| x.reshape((x.dim(0)?, count, head_dim));
    let x = match norm {
        Some((norm, true)) => split(&norm.apply(&x)?)?,
        Some((norm, false)) => norm.apply(&split(&x)?)?,
        None => split(&x)?,
    };
    rotation.map_or(Ok(x.clone()), |rotation| rotation.apply(&x))
}

/// Adds the output of attention or the MLP to the residual stream.
fn add(config: &DecoderConfig, x: &Tensor, output: Tensor, norm: Option<&Norm>) -> Result<Tensor> {
    let output = norm.map_or(Ok(output.clone()), |norm| norm.apply(&output))?;
    match config.residual_scale {
        Some(scale) => x + output.affine(f64::from(scale), 0.0)?,
        None => x + output,
    }
}

/// An MLP with a gate: `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    /// The matrices of `gate` and `up`, concatenated along the output features.
    gate_up: Linear,
    down: Linear,
    /// The function of the gate.
    function: GateFunction,
}

impl GatedMlp {
    /// Loads an MLP.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &MlpWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        // Models with output factors are refused with the configuration.
        let MlpWeights { inputs, down, output_factor: _ } = spec;
        let MlpInputs::Gated(gate_up, gate) = inputs else { return Err(refused(config)) };
        Ok(Self {
            gate_up: loader.stacked(&gate_up.parts)?,
            down: loader.linear(down)?,
            function: gate.function,
        })
    }

    /// Computes the MLP of `x`, `[rows, hidden_size]`. Returns `[rows, hidden_size]` in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // The rows are padded to whole tiles once, for both products.
        let tiles = self.down.tile().fill(x)?;
        let inner = gate(&self.gate_up.tiles(&tiles)?, self.function)?;
        self.down.tiles(&inner)?.narrow(0, 0, x.dim(0)?)?.to_dtype(DType::F32)
    }
}
