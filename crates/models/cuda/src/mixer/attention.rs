//! Attention: `output(gate * softmax(scale * q k^T) v)`, where queries, keys and values are
//! projections of the layer's input. Most layers have no gate.

use candle_core::{DType, Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{
    AttentionConfig, AttentionWeights, KeysAndValues, QkNorm, QkvWeights, TensorSpec,
};

use super::Projected;
use super::selective::Selective;
use crate::OpenError;
use crate::attention::AttentionArgs;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::norm::Norm;
use crate::pass::Pass;
use crate::rope::Rotations;

/// The weights of a layer's attention: the fields of [`AttentionWeights`].
#[derive(Debug)]
pub(super) struct Attention {
    config: AttentionConfig,
    /// The projections to queries, keys, values and gates, as far as the layer has them,
    /// concatenated along the output features in this order.
    qkv: Linear,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
    /// The norm of each head of the values.
    v_norm: Option<Norm>,
    selective: Option<Selective>,
    sinks: Option<Tensor>,
    /// Index in the KV store of the keys and values that the layer reads.
    kept: usize,
}

impl Attention {
    /// Loads the attention of a layer, except for the projection of its output.
    pub(super) fn load(
        config: &DecoderConfig,
        spec: &AttentionWeights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let AttentionWeights {
            config: own,
            qkv,
            q_norm,
            k_norm,
            sinks,
            selective,
            gate,
            // Loaded by the mixer.
            output: _,
        } = spec;
        // Every field is named, so that a new one is a compile error until it is computed.
        let AttentionConfig {
            heads: _,
            kv_heads: _,
            head_dim: dim,
            // Used by `RopeTable`.
            rotary_dim: _,
            rope: _,
            sliding_window: _,
            keys_and_values: _,
            // Determine which weights exist.
            qkv_bias: _,
            output_bias: _,
            sinks: _,
            selective: _,
            output_gate: _,
            qk_norm,
            value_norm,
            scale: _,
            softcap: _,
            query_scaling: _,
            // Used by the mixer.
            output_factor: _,
        } = *own;
        let QkvWeights { name: _, query, key, value } = qkv;
        let eps = config.norms.eps;
        let norm = |spec: Option<&TensorSpec>, loader: &mut Loader| {
            if qk_norm == Some(QkNorm::HeadWithoutWeights) {
                return Ok(Some(Norm::uniform(dim, 1.0, eps, &loader.device)?));
            }
            spec.map(|spec| Norm::of_parts(config, spec, loader)).transpose()
        };
        let parts = [Some(query), key.as_ref(), value.as_ref(), gate.as_ref()];
        let parts: Vec<_> = parts.into_iter().flatten().cloned().collect();
        let selective = selective.as_ref().map(|spec| Selective::load(spec, loader)).transpose()?;
        Ok(Self {
            config: *own,
            q_norm: norm(q_norm.as_ref(), loader)?,
            k_norm: norm(k_norm.as_ref(), loader)?,
            v_norm: match value_norm {
                true => Some(Norm::uniform(dim, 1.0, eps, &loader.device)?),
                false => None,
            },
            qkv: loader.stacked(&parts)?,
            selective,
            sinks: sinks.as_ref().map(|sinks| loader.vector(sinks, 0.0)).transpose()?,
            kept,
        })
    }

    /// Computes queries, keys, values and gates. Keys and values are written to the KV store.
    pub(super) fn project(&self, normed: &Tensor, pass: &Pass<'_>) -> Result<Projected> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let updates = pass.updates(Site::Inputs, normed)?;
        let qkv = updates.add(0, self.qkv.tiled(normed)?)?;
        let mut first = 0;
        let mut columns = |heads: usize| {
            let columns = qkv.narrow(1, first * head_dim, heads * head_dim);
            first += heads;
            columns
        };
        let mut queries = columns(heads)?.to_dtype(DType::F32)?;
        let mut kept = match self.config.keys_and_values {
            KeysAndValues::Own => Some((columns(kv_heads)?, columns(kv_heads)?)),
            KeysAndValues::OneMatrix => {
                let keys = columns(kv_heads)?;
                Some((keys.clone(), keys))
            }
            // Draft heads, which read those of their model, run on CPUs only.
            KeysAndValues::OfLayer(_) | KeysAndValues::OfModel(_) => None,
        };
        let gates = match self.config.output_gate {
            true => Some(columns(heads)?.to_dtype(DType::F32)?),
            false => None,
        };
        if let (Some(selective), Some((keys, values))) = (&self.selective, &kept) {
            let qkv = [&queries, keys, values];
            let (scaled, values) = selective.scale(qkv, head_dim, &pass.positions)?;
            (queries, kept) = (scaled, Some((keys.clone(), values)));
        }
        let rotation = pass.rotation(self.config.rope);
        if let Some((keys, values)) = kept {
            let keys = keys.to_dtype(DType::F32)?;
            let keys = self.heads(keys, kv_heads, self.k_norm.as_ref(), rotation)?;
            let values = match &self.v_norm {
                None => values,
                Some(norm) => {
                    let values = values.to_dtype(DType::F32)?;
                    norm.apply(&values.reshape(((), kv_heads, head_dim))?)?.flatten_from(1)?
                }
            };
            let layer = pass.kv().layer(self.kept);
            pass.write(&layer.keys, &keys.flatten_from(1)?)?;
            pass.write(&layer.values, &values)?;
        }
        let queries = self.heads(queries, heads, self.q_norm.as_ref(), rotation)?;
        let queries = pass.scale_queries(queries, self.config.query_scaling)?;
        Ok(Projected::Queries { queries, gates })
    }

    /// Divides rows in f32 into heads, normalizes and rotates them: `[rows, count, head_dim]`.
    fn heads(
        &self,
        x: Tensor,
        count: usize,
        norm: Option<&Norm>,
        rotation: Option<&Rotations>,
    ) -> Result<Tensor> {
        let split = |x: &Tensor| x.reshape((x.dim(0)?, count, self.config.head_dim));
        let x = match (norm, self.config.qk_norm) {
            (Some(norm), Some(QkNorm::Position)) => split(&norm.apply(&x)?)?,
            (Some(norm), Some(QkNorm::Head | QkNorm::HeadWithoutWeights) | None) => {
                norm.apply(&split(&x)?)?
            }
            (None, _) => split(&x)?,
        };
        rotation.map_or(Ok(x.clone()), |rotation| rotation.apply(&x))
    }

    /// Computes attention and multiplies it by its gates: `[rows, heads * head_dim]` in f32.
    pub(super) fn attend(
        &self,
        queries: &Tensor,
        gates: Option<&Tensor>,
        pass: &Pass<'_>,
    ) -> Result<Tensor> {
        let AttentionConfig { heads, scale, softcap, sliding_window, .. } = self.config;
        let args = AttentionArgs {
            kv: pass.kv().layer(self.kept),
            heads,
            scale,
            softcap,
            window: sliding_window,
            sinks: self.sinks.as_ref(),
        };
        let attended = pass.plans.of(self.kept).attend(queries, &args)?;
        match gates {
            Some(gates) => attended * candle_nn::ops::sigmoid(gates)?,
            None => Ok(attended),
        }
    }
}
