//! The description of multi-head latent attention.

use super::attention::{check_head_dim, check_positive};
use super::keys::SIZE_MAX;
use super::{
    AttentionConfig, DecoderConfig, KeysAndValues, LayerConfig, MixerConfig, QueryScaling,
};
use crate::error::ModelError;

/// Maximum number of heads of all layers together. Known models have up to 8,000. Each head has
/// matrices of its own, so this bounds the memory that is allocated for a malformed file.
const HEADS_TOTAL_MAX: usize = 1 << 16;

/// Multi-head latent attention (DeepSeek-V2). The keys and values of all heads are projections of
/// one vector per position, the latent vector. Only this vector is kept, together with a rotated
/// part of the keys that all heads share, so a position takes a fraction of the memory.
///
/// Attention does not compute these keys and values. Instead, each head's query is multiplied with
/// the transposed projection to the head's keys, attention is computed between the results and the
/// latent vectors, and the weighted average of the latent vectors is projected to the head's value.
/// There is therefore one key head, whose keys, `[rotary_dim + width]`, are also the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// Number of query heads.
    pub heads: usize,
    /// The sizes of the vectors.
    pub sizes: LatentSizes,
    /// Index into [`DecoderConfig::ropes`], or `None` if queries and keys are not rotated.
    pub rope: Option<usize>,
    /// Factor of the scores before the softmax, above 0.
    pub scale: f32,
    /// The factor of queries that depends on the position; `None` for 1.
    pub query_scaling: Option<QueryScaling>,
}

/// The sizes of the vectors of latent attention. All are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentSizes {
    /// Number of elements of a latent vector.
    pub width: usize,
    /// Number of elements of each query, and of the shared part of the keys, that are rotated;
    /// even.
    pub rotary_dim: usize,
    /// Number of elements of each head's queries and keys that are not rotated.
    pub key_dim: usize,
    /// Number of elements of each head's values.
    pub value_dim: usize,
    /// Number of elements of the normalized low-rank vector from which queries are projected;
    /// `None` if they are projected directly from the residual stream.
    pub query_rank: Option<usize>,
}

impl LatentSizes {
    /// Number of elements of a query.
    #[must_use]
    pub fn query_dim(&self) -> usize {
        self.rotary_dim + self.key_dim
    }

    /// Number of elements that are kept of a position: the rotated part of its keys, followed by
    /// the latent vector.
    #[must_use]
    pub fn kept_dim(&self) -> usize {
        self.rotary_dim + self.width
    }
}

impl LatentConfig {
    /// Replaces the attention of all layers with latent attention of these sizes. The attention
    /// must have no features that latent attention does not support.
    pub(super) fn replace_attention(
        file: &str,
        sizes: LatentSizes,
        layers: &mut [LayerConfig],
    ) -> Result<(), ModelError> {
        for mixer in layers.iter_mut().flat_map(|layer| &mut layer.mixers) {
            if let MixerConfig::Attention(attention) = mixer {
                *mixer = MixerConfig::Latent(Self::of(file, sizes, attention)?);
            }
        }
        Ok(())
    }

    /// Latent attention with these sizes, and with the heads, the rotary embedding and the factors
    /// of `attention`, which must have no other features. `file` is the file's name in error
    /// messages.
    fn of(file: &str, sizes: LatentSizes, attention: &AttentionConfig) -> Result<Self, ModelError> {
        let AttentionConfig {
            heads,
            // These follow from `sizes`, because there is one key head.
            kv_heads: _,
            head_dim: _,
            rotary_dim: _,
            rope,
            sliding_window,
            keys_and_values,
            qkv_bias,
            output_bias,
            output_gate,
            qk_norm,
            value_norm,
            selective,
            sinks,
            scale,
            softcap,
            query_scaling,
            output_factor,
        } = *attention;
        let is_plain = sliding_window.is_none()
            && keys_and_values == KeysAndValues::Own
            && qk_norm.is_none()
            && softcap.is_none()
            && output_factor == 1.0
            && !(qkv_bias || output_bias || output_gate || value_norm || selective || sinks);
        if is_plain {
            return Ok(Self { heads, sizes, rope, scale, query_scaling });
        }
        let expected = "latent attention in all layers with attention, without biases, gates, \
                        windows or sinks";
        Err(ModelError::unsupported(file, "kv_lora_rank", expected, sizes.width))
    }

    /// Checks the documented ranges. `layers` is the number of layers, and `file` the file's name
    /// in error messages.
    pub(super) fn check(&self, file: &str, layers: usize) -> Result<(), ModelError> {
        let heads_max = HEADS_TOTAL_MAX / layers.max(1);
        if !(1..=heads_max).contains(&self.heads) {
            let expected = format!("1 to {heads_max}");
            return Err(ModelError::key(file, "num_attention_heads", expected, self.heads));
        }
        let LatentSizes { width, rotary_dim, key_dim, value_dim, query_rank } = self.sizes;
        for (key, size) in [
            ("kv_lora_rank", width),
            ("qk_rope_head_dim", rotary_dim),
            ("qk_nope_head_dim", key_dim),
            ("v_head_dim", value_dim),
            ("q_lora_rank", query_rank.unwrap_or(1)),
        ] {
            let most = SIZE_MAX / (2 * self.heads) as u64;
            if size == 0 || size as u64 > most {
                return Err(ModelError::key(file, key, format!("1 to {most}"), size));
            }
        }
        if !rotary_dim.is_multiple_of(2) {
            return Err(ModelError::key(file, "qk_rope_head_dim", "an even number", rotary_dim));
        }
        check_head_dim(file, "head_dim", self.heads, self.sizes.kept_dim())?;
        check_positive(file, "attention_scale", self.scale)?;
        self.query_scaling.map_or(Ok(()), |scaling| scaling.check(file, true))
    }
}

impl DecoderConfig {
    /// The first latent attention, if there is one.
    #[must_use]
    pub fn latent(&self) -> Option<&LatentConfig> {
        self.mixers().find_map(|mixer| match mixer {
            MixerConfig::Latent(latent) => Some(latent),
            _ => None,
        })
    }
}
