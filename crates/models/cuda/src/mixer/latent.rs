//! Multi-head latent attention. The KV store keeps one key head per position, which consists of the
//! rotated part of the keys and the normalized latent vector. The latent vector is also the value
//! ([`LatentConfig`]).
//!
//! The key matrix of each head is applied to its query instead of the latent vectors. After
//! attention, the average of the latent vectors is projected to the value of each head.

use candle_core::{Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{LatentConfig, LatentSizes, LatentWeights};

use super::Projected;
use crate::OpenError;
use crate::attention::AttentionArgs;
use crate::linear::{HeadLinear, Linear};
use crate::loader::Loader;
use crate::norm::Norm;
use crate::pass::Pass;

/// The weights of a layer's latent attention: the fields of [`LatentWeights`].
#[derive(Debug)]
pub(super) struct Latent {
    config: LatentConfig,
    /// The projections to queries or their low-rank vectors, and to key heads, concatenated.
    inputs: Linear,
    /// The norm of low-rank vectors, and their projection to queries.
    query: Option<(Norm, Linear)>,
    latent_norm: Norm,
    /// For each head, the transposed projection of latent vectors to keys.
    keys: HeadLinear,
    /// For each head, the projection of latent vectors to values.
    values: HeadLinear,
    /// Index of the layer in the KV store.
    kept: usize,
}

impl Latent {
    /// Loads the latent attention of a layer, except for the projection of its output.
    pub(super) fn load(
        config: &DecoderConfig,
        spec: &LatentWeights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let LatentWeights {
            config: own,
            query_down,
            query,
            latent,
            latent_norm,
            keys,
            values,
            name: _,
            // Loaded by the mixer.
            output: _,
        } = spec;
        let first = query_down.as_ref().map_or(query, |(down, _)| down);
        Ok(Self {
            config: *own,
            inputs: loader.stacked(&[first.clone(), latent.clone()])?,
            query: match query_down {
                Some((_, norm)) => {
                    Some((Norm::of_parts(config, norm, loader)?, loader.linear(query)?))
                }
                None => None,
            },
            latent_norm: Norm::of_parts(config, latent_norm, loader)?,
            keys: loader.of_heads(keys)?,
            values: loader.of_heads(values)?,
            kept,
        })
    }

    /// Computes the absorbed queries, `[rows, heads, kept_dim]`. The key heads are written to the
    /// KV store.
    pub(super) fn project(&self, normed: &Tensor, pass: &Pass<'_>) -> Result<Projected> {
        let LatentConfig { heads, sizes, rope, query_scaling, .. } = self.config;
        let LatentSizes { width, rotary_dim, key_dim, .. } = sizes;
        let rotation = pass.rotation(rope);
        let rotate = |x: Tensor| match rotation {
            Some(rotation) => rotation.apply(&x),
            None => Ok(x),
        };
        let updates = pass.updates(Site::Inputs, normed)?;
        let projected = updates.add(0, self.inputs.forward(normed)?)?;
        let kept_first = projected.dim(1)? - sizes.kept_dim();
        let kept = projected.narrow(1, kept_first, sizes.kept_dim())?;
        let kept = rotate(kept.contiguous()?.unsqueeze(1)?)?.squeeze(1)?;
        let latent = self.latent_norm.apply(&kept.narrow(1, rotary_dim, width)?)?;
        let kept = Tensor::cat(&[kept.narrow(1, 0, rotary_dim)?, latent], 1)?;
        pass.write(&pass.kv().layer(self.kept).keys, &kept)?;

        let mut queries = projected.narrow(1, 0, kept_first)?.contiguous()?;
        if let Some((norm, up)) = &self.query {
            let normed = norm.apply(&queries)?;
            queries = pass.updates(Site::Queries, &normed)?.add(0, up.forward(&normed)?)?;
        }
        let queries = rotate(queries.reshape(((), heads, sizes.query_dim()))?)?;
        let queries = pass.scale_queries(queries, query_scaling)?;
        let own = queries.narrow(2, rotary_dim, key_dim)?;
        let absorbed = pass.updates(Site::Keys, &own)?.add(0, self.keys.forward(&own)?)?;
        let queries = Tensor::cat(&[queries.narrow(2, 0, rotary_dim)?, absorbed], 2)?;
        Ok(Projected::Queries { queries, gates: None })
    }

    /// Computes latent attention, `[rows, heads * value_dim]` in f32.
    pub(super) fn attend(&self, queries: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let LatentConfig { heads, sizes, scale, .. } = self.config;
        let LatentSizes { width, rotary_dim, .. } = sizes;
        let args = AttentionArgs {
            kv: pass.kv().layer(self.kept),
            heads,
            scale,
            softcap: None,
            window: None,
            sinks: None,
        };
        let attended = pass.plans.of(self.kept).attend(queries, &args)?;
        let attended = attended.reshape(((), heads, sizes.kept_dim()))?;
        let average = attended.narrow(2, rotary_dim, width)?;
        let updates = pass.updates(Site::Values, &average)?;
        updates.add(0, self.values.forward(&average)?)?.flatten_from(1)
    }
}
