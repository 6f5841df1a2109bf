//! The weights of one layer, and its parts that work on rows alone: everything but attention.

use candle_core::{DType, Result, Tensor};
use stolon_model::config::QkNorm;
use stolon_model::{Activation, DecoderConfig};

use crate::OpenError;
use crate::experts::Experts;
use crate::gate::gate;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::rope::Rotations;

/// An RMS norm.
#[derive(Debug)]
pub(crate) struct Norm {
    /// The factor of each element, in f32, with the configuration's offset added.
    weight: Tensor,
    eps: f32,
}

impl Norm {
    pub(crate) fn load(
        config: &DecoderConfig,
        name: &str,
        len: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let weight = loader.vector(&format!("{name}.weight"), len, config.norm_offset)?;
        Ok(Self { weight, eps: config.rms_norm_eps })
    }

    /// Normalizes the last dimension of `x`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: Option<Norm>,
    /// The projections to queries, keys and values, one above the other.
    qkv: Linear,
    o: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    /// The score of the attention sink of each head, `[num_heads]`.
    pub(crate) sinks: Option<Tensor>,
    post_attention_norm: Option<Norm>,
    mlp_norm: Option<Norm>,
    mlp: Mlp,
    post_mlp_norm: Option<Norm>,
}

/// What attention needs of the rows of a step.
#[derive(Debug)]
pub(crate) struct Projected {
    /// `[rows, num_heads, head_dim]` in f32.
    pub(crate) queries: Tensor,
    /// `[rows, num_kv_heads * head_dim]` in f32.
    pub(crate) keys: Tensor,
    /// As the keys, but in the type of the product and perhaps a part of a larger tensor.
    pub(crate) values: Tensor,
}

/// What a layer computes after attention.
#[derive(Debug)]
enum Mlp {
    Dense(GatedMlp),
    Experts(Experts),
}

impl Layer {
    /// Loads layer `index`.
    pub(crate) fn load(
        config: &DecoderConfig,
        index: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let (hidden, qkv) = (config.hidden_size, config.qkv_bias);
        let (queries, keys) =
            (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let names = config.norms.names();
        let mut norm = |part: Option<&str>, len: usize| {
            part.map(|part| Norm::load(config, &at(part), len, loader)).transpose()
        };
        let (input_norm, mlp_norm) =
            (norm(names.attention_input, hidden)?, norm(names.mlp_input, hidden)?);
        let (post_attention_norm, post_mlp_norm) =
            (norm(names.attention_output, hidden)?, norm(names.mlp_output, hidden)?);
        let [q_norm, k_norm] = match config.qk_norm_sizes() {
            Some([q, k]) => {
                [norm(Some("self_attn.q_norm"), q)?, norm(Some("self_attn.k_norm"), k)?]
            }
            None => [None, None],
        };
        let sinks = match config.attention_sinks {
            true => Some(loader.vector(&at("self_attn.sinks"), config.num_heads, 0.0)?),
            false => None,
        };
        Ok(Self {
            input_norm,
            qkv: {
                let names = ["q", "k", "v"].map(|part| at(&format!("self_attn.{part}_proj")));
                let [q, k, v] = names.each_ref();
                loader.stacked(&[(q, queries), (k, keys), (v, keys)], hidden, qkv)?
            },
            o: loader.linear(&at("self_attn.o_proj"), [hidden, queries], config.output_bias)?,
            q_norm,
            k_norm,
            sinks,
            post_attention_norm,
            mlp_norm,
            mlp: match config.experts.filter(|_| config.layers[index].experts) {
                Some(experts) => Mlp::Experts(Experts::load(config, &experts, &at("mlp"), loader)?),
                None => {
                    let width = config.intermediate_size;
                    Mlp::Dense(GatedMlp::load(config, &at("mlp"), width, loader)?)
                }
            },
            post_mlp_norm,
        })
    }

    /// Queries, keys and values of the rows of the residual stream `x`.
    pub(crate) fn project(
        &self,
        config: &DecoderConfig,
        x: &Tensor,
        rotation: Option<&Rotations>,
    ) -> Result<Projected> {
        let normed =
            self.input_norm.as_ref().map_or_else(|| Ok(x.clone()), |norm| norm.apply(x))?;
        let qkv = self.qkv.tiled(&normed)?;
        let (queries, keys) = (config.num_heads, config.num_kv_heads);
        let columns = |first: usize, heads: usize| {
            qkv.narrow(1, first * config.head_dim, heads * config.head_dim)
        };
        let rotated = |first: usize, count: usize, norm: Option<&Norm>| {
            heads(config, columns(first, count)?.to_dtype(DType::F32)?, count, norm, rotation)
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
        add(config, x, self.o.forward(attended)?, self.post_attention_norm.as_ref())
    }

    /// Adds the output of the MLP or the experts to the rows of `x`.
    pub(crate) fn add_mlp(&self, config: &DecoderConfig, x: &Tensor) -> Result<Tensor> {
        let normed = match &self.mlp_norm {
            Some(norm) => norm.apply(x)?,
            None => x.clone(),
        };
        match &self.mlp {
            Mlp::Dense(mlp) => add(config, x, mlp.forward(&normed)?, self.post_mlp_norm.as_ref()),
            Mlp::Experts(experts) => experts.add(x, &normed),
        }
    }
}

/// Divides rows into heads, normalizes and rotates them.
fn heads(
    config: &DecoderConfig,
    x: Tensor,
    count: usize,
    norm: Option<&Norm>,
    rotation: Option<&Rotations>,
) -> Result<Tensor> {
    let split = |x: &Tensor| x.reshape((x.dim(0)?, count, config.head_dim));
    let x = match (norm, config.qk_norm) {
        (Some(norm), Some(QkNorm::Position)) => split(&norm.apply(&x)?)?,
        (Some(norm), _) => norm.apply(&split(&x)?)?,
        (None, _) => split(&x)?,
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
    /// The matrices of `gate` and `up`, one above the other.
    gate_up: Linear,
    down: Linear,
    activation: Activation,
}

impl GatedMlp {
    /// Loads the MLP `module` with `width` inner features.
    pub(crate) fn load(
        config: &DecoderConfig,
        module: &str,
        width: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        let [gate, up] = ["gate", "up"].map(|part| format!("{module}.{part}_proj"));
        Ok(Self {
            gate_up: loader.stacked(&[(&gate, width), (&up, width)], hidden, bias)?,
            down: loader.linear(&format!("{module}.down_proj"), [hidden, width], bias)?,
            activation: config.activation,
        })
    }

    /// `x` is `[rows, hidden_size]`, and so is the result, in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let output = self.down.tile().apply(x, |x| {
            let inner = gate(&self.gate_up.product(x)?, self.activation)?;
            self.down.product(&inner)
        });
        output?.to_dtype(DType::F32)
    }
}
