//! The description of attention.

use super::keys::SIZE_MAX;
use super::tensors::norm;
use super::{DecoderConfig, HEAD_DIM_MAX, TensorSpec};
use crate::error::ModelError;

/// The scope of the norms `q_norm` and `k_norm`, which are applied before the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head. The weights are `[head_dim]`.
    Head,
    /// All heads of a position together (OLMo 2). The weights are `[heads * head_dim]` and
    /// `[kv_heads * head_dim]`.
    Position,
    /// Each head, without weights (Muse Glimmer).
    HeadWithoutWeights,
}

/// A factor of queries that grows with the position, so that attention stays as selective in long
/// contexts (Ministral 3, as in Llama 4): `1 + beta * ln(1 + floor(position / step))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// Growth rate of the factor, above 0.
    pub beta: f32,
    /// Number of positions with the same factor: the context of the original training.
    pub step: usize,
}

impl QueryScaling {
    /// The factor of the queries at `position`. It is 1 at all positions below `step`.
    #[must_use]
    pub fn factor(self, position: usize) -> f32 {
        1.0 + self.beta * ((1 + position / self.step) as f32).ln()
    }

    /// Checks the documented ranges, and that the factor `is_possible` here. `file` is the file's
    /// name in error messages.
    pub(super) fn check(self, file: &str, is_possible: bool) -> Result<(), ModelError> {
        let key = "llama_4_scaling_beta";
        if self.step == 0 || !is_possible {
            let expected = "a context of at least 1, and no norm over all heads";
            return Err(ModelError::key(file, key, expected, self.beta));
        }
        check_positive(file, key, self.beta)
    }
}

/// The source of the keys and values that attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeysAndValues {
    /// The layer computes them, each with a matrix of its own.
    Own,
    /// The layer computes both with the matrix of keys (Gemma 4).
    OneMatrix,
    /// They are the keys and values of the earlier layer with this index (Gemma 4). The layer has
    /// neither projections to keys and values nor memory for them.
    OfLayer(usize),
    /// They are the model's for which this decoder guesses tokens (assistants of Gemma 4): the ones
    /// with this index among those that the model keeps.
    OfModel(usize),
}

/// The attention of a layer. All sizes are at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key heads and of value heads.
    pub kv_heads: usize,
    /// Number of elements of a head, which is even. `heads * head_dim` may differ from the width of
    /// the residual stream.
    pub head_dim: usize,
    /// Number of leading elements of each head that are rotated (Phi-4-mini: three of four), which
    /// is even and at most `head_dim`.
    pub rotary_dim: usize,
    /// Index into [`DecoderConfig::ropes`], or `None` if queries and keys are not rotated.
    pub rope: Option<usize>,
    /// Number of positions that a query attends to, including its own; at least 1. A query at
    /// position `p` reads the keys at `p + 1 - window ..= p`. With `None`, it reads all keys up to
    /// its own.
    pub sliding_window: Option<usize>,
    /// The keys and values that the layer reads.
    pub keys_and_values: KeysAndValues,
    /// Whether `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// Whether `o_proj` has a bias.
    pub output_bias: bool,
    /// Whether the output is multiplied by the sigmoid of a gate (Qwen3-Next). The gate is another
    /// projection of the input, with the same shape as the projection to queries.
    pub output_gate: bool,
    /// The norms of queries and keys; `None` if there are none.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head of the values is normalized, by an RMS norm without weights (Gemma 4).
    pub value_norm: bool,
    /// Whether attention is selective (Moondream 3). Queries and values are multiplied by factors
    /// that depend on the token and on its position, before the rotary embedding. The factor of a
    /// head is `tanh(w * gelu(x)) + sigmoid(alpha * ln(position + 1)) + 0.5`, where `x` is the
    /// concatenation of a token's queries, keys and values. Selective attention has as many key
    /// heads as query heads, and no norms, gates or other factors of queries.
    pub selective: bool,
    /// Whether each head has an attention sink: a learned score that is part of the softmax like
    /// the score of one more position, which has no value.
    pub sinks: bool,
    /// Factor of the scores before the softmax, above 0.
    pub scale: f32,
    /// Scores, after the multiplication by `scale`, are bounded by soft-capping
    /// (`cap * tanh(score / cap)`) with this cap, above 0. `None` for no soft-capping.
    pub softcap: Option<f32>,
    /// The factor of queries that depends on the position; `None` for 1. It must be `None` with
    /// [`QkNorm::Position`].
    pub query_scaling: Option<QueryScaling>,
    /// Factor of the output (Falcon-H1), above 0.
    pub output_factor: f32,
}

impl AttentionConfig {
    /// The weights of the norm `module` of the `heads` heads of queries or of keys, if there are
    /// any.
    pub(super) fn head_norm(&self, module: &str, heads: usize) -> Option<TensorSpec> {
        let size = match self.qk_norm? {
            QkNorm::Head => self.head_dim,
            QkNorm::Position => heads * self.head_dim,
            QkNorm::HeadWithoutWeights => return None,
        };
        Some(norm(module, size))
    }

    /// Whether the layer computes its own keys and values.
    #[must_use]
    pub fn has_own_kv(&self) -> bool {
        !matches!(self.keys_and_values, KeysAndValues::OfLayer(_) | KeysAndValues::OfModel(_))
    }

    /// Makes the last `shared` of the layers read the keys and values of earlier layers. Each reads
    /// the last layer before them that also has, or also does not have, a sliding window. Returns
    /// `None` if there is no such layer.
    pub(super) fn share_kv<'a>(
        shared: usize,
        layers: impl Iterator<Item = &'a mut Self>,
    ) -> Option<()> {
        let mut layers: Vec<&mut Self> = layers.collect();
        let first = layers.len().checked_sub(shared)?;
        let (own, others) = layers.split_at_mut(first);
        for layer in others {
            let is_local = layer.sliding_window.is_some();
            let source = own.iter().rposition(|own| own.sliding_window.is_some() == is_local)?;
            // This also overrides `OneMatrix`, because the layer has no projection to values in any
            // case.
            layer.keys_and_values = KeysAndValues::OfLayer(source);
        }
        Some(())
    }

    /// Checks the documented ranges. `keys` are the names of the keys of the number of KV heads and
    /// of the length of a head. `file` is the file's name in error messages.
    pub(super) fn check(
        &self,
        file: &str,
        [kv_heads_key, dim_key]: [&str; 2],
    ) -> Result<(), ModelError> {
        let heads_key = "num_attention_heads";
        let sizes =
            [(heads_key, self.heads), (kv_heads_key, self.kv_heads), (dim_key, self.head_dim)];
        for (key, size) in sizes {
            if size == 0 || size as u64 > SIZE_MAX {
                return Err(ModelError::key(file, key, format!("1 to {SIZE_MAX}"), size));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {}", self.heads);
            return Err(ModelError::key(file, kv_heads_key, expected, self.kv_heads));
        }
        check_head_dim(file, dim_key, self.heads, self.head_dim)?;
        let rotary_dim = self.rotary_dim;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > self.head_dim {
            let expected = format!("an even number from 2 to {}", self.head_dim);
            return Err(ModelError::key(file, "rotary_dim", expected, rotary_dim));
        }
        for (key, number) in [
            ("attention_scale", self.scale),
            ("attn_logit_softcapping", self.softcap.unwrap_or(1.0)),
            ("attention_out_multiplier", self.output_factor),
        ] {
            check_positive(file, key, number)?;
        }
        if let Some(scaling) = self.query_scaling {
            scaling.check(file, self.qk_norm != Some(QkNorm::Position))?;
        }
        if self.sliding_window == Some(0) {
            return Err(ModelError::key(file, "sliding_window", "at least 1", 0));
        }
        if self.output_gate && self.keys_and_values != KeysAndValues::Own {
            let expected = "layers with projections of their own to keys and values";
            return Err(ModelError::unsupported(file, "attn_output_gate", expected, true));
        }
        self.check_selective(file)
    }

    /// Checks that selective attention is not combined with features that it does not support.
    fn check_selective(&self, file: &str) -> Result<(), ModelError> {
        let is_computed = self.kv_heads == self.heads
            && self.keys_and_values == KeysAndValues::Own
            && self.qk_norm.is_none()
            && !self.value_norm
            && !self.output_gate
            && self.query_scaling.is_none();
        if is_computed || !self.selective {
            return Ok(());
        }
        let expected = "attention without norms and gates, and as many key heads as query heads";
        Err(ModelError::unsupported(file, "tau_attn", expected, true))
    }
}

/// Checks the length `dim` of a head, and the total length of all `heads` heads. `key` is the name
/// of the key of the length, and `file` the file's name in error messages.
pub(super) fn check_head_dim(
    file: &str,
    key: &str,
    heads: usize,
    dim: usize,
) -> Result<(), ModelError> {
    if !dim.is_multiple_of(2) || !(1..=HEAD_DIM_MAX).contains(&dim) {
        let expected = format!("an even number of at most {HEAD_DIM_MAX}");
        return Err(ModelError::key(file, key, expected, dim));
    }
    if heads.saturating_mul(dim) as u64 > SIZE_MAX {
        let expected = format!("at most {SIZE_MAX} with this head_dim");
        return Err(ModelError::key(file, "num_attention_heads", expected, heads));
    }
    Ok(())
}

/// Checks that `number` is finite and above 0.
pub(super) fn check_positive(file: &str, key: &str, number: f32) -> Result<(), ModelError> {
    match number.is_finite() && number > 0.0 {
        true => Ok(()),
        false => Err(ModelError::key(file, key, "a finite number above 0", number)),
    }
}

impl DecoderConfig {
    /// The attention of the first layer that has any. Latent attention does not count.
    #[must_use]
    pub fn attention(&self) -> Option<&AttentionConfig> {
        self.layers.iter().find_map(|layer| layer.attention())
    }

    /// Number of leading elements of each head that the rotary embedding `rope` rotates. `rope` is
    /// an index into [`ropes`](Self::ropes). If no layer uses it, this is the number of the first
    /// layer with attention; `None` if there is no such layer.
    #[must_use]
    pub fn rope_dim(&self, rope: usize) -> Option<usize> {
        let dims = || self.mixers().filter_map(|mixer| mixer.rotation());
        let own = dims().find(|(own, _)| *own == Some(rope));
        own.or_else(|| dims().next()).map(|(_, dim)| dim)
    }

    /// Checks the attention of layer `index`, and that it is compatible with the other layers.
    pub(super) fn check_attention(
        &self,
        file: &str,
        index: usize,
        attention: &AttentionConfig,
    ) -> Result<(), ModelError> {
        // The usual keys describe the layers with a window, if there are any.
        let all = || self.layers.iter().filter_map(|layer| layer.attention());
        let local = all().find(|other| other.sliding_window.is_some());
        let sizes = |attention: &AttentionConfig| (attention.kv_heads, attention.head_dim);
        let is_usual = local.is_none_or(|local| sizes(local) == sizes(attention));
        let keys = match is_usual {
            true => ["num_key_value_heads", "head_dim"],
            false => ["num_global_key_value_heads", "global_head_dim"],
        };
        attention.check(file, keys)?;
        let other = attention.rope.and_then(|rope| self.rope_dim(rope));
        if let Some(other) = other.filter(|other| *other != attention.rotary_dim) {
            let expected = format!("{other}, as in other layers");
            let got = attention.head_dim;
            return Err(ModelError::unsupported(file, "global_head_dim", &expected, got));
        }
        let KeysAndValues::OfLayer(source) = attention.keys_and_values else { return Ok(()) };
        let before = self.layers[..index].get(source).and_then(|layer| layer.attention());
        let is_possible = before.is_some_and(|before| {
            before.has_own_kv()
                && before.rope == attention.rope
                && sizes(before) == sizes(attention)
        });
        if is_possible {
            return Ok(());
        }
        let expected = "layers that share the keys and values of an earlier layer of the same kind";
        Err(ModelError::unsupported(file, "num_kv_shared_layers", expected, source))
    }
}
