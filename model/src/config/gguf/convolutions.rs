//! Parses which layers of a GGUF file have something else than attention, and the taps of short
//! convolutions.

use super::super::architecture::Description;
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
        let mixers: Option<&[MixerKind]> = match (row.convolutions, row.mamba) {
            (true, _) => Some(&[MixerKind::Convolution]),
            (_, true) => Some(&[MixerKind::Mamba2]),
            _ => None,
        };
        let (Some(Value::Integers(counts)), Some(mixers)) = (self.value(key), mixers) else {
            return Ok(self.size(key)?.unwrap_or(num_heads));
        };
        let heads = counts.iter().copied().find(|heads| *heads != 0);
        let heads = heads.and_then(|heads| u64::try_from(heads).ok()).filter(|n| *n <= SIZE_MAX);
        let one_of = |count: &i64| *count == 0 || u64::try_from(*count).ok() == heads;
        let (Some(heads), true) =
            (heads, counts.len() == layers.len() && counts.iter().all(one_of))
        else {
            let expected = format!("{} numbers, all 0 or the same", layers.len());
            let got = self.value(key).map_or_else(String::new, Value::shown);
            return Err(self.invalid(key, &expected, got));
        };
        for (layer, count) in layers.iter_mut().zip(counts) {
            if *count == 0 {
                *layer = LayerConfig { mixers, rope: None, ..*layer };
            }
        }
        Ok(heads as usize)
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
