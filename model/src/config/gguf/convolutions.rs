//! Parses which layers of a GGUF file have a convolution.

use super::super::architecture::Description;
use super::super::keys::SIZE_MAX;
use super::super::{LayerConfig, MixerKind};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

impl Metadata<'_> {
    /// The number of KV heads, and the number of taps of the convolutions if there are any. Marks
    /// the layers that have one: those without KV heads.
    pub(super) fn convolutions(
        &self,
        row: &Description,
        num_heads: usize,
        layers: &mut [LayerConfig],
    ) -> Result<(usize, Option<usize>), ModelError> {
        let key = "attention.head_count_kv";
        let counts = match self.value(key) {
            Some(Value::Integers(counts)) if row.convolutions => counts,
            _ => return Ok((self.size(key)?.unwrap_or(num_heads), None)),
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
                *layer = LayerConfig { mixer: MixerKind::Convolution, rope: None, ..*layer };
            }
        }
        let any = layers.iter().any(|layer| layer.mixer == MixerKind::Convolution);
        let taps = if any { Some(self.required_size("shortconv.l_cache")?) } else { None };
        Ok((heads as usize, taps))
    }
}
