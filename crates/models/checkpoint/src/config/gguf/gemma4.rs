//! Parses the keys of single layers in GGUF files of Gemma 4.

use super::super::architecture::{Description, Dialect};
use super::super::keys::SIZE_MAX;
use super::super::{
    AttentionConfig, FeedForwardConfig, KeysAndValues, LayerConfig, MlpConfig, PerLayerInput,
};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

impl Metadata<'_> {
    /// Number of elements of a head in layers with a sliding window. `head_dim` is the number in
    /// the other layers.
    pub(super) fn local_head_dim(
        &self,
        row: &Description,
        head_dim: usize,
    ) -> Result<usize, ModelError> {
        if row.dialect != Dialect::Gemma4 {
            return Ok(head_dim);
        }
        let local = self.size("attention.key_length_swa")?.unwrap_or(head_dim);
        for key in ["attention.value_length_swa", "rope.dimension_count_swa"] {
            if let Some(got) = self.size(key)?.filter(|got| *got != local) {
                return Err(self.unsupported(key, &local.to_string(), got));
            }
        }
        Ok(local)
    }

    /// Sets the sizes of layers and the source of their keys and values. Heads have
    /// `global_head_dim` elements in layers without a sliding window, and `head_dim` in the others.
    pub(super) fn gemma4_layers(
        &self,
        [global_head_dim, head_dim]: [usize; 2],
        num_heads: usize,
        layers: &mut [LayerConfig],
    ) -> Result<(), ModelError> {
        let counts = self.of_layers("attention.head_count_kv", Some(num_heads), layers.len())?;
        let widths = self.of_layers("feed_forward_length", None, layers.len())?;
        for (layer, width) in layers.iter_mut().zip(widths) {
            if let Some(FeedForwardConfig::Dense(mlp)) = &mut layer.mlp {
                mlp.width = width;
            }
        }
        let attentions = layers.iter_mut().filter_map(LayerConfig::attention_mut);
        for (index, attention) in attentions.enumerate() {
            let is_local = attention.sliding_window.is_some();
            attention.kv_heads = counts[index];
            attention.head_dim = if is_local { head_dim } else { global_head_dim };
            attention.rotary_dim = attention.head_dim;
            if !self.header.tensors.contains_key(&format!("blk.{index}.attn_v.weight")) {
                attention.keys_and_values = KeysAndValues::OneMatrix;
            }
        }
        let key = "attention.shared_kv_layers";
        let shared = self.count(key)?;
        let attentions = layers.iter_mut().filter_map(LayerConfig::attention_mut);
        AttentionConfig::share_kv(shared, attentions).ok_or_else(|| {
            self.invalid(key, "fewer than all layers, after layers of each kind", shared)
        })
    }

    /// The per-layer embeddings, whose gates have the activation function of `mlp`; `None` if there
    /// are none.
    pub(super) fn per_layer_input(
        &self,
        mlp: &MlpConfig,
    ) -> Result<Option<PerLayerInput>, ModelError> {
        Ok(PerLayerInput::of(self.count("embedding_length_per_layer_input")?, mlp))
    }

    /// A size that may be 0. It is 0 if the key is missing.
    fn count(&self, key: &str) -> Result<usize, ModelError> {
        match self.value(key).and_then(Value::as_u64) {
            Some(0) => Ok(0),
            _ => Ok(self.size(key)?.unwrap_or(0)),
        }
    }

    /// The size of each of `count` layers, at least one. The value is a list, or one size for all
    /// layers, which is `default` if the key is missing and there is a default.
    pub(super) fn of_layers(
        &self,
        key: &str,
        default: Option<usize>,
        count: usize,
    ) -> Result<Vec<usize>, ModelError> {
        let Some(Value::Integers(list)) = self.value(key) else {
            let size = match default {
                Some(default) => self.size(key)?.unwrap_or(default),
                None => self.required_size(key)?,
            };
            return Ok(vec![size; count]);
        };
        let size = |entry: &i64| {
            usize::try_from(*entry).ok().filter(|size| (1..=SIZE_MAX).contains(&(*size as u64)))
        };
        let sizes: Option<Vec<_>> = list.iter().map(size).collect();
        sizes.filter(|sizes| sizes.len() == count).ok_or_else(|| {
            let got = self.value(key).map_or_else(String::new, Value::shown);
            self.invalid(key, &format!("{count} integers from 1 to {SIZE_MAX}"), got)
        })
    }
}
