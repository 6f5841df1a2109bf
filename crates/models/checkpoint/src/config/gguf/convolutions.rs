//! Parses which layers of a GGUF file have something else than attention, and the taps of short
//! convolutions.

use super::super::architecture::{Description, Mamba};
use super::super::keys::SIZE_MAX;
use super::super::{LayerConfig, MixerKind};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

impl Metadata<'_> {
    /// The number of KV heads. Layers without any have what the architecture has in place of
    /// attention, and are marked.
    pub(super) fn kv_heads(
        &self,
        row: &Description,
        num_heads: usize,
        layers: &mut [LayerConfig],
    ) -> Result<usize, ModelError> {
        let key = "attention.head_count_kv";
        if row.mamba == Some(Mamba::Falcon) {
            let mixers = &[MixerKind::Attention, MixerKind::Mamba2];
            layers.iter_mut().for_each(|layer| layer.mixers = mixers);
            return Ok(self.size(key)?.unwrap_or(num_heads));
        }
        let mixers: &[MixerKind] = match (row.convolutions, row.mamba) {
            (true, _) => &[MixerKind::Convolution],
            (_, Some(_)) => &[MixerKind::Mamba2],
            _ => return Ok(self.size(key)?.unwrap_or(num_heads)),
        };
        let Some((heads, attention)) = self.of_some_layers(key, layers.len())? else {
            return Ok(self.size(key)?.unwrap_or(num_heads));
        };
        for (layer, has_attention) in layers.iter_mut().zip(attention) {
            if !has_attention {
                *layer = LayerConfig { mixers, rope: None, ..*layer };
            }
        }
        if row.mamba == Some(Mamba::Nemotron) {
            self.separate_mlps(layers)?;
        }
        Ok(heads)
    }

    /// Leaves each layer either its mixer or its MLP: the MLP where files have a width of it.
    fn separate_mlps(&self, layers: &mut [LayerConfig]) -> Result<(), ModelError> {
        let key = "feed_forward_length";
        let Some((_, mlps)) = self.of_some_layers(key, layers.len())? else {
            let got = self.value(key).map_or_else(|| "nothing".to_owned(), Value::shown);
            return Err(self.invalid(key, &format!("{} numbers", layers.len()), got));
        };
        for (layer, has_mlp) in layers.iter_mut().zip(mlps) {
            match has_mlp {
                true => layer.mixers = &[],
                false => layer.mlp = None,
            }
        }
        Ok(())
    }

    /// The value that some of `count` layers have under `key`, and which layers these are; `None`
    /// if there is no list, in which other layers have 0. Entries of layers that are not used may
    /// follow.
    pub(super) fn of_some_layers(
        &self,
        key: &str,
        count: usize,
    ) -> Result<Option<(usize, Vec<bool>)>, ModelError> {
        let Some(Value::Integers(list)) = self.value(key) else { return Ok(None) };
        let size = list.iter().copied().find(|size| *size != 0);
        let size = size.and_then(|size| u64::try_from(size).ok()).filter(|n| *n <= SIZE_MAX);
        let one_of = |entry: &i64| *entry == 0 || u64::try_from(*entry).ok() == size;
        let used = count + self.prediction_layers()?;
        let (Some(size), true) = (size, list.len() == used && list.iter().all(one_of)) else {
            let expected = format!("{used} numbers, all 0 or the same");
            let got = self.value(key).map_or_else(String::new, Value::shown);
            return Err(self.invalid(key, &expected, got));
        };
        let has = list[..count].iter().map(|entry| *entry != 0);
        Ok(Some((size as usize, has.collect())))
    }

    /// The number of taps of the convolutions, if there are any.
    pub(super) fn convolution_taps(
        &self,
        layers: &[LayerConfig],
    ) -> Result<Option<usize>, ModelError> {
        let any = layers.iter().any(|layer| layer.has(MixerKind::Convolution));
        any.then(|| self.required_size("shortconv.l_cache")).transpose()
    }
}
