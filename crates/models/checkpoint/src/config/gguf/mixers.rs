//! Parses the mixers of a GGUF file's layers that have something other than attention, or Mamba-2
//! next to it.

use super::super::architecture::{Description, Mamba};
use super::super::keys::SIZE_MAX;
use super::super::{ConvolutionConfig, LayerConfig, MixerConfig};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

impl Metadata<'_> {
    /// The number of KV heads, and for each of `layers` layers whether it has attention. The latter
    /// is `None` if all layers have attention, or if the architecture has no other mixers.
    pub(super) fn kv_heads(
        &self,
        row: &Description,
        num_heads: usize,
        layers: usize,
    ) -> Result<(usize, Option<Vec<bool>>), ModelError> {
        let key = "attention.head_count_kv";
        let replaces_attention = match row.mamba {
            Some(Mamba::Granite | Mamba::Nemotron) => true,
            Some(Mamba::Falcon) => false,
            None => row.convolutions,
        };
        let some = if replaces_attention { self.of_some_layers(key, layers)? } else { None };
        match some {
            Some((heads, attention)) => Ok((heads, Some(attention))),
            None => Ok((self.size(key)?.unwrap_or(num_heads), None)),
        }
    }

    /// Replaces the mixer of the layers without attention, which are the result of
    /// [`Self::kv_heads`], with the architecture's other mixer. In Falcon-H1, adds Mamba-2 next to
    /// the attention of each layer.
    pub(super) fn replace_attention(
        &self,
        row: &Description,
        with_attention: Option<Vec<bool>>,
        layers: &mut [LayerConfig],
    ) -> Result<(), ModelError> {
        if row.mamba == Some(Mamba::Falcon) {
            let mamba2 = MixerConfig::Mamba2(self.mamba2(0)?);
            layers.iter_mut().for_each(|layer| layer.mixers.push(mamba2));
            return Ok(());
        }
        let Some(with_attention) = with_attention else { return Ok(()) };
        for layer in layers.iter_mut().zip(&with_attention).filter(|(_, has)| !**has) {
            layer.0.mixers.clear();
        }
        if row.mamba == Some(Mamba::Nemotron) {
            self.separate_mlps(layers)?;
        }
        // In Nemotron-H, layers with an MLP have no mixer.
        let is_other = |layer: &LayerConfig, has_attention: bool| {
            !has_attention && (row.mamba != Some(Mamba::Nemotron) || layer.mlp.is_none())
        };
        let others = layers.iter_mut().zip(with_attention).enumerate();
        let mut others = others.filter(|(_, (layer, has))| is_other(layer, *has)).peekable();
        let Some((first, _)) = others.peek() else { return Ok(()) };
        let mixer = match row.mamba {
            Some(_) => MixerConfig::Mamba2(self.mamba2(*first)?),
            None => MixerConfig::Convolution(ConvolutionConfig {
                taps: self.required_size("shortconv.l_cache")?,
            }),
        };
        others.for_each(|(_, (layer, _))| layer.mixers = vec![mixer]);
        Ok(())
    }

    /// Leaves each layer either its mixer or its MLP. Layers with a width of the MLP keep the MLP.
    fn separate_mlps(&self, layers: &mut [LayerConfig]) -> Result<(), ModelError> {
        let key = "feed_forward_length";
        let Some((_, mlps)) = self.of_some_layers(key, layers.len())? else {
            let got = self.value(key).map_or_else(|| "nothing".to_owned(), Value::shown);
            return Err(self.invalid(key, &format!("{} numbers", layers.len()), got));
        };
        for (layer, has_mlp) in layers.iter_mut().zip(mlps) {
            match has_mlp {
                true => layer.mixers.clear(),
                false => layer.mlp = None,
            }
        }
        Ok(())
    }

    /// The value that some of `count` layers have under `key`, and for each layer whether it has
    /// it; `None` if the value is not a list. Layers that do not have it are 0 in the list. Entries
    /// for layers of multi-token prediction may follow.
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
}
