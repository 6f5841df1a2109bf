//! Parses the layers with Gated DeltaNet or Kimi Delta Attention of a GGUF file.

use super::super::architecture::Description;
use super::super::{DeltaNetConfig, DeltaNetKind, LayerConfig, MixerConfig};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

/// Every layer whose number is a multiple of this one has attention, unless the keys say otherwise.
const ATTENTION_INTERVAL: usize = 4;

impl Metadata<'_> {
    /// Number of layers for multi-token prediction. They follow the layers of the model.
    pub(super) fn prediction_layers(&self) -> Result<usize, ModelError> {
        let key = "nextn_predict_layers";
        match self.value(key) {
            Some(value) if value.as_u64() != Some(0) => self.required_size(key),
            _ => Ok(0),
        }
    }

    /// Replaces the attention of layers that have Gated DeltaNet or Kimi Delta Attention instead.
    pub(super) fn delta_net(
        &self,
        row: &Description,
        layers: &mut [LayerConfig],
    ) -> Result<(), ModelError> {
        let Some(DeltaNetConfig { kind, .. }) = row.delta_net else { return Ok(()) };
        let recurrent = match kind {
            DeltaNetKind::Gated => self.recurrent_layers(layers.len())?,
            DeltaNetKind::Kimi { .. } => self.layers_without_keys(layers.len())?,
        };
        if !recurrent.contains(&true) {
            return Ok(());
        }
        let config = self.delta_net_sizes(row, kind)?;
        for (layer, is_recurrent) in layers.iter_mut().zip(recurrent) {
            if is_recurrent {
                layer.mixers = vec![MixerConfig::DeltaNet(config)];
            }
        }
        Ok(())
    }

    /// The sizes of the layers with Gated DeltaNet or Kimi Delta Attention.
    fn delta_net_sizes(
        &self,
        row: &Description,
        kind: DeltaNetKind,
    ) -> Result<DeltaNetConfig, ModelError> {
        let taps = self.required_size("ssm.conv_kernel")?;
        if let DeltaNetKind::Kimi { .. } = kind {
            let heads = self.required_size("attention.head_count")?;
            let dim = self.required_size("kda.head_dim")?;
            return Ok(DeltaNetConfig::kimi(heads, dim, taps, false));
        }
        let (value_heads, value_dim) = self.recurrent_heads()?;
        Ok(DeltaNetConfig {
            kind,
            key_heads: self.required_size("ssm.group_count")?,
            value_heads,
            key_dim: self.required_size("ssm.state_size")?,
            value_dim,
            taps,
            grouped: !row.gguf.tiled_heads,
            log_rates: false,
        })
    }

    /// For each of the first `count` layers, whether it has no key heads and therefore has Kimi
    /// Delta Attention.
    fn layers_without_keys(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let key = "attention.head_count_kv";
        match self.of_some_layers(key, count)? {
            Some((_, has)) => Ok(has.into_iter().map(|has| !has).collect()),
            None => Err(self.invalid(key, &format!("{count} numbers, 0 or 1"), "others")),
        }
    }

    /// For each of the first `count` layers, whether it is recurrent.
    fn recurrent_layers(&self, count: usize) -> Result<Vec<bool>, ModelError> {
        let key = "attention.recurrent_layers";
        if let Some(value) = self.value(key) {
            return match value {
                Value::Bools(layers) if layers.len() >= count => Ok(layers[..count].to_vec()),
                _ => Err(self.invalid(key, &format!("{count} booleans"), value.shown())),
            };
        }
        let interval = self.size("full_attention_interval")?.unwrap_or(ATTENTION_INTERVAL);
        Ok((1..=count).map(|number| !number.is_multiple_of(interval)).collect())
    }
}
