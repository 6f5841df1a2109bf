//! The description of multi-head latent attention.

use super::keys::SIZE_MAX;
use super::{DecoderConfig, LayerConfig, MixerKind};
use crate::error::ModelError;

/// Maximum number of heads of all layers together. Each head has matrices of its own, so this bounds
/// what is allocated for a malformed file. Known models have up to 8,000.
const HEADS_TOTAL_MAX: usize = 1 << 16;

/// Multi-head latent attention (DeepSeek-V2). The keys and values of all heads are projections of
/// one vector per position, the latent vector. Only this vector is kept, and next to it a rotated
/// part of the keys that all heads share, so that a position takes a fraction of the memory.
///
/// Attention does not compute these keys and values: a head's query is multiplied with the
/// transposed projection to its keys, and compared with the latent vectors; their average is
/// projected to the value. So there is one key head, whose keys, `[rotary_dim + width]`, are also
/// the values, and [`DecoderConfig::head_dim`] is their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Number of elements of a latent vector.
    pub width: usize,
    /// Number of elements of each query, and of the shared part of the keys, that are rotated. It
    /// is even.
    pub rotary_dim: usize,
    /// Number of elements of each head's queries and keys that are not rotated.
    pub key_dim: usize,
    /// Number of elements of each head's values.
    pub value_dim: usize,
    /// Number of elements of the normalized vector that queries are projections of; `None` if they
    /// are projections of the residual stream.
    pub query_rank: Option<usize>,
}

impl LatentConfig {
    /// Gives all layers latent attention if there is any. Some may get another mixer later.
    pub(super) fn mark_layers(latent: Option<Self>, layers: &mut [LayerConfig]) {
        if latent.is_some() {
            layers.iter_mut().for_each(|layer| layer.mixers = &[MixerKind::Latent]);
        }
    }

    /// Number of elements of a query.
    #[must_use]
    pub fn query_dim(&self) -> usize {
        self.rotary_dim + self.key_dim
    }

    /// Number of elements that are kept of a position: the rotated part of its keys, then the
    /// latent vector.
    #[must_use]
    pub fn kept_dim(&self) -> usize {
        self.rotary_dim + self.width
    }
}

impl DecoderConfig {
    /// Checks the sizes of latent attention, and that nothing else is asked of it. `file` is the
    /// file's name in error messages.
    pub(super) fn check_latent(&self, file: &str) -> Result<(), ModelError> {
        let layers = self.layers.iter().filter(|layer| layer.has(MixerKind::Latent));
        let Some(latent) = self.latent else {
            let missing = || ModelError::key(file, "kv_lora_rank", "1 or more", "nothing");
            return if layers.count() > 0 { Err(missing()) } else { Ok(()) };
        };
        let heads_max = HEADS_TOTAL_MAX / self.layers.len().max(1);
        if !(1..=heads_max).contains(&self.num_heads) {
            let expected = format!("1 to {heads_max}");
            return Err(ModelError::key(file, "num_attention_heads", expected, self.num_heads));
        }
        for (key, size) in [
            ("kv_lora_rank", latent.width),
            ("qk_rope_head_dim", latent.rotary_dim),
            ("qk_nope_head_dim", latent.key_dim),
            ("v_head_dim", latent.value_dim),
            ("q_lora_rank", latent.query_rank.unwrap_or(1)),
        ] {
            let most = SIZE_MAX / (2 * self.num_heads) as u64;
            if size == 0 || size as u64 > most {
                return Err(ModelError::key(file, key, format!("1 to {most}"), size));
            }
        }
        if !latent.rotary_dim.is_multiple_of(2) {
            let got = latent.rotary_dim;
            return Err(ModelError::key(file, "qk_rope_head_dim", "an even number", got));
        }
        let is_alone = !self.has(MixerKind::Attention)
            && layers.clone().all(|layer| layer.heads.is_none() && layer.sliding_window.is_none());
        let is_plain = self.head_dim == latent.kept_dim()
            && self.num_kv_heads == 1
            && self.rotary_dim() == latent.rotary_dim
            && self.qk_norm.is_none()
            && !(self.qkv_bias || self.output_bias || self.output_gate || self.value_norm)
            && !self.attention_sinks;
        if is_alone && is_plain {
            return Ok(());
        }
        let expected = "latent attention in all layers with attention, without biases, gates, \
                        windows or sinks";
        Err(ModelError::unsupported(file, "kv_lora_rank", expected, latent.width))
    }
}
