//! Parses the mixture of experts of a GGUF file.

use super::super::architecture::{Description, Dialect, Scores, Shared};
use super::super::{
    ExpertGroups, ExpertScores, ExpertsConfig, FeedForwardConfig, LayerConfig, MlpConfig,
};
use super::Metadata;
use crate::error::ModelError;
use crate::gguf::Value;

/// llama.cpp's numbers of the functions from scores to weights.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;

impl Metadata<'_> {
    /// Width of the MLP of layers without experts. It may be missing from files of models in which
    /// all layers have experts.
    pub(super) fn dense_width(&self, row: &Description) -> Result<usize, ModelError> {
        let key = "feed_forward_length";
        if row.dialect == Dialect::Gemma4 {
            // The widths of layers may differ; see `gemma4_layers`.
            let count = self.layer_count()?;
            return Ok(self.of_layers(key, None, count)?[0]);
        }
        if let Some((width, _)) = self.of_some_layers(key, self.layer_count()?)? {
            return Ok(width);
        }
        match (self.size(key)?, self.size("expert_feed_forward_length")?) {
            (Some(width), _) | (None, Some(width)) => Ok(width),
            (None, None) => self.required_size(key),
        }
    }

    /// Adds a mixture of experts to the layers with an MLP that have a router. It replaces the MLP,
    /// or is next to it in Gemma 4.
    pub(super) fn experts(
        &self,
        row: &Description,
        layers: &mut [LayerConfig],
    ) -> Result<(), ModelError> {
        let has_router = |index: usize| {
            self.header.tensors.contains_key(&format!("blk.{index}.ffn_gate_inp.weight"))
        };
        let with_mlps = layers.iter_mut().enumerate().filter_map(|(index, layer)| {
            let mlp = layer.mlp.as_ref().and_then(FeedForwardConfig::dense).copied()?;
            has_router(index).then_some((layer, mlp))
        });
        let mut with_mlps = with_mlps.peekable();
        let Some((_, mlp)) = with_mlps.peek() else {
            // A model without experts may have the key with the value 0.
            return match self.value("expert_count") {
                Some(count) if count.as_u64() != Some(0) => {
                    Err(self.unsupported("expert_count", "a router `ffn_gate_inp`", count.shown()))
                }
                _ => Ok(()),
            };
        };
        let experts = self.experts_of_layer(row, mlp)?;
        for (layer, mlp) in with_mlps {
            layer.mlp = Some(match row.dialect {
                Dialect::Gemma4 => FeedForwardConfig::DenseAndExperts(mlp, experts),
                Dialect::Transformers | Dialect::Moondream => FeedForwardConfig::Experts(experts),
            });
        }
        Ok(())
    }

    /// The mixture of experts of a layer. The experts have the activation and the biases of `mlp`.
    fn experts_of_layer(
        &self,
        row: &Description,
        mlp: &MlpConfig,
    ) -> Result<ExpertsConfig, ModelError> {
        let dense_width = self.dense_width(row)?;
        let per_token = self.required_size("expert_used_count")?;
        // These are the defaults of llama.cpp, where files of Mixtral have the name of Llama.
        let width = match (self.size("expert_feed_forward_length")?, row.experts) {
            (Some(width), _) => width,
            (None, Some(experts)) if experts.width.is_some() => dense_width / per_token,
            (None, _) => dense_width,
        };
        let shared = row.experts.map_or(Shared::None, |experts| experts.shared);
        let key = "expert_shared_feed_forward_length";
        let shared_width = match (self.size(key)?, shared) {
            (None, Shared::None) => None,
            (Some(got), Shared::None) => return Err(self.unsupported(key, "nothing", got)),
            (Some(width), _) => Some(width),
            (None, Shared::Times(_)) => {
                self.size("expert_shared_count")?.map(|times| width.saturating_mul(times))
            }
            (None, Shared::Gated(_) | Shared::Dense | Shared::Width(_)) => Some(dense_width),
        };
        let normalized = match self.value("expert_weights_norm") {
            None => row.gguf.normalized_experts,
            Some(value) => value.as_bool().ok_or_else(|| {
                self.invalid("expert_weights_norm", "true or false", value.shown())
            })?,
        };
        let scores = self.expert_scores(row)?;
        Ok(ExpertsConfig {
            count: self.required_size("expert_count")?,
            groups: self.expert_groups(row, scores)?,
            per_token,
            width,
            activation: mlp.activation,
            bias: mlp.bias,
            scores,
            normalized,
            router_bias: row.experts.is_some_and(|experts| experts.router_bias),
            scale: self.factor("expert_weights_scale")?.unwrap_or(1.0),
            shared_width,
            shared_gate: shared.has_gate(),
            scaled_router: row.dialect == Dialect::Gemma4,
            shifted: false,
        })
    }

    /// The function from the scores of a router to weights.
    fn expert_scores(&self, row: &Description) -> Result<ExpertScores, ModelError> {
        let Some(Scores::Sigmoid) = row.experts.map(|experts| experts.scores) else {
            return Ok(ExpertScores::Softmax);
        };
        let key = "expert_gating_func";
        let bias = self.header.tensors.keys().any(|name| name.ends_with(".exp_probs_b.bias"));
        // Files of DeepSeek-V2 have the name of DeepSeek-V3, but no bias. Older files of both, and
        // of GLM-4.7-Flash, lack the key.
        let default = if row.latent.is_some() && !bias { SOFTMAX } else { SIGMOID };
        match self.value(key).map_or(Some(default), Value::as_u64) {
            Some(SOFTMAX) if row.latent.is_some() => Ok(ExpertScores::Softmax),
            Some(SIGMOID) => Ok(ExpertScores::Sigmoid { bias }),
            _ => {
                let got = self.value(key).map_or_else(|| "nothing".into(), Value::shown);
                Err(self.unsupported(key, "2 (sigmoid)", got))
            }
        }
    }

    /// The groups of experts, if there are several.
    fn expert_groups(
        &self,
        row: &Description,
        scores: ExpertScores,
    ) -> Result<Option<ExpertGroups>, ModelError> {
        let key = "expert_group_count";
        if self.value(key).and_then(Value::as_u64).is_none_or(|count| count <= 1) {
            return Ok(None);
        }
        let count = self.required_size(key)?;
        // Files of DeepSeek-V2, whose groups are scored by their best expert, have the name of
        // DeepSeek-V3.
        let has_sigmoids = row.experts.is_some_and(|experts| experts.scores == Scores::Sigmoid);
        let best = if scores == ExpertScores::Softmax && has_sigmoids { 1 } else { 2 };
        Ok(Some(ExpertGroups { count, used: self.required_size("expert_group_used_count")?, best }))
    }
}
