//! Parses the metadata of a GGUF file into a [`DecoderConfig`], and maps tensor names.
//!
//! Some parts of a model differ between GGUF files and Hugging Face's: the offset is already added
//! to Gemma's norms, Llama 3.1's rope scaling is a tensor of divisors, and the rows of Llama's q
//! and k projections are in a different order, which [`Weights`](crate::Weights) reverses.

mod metadata;
mod names;
mod rope;

use std::collections::HashMap;

use stolon_backend::Pooling;
use stolon_kernels::TensorType;

use super::{
    Activation, Architecture, DecoderConfig, ExpertsConfig, LayerConfig, NormPlacement, QkNorm,
    Rope, RopeScaling,
};
use crate::error::{ModelError, quoted};
use crate::gguf::{Header, Value};
use metadata::Metadata;
pub(crate) use names::{paired_heads, tensor_name};

/// Every such layer of SmolLM3 has no rotary embedding.
const SMOLLM3_ROPE_STEP: usize = 4;
/// The sliding window of Gemma 2 if the file does not have it.
const GEMMA2_WINDOW: usize = 4096;
/// Numbers of layers of Gemma 2 27B and Gemma 3 27B, whose attention scale is computed from a
/// different size.
const GEMMA2_27B_LAYERS: usize = 46;
const GEMMA3_27B_LAYERS: usize = 62;

/// Reads the content of a small tensor of F32 values, if the file has it.
pub(crate) type SmallTensors<'a> = dyn Fn(&str) -> Result<Option<Vec<f32>>, ModelError> + 'a;

/// How embeddings are made, from `pooling_type`; `None` if the model is not meant for them.
pub(crate) fn pooling(header: &Header) -> Result<Option<Pooling>, ModelError> {
    let (_, prefix) = architecture(header)?;
    let keys = Metadata { header, prefix };
    let Some(value) = keys.value("pooling_type") else { return Ok(None) };
    match value.as_u64() {
        Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(3) => Ok(Some(Pooling::Last)),
        _ => {
            let expected = "0 (none), 1 (mean) or 3 (last)";
            Err(keys.unsupported("pooling_type", expected, value.shown()))
        }
    }
}

/// Parses the configuration from `header`. `tensors` reads the divisors of rotary embeddings.
pub(crate) fn parse(
    header: &Header,
    tensors: &SmallTensors<'_>,
) -> Result<DecoderConfig, ModelError> {
    let (architecture, prefix) = architecture(header)?;
    let keys = Metadata { header, prefix };
    let granite = architecture == Architecture::Granite;
    keys.refuse_options(granite)?;
    let gemma2 = architecture == Architecture::Gemma2;
    let gemma = gemma2 || architecture == Architecture::Gemma3;
    let hidden_size = keys.required_size("embedding_length")?;
    let num_heads = keys.required_size("attention.head_count")?;
    let num_kv_heads = keys.size("attention.head_count_kv")?.unwrap_or(num_heads);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(hidden_size / num_heads);
    if let Some(value_dim) = keys.size("attention.value_length")?
        && value_dim != head_dim
    {
        let expected = format!("{head_dim} (equal to attention.key_length)");
        return Err(keys.unsupported("attention.value_length", &expected, value_dim));
    }
    let rotary_dim = keys.size("rope.dimension_count")?.filter(|dim| *dim != head_dim);
    if let Some(rotary) = rotary_dim
        && architecture != Architecture::Phi3
    {
        return Err(keys.unsupported("rope.dimension_count", &head_dim.to_string(), rotary));
    }
    let layer_count = keys.required_size("block_count")?;
    if layer_count > super::LAYERS_MAX {
        let expected = format!("at most {}", super::LAYERS_MAX);
        return Err(keys.invalid("block_count", &expected, layer_count));
    }
    let score_dim = match (architecture, layer_count) {
        (Architecture::Gemma2, GEMMA2_27B_LAYERS) | (Architecture::Gemma3, GEMMA3_27B_LAYERS) => {
            (hidden_size / num_heads) as f32
        }
        _ => head_dim as f32,
    };
    let softcap = |key: &str, default: f32| match keys.float(key)? {
        Some(cap) if !gemma => Err(keys.unsupported(key, "nothing", cap)),
        None if gemma2 => Ok(Some(default)),
        cap => Ok(cap.map(|cap| cap as f32)),
    };
    let scale = |key: &str| keys.factor(key).map(|factor| factor.filter(|factor| *factor != 1.0));
    let embedding_scale = match scale("embedding_scale")? {
        None => gemma.then(|| (hidden_size as f64).sqrt() as f32),
        factor => factor,
    };
    let embedding = "token_embd.weight";
    let Some(info) = header.tensors.get(embedding) else {
        return Err(ModelError::MissingTensor {
            file: header.file.clone(),
            tensor: embedding.into(),
            expected: vec![0, hidden_size],
        });
    };
    let has = |name: &str| header.tensors.contains_key(name);
    let max_positions = keys.required_size("context_length")?;
    let rope = keys.rope(architecture, max_positions, tensors)?;
    let (ropes, mut layers) = keys.layers(architecture, layer_count, rope)?;
    let experts = keys.experts(architecture, &mut layers)?;
    let config = DecoderConfig {
        architecture,
        vocab_size: info.shape.first().copied().unwrap_or(0),
        hidden_size,
        intermediate_size: keys.required_size("feed_forward_length")?,
        experts,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        rms_norm_eps: keys.required_float("attention.layer_norm_rms_epsilon")? as f32,
        norm_offset: 0.0,
        max_positions: ropes[0].context(max_positions),
        tie_word_embeddings: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_up.bias") || has("blk.0.ffn_up_exps.bias"),
        qk_norm: match architecture {
            Architecture::Olmo2 => Some(QkNorm::Position),
            _ => has("blk.0.attn_q_norm.weight").then_some(QkNorm::Head),
        },
        norms: norms(architecture),
        activation: match architecture {
            Architecture::GptOss => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
            _ if gemma => Activation::GeluTanh,
            _ => Activation::Silu,
        },
        attention_sinks: has("blk.0.attn_sinks.weight"),
        embedding_scale,
        residual_scale: scale("residual_scale")?,
        logit_scale: scale("logit_scale")?.map(|divisor| 1.0 / divisor),
        attention_scale: keys.factor("attention.scale")?.unwrap_or(1.0 / score_dim.sqrt()),
        attention_softcap: softcap("attn_logit_softcapping", 50.0)?,
        logit_softcap: softcap("final_logit_softcapping", 30.0)?,
        ropes,
        layers,
        dtype: most_common_type(header),
    };
    config.check(&header.file)?;
    Ok(config)
}

/// The architecture and the name that the file has for it, with which the keys begin.
fn architecture(header: &Header) -> Result<(Architecture, &str), ModelError> {
    let value = header.metadata.get("general.architecture");
    let known = value
        .and_then(Value::as_text)
        .and_then(|name| Architecture::from_gguf(name).map(|architecture| (architecture, name)));
    known.ok_or_else(|| ModelError::UnknownArchitecture {
        file: header.file.clone(),
        got: value.map_or_else(|| "nothing".into(), |name| quoted(&name.shown())),
        expected: Architecture::gguf_names(),
    })
}

fn norms(architecture: Architecture) -> NormPlacement {
    match architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => NormPlacement::InputAndOutput,
        Architecture::Olmo2 => NormPlacement::Output,
        _ => NormPlacement::Input,
    }
}

/// The element type with the largest total number of bytes.
fn most_common_type(header: &Header) -> TensorType {
    let mut bytes: HashMap<TensorType, usize> = HashMap::new();
    for info in header.tensors.values() {
        if let Ok(dtype) = info.dtype {
            *bytes.entry(dtype).or_default() += info.range.len();
        }
    }
    let most = bytes.into_iter().max_by_key(|(dtype, bytes)| (*bytes, dtype.name()));
    most.map_or(TensorType::F32, |(dtype, _)| dtype)
}

impl Metadata<'_> {
    /// The rotary embeddings, and the rotary embedding and sliding window of each layer. `rope` is
    /// that of layers without a sliding window.
    fn layers(
        &self,
        architecture: Architecture,
        count: usize,
        rope: Rope,
    ) -> Result<(Vec<Rope>, Vec<LayerConfig>), ModelError> {
        let mut ropes = vec![rope];
        // Phi-4 has 0, which means none.
        let key = "attention.sliding_window";
        let none = self.value(key).is_some_and(|value| value.as_u64() == Some(0));
        let window = match self.value(key).filter(|_| !none) {
            None if architecture == Architecture::Gemma2 => Some(GEMMA2_WINDOW),
            None => None,
            Some(_) => self.size(key)?,
        };
        let full = LayerConfig { rope: Some(0), sliding_window: None, experts: false };
        if window.is_none() {
            // The converter marks models without rotary embeddings (Granite 4) in this way.
            let key = "rope.scaling.finetuned";
            let rotated = self.value(key).and_then(Value::as_bool) != Some(false)
                || architecture != Architecture::Granite;
            // No layer number is a multiple of 0.
            let step = if architecture == Architecture::SmolLm3 { SMOLLM3_ROPE_STEP } else { 0 };
            let rope = |number: usize| (rotated && !number.is_multiple_of(step)).then_some(0);
            let layer = |number| LayerConfig { rope: rope(number), ..full };
            return Ok((ropes, (1..=count).map(layer).collect()));
        }
        let is_sliding = match architecture {
            Architecture::Gemma2 | Architecture::GptOss => self.sliding_layers(count, 2)?,
            Architecture::Gemma3 => self.sliding_layers(count, 6)?,
            Architecture::Phi3 => {
                return Ok((ropes, vec![LayerConfig { sliding_window: window, ..full }; count]));
            }
            // No known file of these architectures has a sliding window.
            _ => return Err(self.unsupported(key, "nothing", window.unwrap_or(0))),
        };
        if architecture == Architecture::Gemma3 {
            let theta = self.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
            ropes.push(Rope { theta, scaling: RopeScaling::None });
        }
        let sliding = LayerConfig { rope: Some(ropes.len() - 1), sliding_window: window, ..full };
        let layer = |sliding_here| if sliding_here { sliding } else { full };
        Ok((ropes, is_sliding.into_iter().map(layer).collect()))
    }

    /// The mixture of experts, if the file has one. Sets [`LayerConfig::experts`] of the layers
    /// that have a router.
    fn experts(
        &self,
        architecture: Architecture,
        layers: &mut [LayerConfig],
    ) -> Result<Option<ExpertsConfig>, ModelError> {
        for (index, layer) in layers.iter_mut().enumerate() {
            let router = format!("blk.{index}.ffn_gate_inp.weight");
            layer.experts = self.header.tensors.contains_key(&router);
        }
        if layers.iter().all(|layer| !layer.experts) {
            // A model without experts may have the key with the value 0.
            return match self.value("expert_count") {
                Some(count) if count.as_u64() != Some(0) => {
                    Err(self.unsupported("expert_count", "a router `ffn_gate_inp`", count.shown()))
                }
                _ => Ok(None),
            };
        }
        let qwen2 = architecture == Architecture::Qwen2Moe;
        let dense_width = self.required_size("feed_forward_length")?;
        let per_token = self.required_size("expert_used_count")?;
        // The same defaults as in llama.cpp.
        let width = match (self.size("expert_feed_forward_length")?, architecture) {
            (Some(width), _) => width,
            (None, Architecture::Llama) => dense_width,
            (None, _) => dense_width / per_token,
        };
        let shared_width = match self.size("expert_shared_feed_forward_length")? {
            width if qwen2 => Some(width.unwrap_or(dense_width)),
            None => None,
            Some(width) => {
                return Err(self.unsupported(
                    "expert_shared_feed_forward_length",
                    "nothing",
                    width,
                ));
            }
        };
        let normalized = match self.value("expert_weights_norm") {
            None => !qwen2,
            Some(value) => value.as_bool().ok_or_else(|| {
                self.invalid("expert_weights_norm", "true or false", value.shown())
            })?,
        };
        Ok(Some(ExpertsConfig {
            count: self.required_size("expert_count")?,
            per_token,
            width,
            normalized,
            router_bias: architecture == Architecture::GptOss,
            shared_width,
        }))
    }

    /// Which layers have a sliding window: all but every `pattern`-th, unless the file says
    /// otherwise.
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
