//! Parses the sliding windows and rotary embeddings of the layers of a GGUF file.

use super::super::architecture::{Description, Windows};
use super::super::{LAYERS_MAX, LayerConfig, Rope, RopeScaling};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

impl Metadata<'_> {
    /// Number of layers.
    pub(super) fn layer_count(&self) -> Result<usize, ModelError> {
        let key = "block_count";
        let count = self.required_size(key)?;
        if count > LAYERS_MAX {
            return Err(self.invalid(key, &format!("at most {LAYERS_MAX}"), count));
        }
        match count.saturating_sub(self.prediction_layers()?) {
            0 => Err(self.invalid(key, "more than nextn_predict_layers", count)),
            count => Ok(count),
        }
    }

    /// The rotary embeddings of the model, and its layers with their rotary embedding and sliding
    /// window. `rope` is the rotary embedding of layers without a sliding window, and `plain` is a
    /// layer without either.
    pub(super) fn layers(
        &self,
        row: &Description,
        count: usize,
        rope: Rope,
        plain: &LayerConfig,
    ) -> Result<(Vec<Rope>, Vec<LayerConfig>), ModelError> {
        let mut ropes = vec![rope];
        // Files of Phi-4 have the value 0, which means that there is no window.
        let key = "attention.sliding_window";
        let window = match self.value(key) {
            None => row.gguf.window,
            Some(value) if value.as_u64() == Some(0) => None,
            Some(_) => self.size(key)?,
        };
        let Some(window) = window else {
            let mark = self.value("rope.scaling.finetuned").and_then(Value::as_bool);
            let marked = mark == Some(false) && row.gguf.marks_unrotated;
            let rotated = !marked && !row.rotation.nowhere;
            // With the step 0, no layer is left out, because no layer number is a multiple of 0.
            let step = row.rotation.unrotated_step.unwrap_or(0);
            let rope = |number: usize| (rotated && !number.is_multiple_of(step)).then_some(0);
            let layer = |number| plain.at(rope(number), None);
            return Ok((ropes, (1..=count).map(layer).collect()));
        };
        let is_sliding = match row.windows {
            // No known file of these architectures has a window.
            _ if row.windows_need_flag => return Err(self.unsupported(key, "nothing", window)),
            Windows::Everywhere => vec![true; count],
            Windows::Some(pattern) => match pattern.step() {
                Some(step) => self.sliding_layers(count, step)?,
                None => return Err(self.unsupported(key, "nothing", window)),
            },
            Windows::Nowhere => return Err(self.unsupported(key, "nothing", window)),
        };
        if let Some(theta) = row.rotation.local_theta {
            let theta = self.float("rope.freq_base_swa")?.unwrap_or(theta);
            ropes.push(Rope { theta, scaling: RopeScaling::None, sections: None });
        }
        let local = Some(ropes.len() - 1);
        let global = Some(0).filter(|_| !row.rotation.local_only);
        let layer = |is_sliding| match is_sliding {
            true => plain.at(local, Some(window)),
            false => plain.at(global, None),
        };
        Ok((ropes, is_sliding.into_iter().map(layer).collect()))
    }

    /// For each layer, whether it has a sliding window. All but every `pattern`-th have one, unless
    /// the file says otherwise.
    fn sliding_layers(&self, count: usize, pattern: usize) -> Result<Vec<bool>, ModelError> {
        let key = "attention.sliding_window_pattern";
        let pattern = match self.value(key) {
            None => pattern,
            Some(Value::Bools(layers)) if layers.len() == count => return Ok(layers.clone()),
            Some(value) => match value.as_u64() {
                Some(n) if n >= 1 => n as usize,
                _ => {
                    let expected = format!("a number or {count} booleans");
                    return Err(self.invalid(key, &expected, value.shown()));
                }
            },
        };
        Ok((0..count).map(|layer| (layer + 1) % pattern != 0).collect())
    }
}
