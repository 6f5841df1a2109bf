//! Parses the metadata of a GGUF file into a [`DecoderConfig`], and maps tensor names.
//!
//! Some parts of a model differ between GGUF files and Hugging Face's: the offset is already added
//! to Gemma's norms, Llama 3.1's rope scaling is a tensor of divisors, and the rows of Llama's q
//! and k projections are in a different order, which [`Weights`](crate::Weights) reverses.

use std::collections::HashMap;

use super::{
    Activation, Architecture, DecoderConfig, ExpertsConfig, LayerConfig, NormPlacement, QkNorm,
    Rope, RopeScaling,
};
use crate::error::{ModelError, quoted};
use crate::weights::TensorType;
use crate::weights::gguf::{Header, Value};

/// Maximum of every size in the metadata.
const SIZE_MAX: u64 = super::keys::SIZE_MAX;
/// The supported values of `general.architecture`.
const KNOWN: &str = "llama, qwen2, qwen3, granite, olmo2, smollm3, phi3, gemma2, gemma3, qwen2moe, \
                     qwen3moe, gpt-oss";
/// Name of the tensor with Llama 3.1's rope scaling.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// Every such layer of SmolLM3 has no rotary embedding.
const SMOLLM3_ROPE_STEP: usize = 4;
/// The sliding window of Gemma 2 if the file does not have it.
const GEMMA2_WINDOW: usize = 4096;
/// Names of the tensors with the divisors of LongRoPE for long and short contexts.
const ROPE_LONG: &str = "rope_factors_long.weight";
const ROPE_SHORT: &str = "rope_factors_short.weight";
/// Numbers of layers of Gemma 2 27B and Gemma 3 27B, whose attention scale is computed from a
/// different size.
const GEMMA2_27B_LAYERS: usize = 46;
const GEMMA3_27B_LAYERS: usize = 62;

/// Reads the content of a small tensor of F32 values, if the file has it.
pub(crate) type SmallTensors<'a> = dyn Fn(&str) -> Result<Option<Vec<f32>>, ModelError> + 'a;

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

fn architecture(header: &Header) -> Result<(Architecture, &str), ModelError> {
    let name = header.metadata.get("general.architecture");
    match name.and_then(Value::as_text) {
        Some(name @ "llama") => Ok((Architecture::Llama, name)),
        Some(name @ "qwen2") => Ok((Architecture::Qwen2, name)),
        Some(name @ "qwen3") => Ok((Architecture::Qwen3, name)),
        Some(name @ "qwen2moe") => Ok((Architecture::Qwen2Moe, name)),
        Some(name @ "qwen3moe") => Ok((Architecture::Qwen3Moe, name)),
        Some(name @ "gpt-oss") => Ok((Architecture::GptOss, name)),
        Some(name @ "granite") => Ok((Architecture::Granite, name)),
        Some(name @ "olmo2") => Ok((Architecture::Olmo2, name)),
        Some(name @ "smollm3") => Ok((Architecture::SmolLm3, name)),
        Some(name @ "phi3") => Ok((Architecture::Phi3, name)),
        Some(name @ "gemma2") => Ok((Architecture::Gemma2, name)),
        Some(name @ "gemma3") => Ok((Architecture::Gemma3, name)),
        _ => Err(ModelError::UnknownArchitecture {
            file: header.file.clone(),
            got: name.map_or_else(|| "nothing".into(), |name| quoted(&name.shown())),
            expected: KNOWN.into(),
        }),
    }
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

/// Typed access to the metadata keys that start with the architecture's name.
struct Metadata<'a> {
    header: &'a Header,
    prefix: &'a str,
}

impl Metadata<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.header.metadata.get(&format!("{}.{key}", self.prefix))
    }

    fn invalid(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::key(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    fn unsupported(&self, key: &str, expected: &str, got: impl ToString) -> ModelError {
        ModelError::unsupported(&self.header.file, &format!("{}.{key}", self.prefix), expected, got)
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.invalid(key, &format!("an integer from 1 to {SIZE_MAX}"), value.shown())),
        }
    }

    fn required_size(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.invalid(key, "an integer", "nothing"))
    }

    /// A finite number above 0.
    fn float(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            _ => Err(self.invalid(key, "a finite number above 0", value.shown())),
        }
    }

    /// A factor above 0; `None` if it is missing or 0, which means the default as in llama.cpp.
    fn factor(&self, key: &str) -> Result<Option<f32>, ModelError> {
        match self.value(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => Ok(self.float(key)?.map(|factor| factor as f32)),
        }
    }

    fn required_float(&self, key: &str) -> Result<f64, ModelError> {
        self.float(key)?.ok_or_else(|| self.invalid(key, "a number", "nothing"))
    }

    /// Returns an error for an option that is not implemented and would change the output.
    fn refuse_options(&self, granite: bool) -> Result<(), ModelError> {
        for key in [
            "expert_group_count",
            "expert_weights_scale",
            "leading_dense_block_count",
            "rope.scaling.yarn_log_multiplier",
        ] {
            self.only(key, 0.0)?;
        }
        if !granite {
            for key in ["attention.scale", "embedding_scale", "residual_scale", "logit_scale"] {
                self.only(key, 0.0)?;
            }
        }
        Ok(())
    }

    /// Returns an error if the key is present with another value than `neutral`, with which it has
    /// no effect.
    fn only(&self, key: &str, neutral: f64) -> Result<(), ModelError> {
        match self.value(key) {
            Some(value) if value.as_f64() != Some(neutral) => {
                Err(self.unsupported(key, "nothing", value.shown()))
            }
            _ => Ok(()),
        }
    }

    /// The rotary embedding of layers without a sliding window.
    fn rope(
        &self,
        architecture: Architecture,
        max_positions: usize,
        tensors: &SmallTensors<'_>,
    ) -> Result<Rope, ModelError> {
        let default = if architecture == Architecture::Gemma3 { 1e6 } else { 1e4 };
        let theta = self.float("rope.freq_base")?.unwrap_or(default);
        let scaling = if let Some(divisors) = tensors(ROPE_FREQS)? {
            self.only("rope.scaling.attn_factor", 1.0)?;
            RopeScaling::Divisors { divisors, attention_factor: 1.0 }
        } else if self.header.tensors.contains_key(ROPE_LONG) {
            self.long_rope(max_positions, tensors)?
        } else {
            self.scaling(architecture)?
        };
        Ok(Rope { theta, scaling })
    }

    /// LongRoPE, whose divisors are tensors.
    fn long_rope(
        &self,
        max_positions: usize,
        tensors: &SmallTensors<'_>,
    ) -> Result<RopeScaling, ModelError> {
        let original = self.size("rope.scaling.original_context_length")?.unwrap_or(max_positions);
        let attention_factor = self.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        RopeScaling::long_rope(max_positions, original, attention_factor, |long| {
            let name = if long { ROPE_LONG } else { ROPE_SHORT };
            tensors(name)?.ok_or_else(|| ModelError::MissingTensor {
                file: self.header.file.clone(),
                tensor: name.into(),
                expected: vec![],
            })
        })
    }

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

    /// The mixture of experts, if the file has one. Sets [`LayerConfig::experts`] of the layers that
    /// have a router.
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

    fn scaling(&self, architecture: Architecture) -> Result<RopeScaling, ModelError> {
        let key = "rope.scaling.type";
        let kind = match self.value(key) {
            None => None,
            Some(value) => {
                Some(value.as_text().ok_or_else(|| self.invalid(key, "a string", value.shown()))?)
            }
        };
        let factor = self.float("rope.scaling.factor")?.or(self.float("rope.scale_linear")?);
        if kind == Some("yarn") {
            return self.yarn(architecture, factor);
        }
        self.only("rope.scaling.attn_factor", 1.0)?;
        match (kind, factor) {
            (Some("none"), _) | (None | Some("linear"), None) => Ok(RopeScaling::None),
            (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some(other), _) => {
                Err(self.unsupported(key, "none, linear or yarn (or rope_freqs.weight)", other))
            }
        }
    }

    fn yarn(
        &self,
        architecture: Architecture,
        factor: Option<f64>,
    ) -> Result<RopeScaling, ModelError> {
        self.only("rope.scaling.yarn_ext_factor", 1.0)?;
        let factor = match factor {
            Some(factor) if factor >= 1.0 => factor,
            other => {
                let got = other.map_or_else(|| "nothing".to_owned(), |factor| factor.to_string());
                return Err(self.invalid("rope.scaling.factor", "a number of at least 1", got));
            }
        };
        let float = |key, default| self.float(key).map(|value| value.unwrap_or(default));
        let attention_factor = RopeScaling::yarn_attention_factor(factor)
            * float("rope.scaling.attn_factor", 1.0)?
            * float("rope.scaling.yarn_attn_factor", 1.0)?;
        let original = match self.size("rope.scaling.original_context_length")? {
            Some(original) => original,
            None => self.required_size("context_length")?,
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: float("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: float("rope.scaling.yarn_beta_slow", 1.0)?,
            // The metadata has no key for it.
            truncate: architecture != Architecture::GptOss,
            original_max_position_embeddings: original,
            attention_factor: attention_factor as f32,
        })
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

/// The Hugging Face name of the tensor with the GGUF name `name`; `None` if the decoder does not
/// use this tensor. In the name of a stacked tensor, whose first dimension is the expert, `*` takes
/// the place of the expert's index.
pub(crate) fn tensor_name(architecture: Architecture, name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".into()),
        "output_norm.weight" => return Some("model.norm.weight".into()),
        "output.weight" => return Some("lm_head.weight".into()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let norms = norms(architecture).names();
    let phi = architecture == Architecture::Phi3;
    let module = match module {
        "attn_norm" => norms.attention_input?,
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" if phi => "self_attn.qkv_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_norm" => norms.mlp_input?,
        "attn_sinks" => return Some(format!("model.layers.{layer}.self_attn.sinks")),
        "post_attention_norm" if architecture == Architecture::GptOss => norms.mlp_input?,
        "post_attention_norm" => norms.attention_output?,
        "post_ffw_norm" => norms.mlp_output?,
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" if phi => "mlp.gate_up_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate",
        "ffn_gate_shexp" => "mlp.shared_expert.gate_proj",
        "ffn_up_shexp" => "mlp.shared_expert.up_proj",
        "ffn_down_shexp" => "mlp.shared_expert.down_proj",
        "ffn_gate_exps" => "mlp.experts.*.gate_proj",
        "ffn_up_exps" => "mlp.experts.*.up_proj",
        "ffn_down_exps" => "mlp.experts.*.down_proj",
        _ => return expert_name(layer, module, kind),
    };
    Some(format!("model.layers.{layer}.{module}.{kind}"))
}

/// The name of a tensor in older files, which have one tensor per expert: `ffn_gate.7.weight`.
fn expert_name(layer: &str, module: &str, kind: &str) -> Option<String> {
    let (module, expert) = module.rsplit_once('.')?;
    let module = match module {
        "ffn_gate" => "gate_proj",
        "ffn_up" => "up_proj",
        "ffn_down" => "down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.mlp.experts.{expert}.{module}.{kind}"))
}

/// The number of heads in which the rows of a tensor are interleaved; `None` if they are not.
/// `name` is the Hugging Face name.
pub(crate) fn paired_heads(config: &DecoderConfig, name: &str) -> Option<usize> {
    if !matches!(
        config.architecture,
        Architecture::Llama | Architecture::Granite | Architecture::SmolLm3
    ) {
        return None;
    }
    if name.contains(".self_attn.q_proj.") {
        return Some(config.num_heads);
    }
    name.contains(".self_attn.k_proj.").then_some(config.num_kv_heads)
}
