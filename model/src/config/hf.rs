//! Parses a Hugging Face `config.json` into a [`DecoderConfig`].
//!
//! Missing keys have the same defaults as in transformers. Options that the decoder does not
//! implement are errors, because a model computes wrong results if an option is ignored.

mod defaults;
mod experts;
mod layers;
mod rope;

use serde_json::Value;
use stolon_kernels::TensorType;

use super::keys::Keys;
use super::quantization::{self, Quantization};
use super::{Activation, Architecture, DecoderConfig, NormPlacement, QkNorm};
use crate::error::{ModelError, quoted};
use defaults::Defaults;

/// The content of `config.json`: the decoder's configuration and the special token ids.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParsedConfig {
    /// The decoder's configuration.
    pub(crate) decoder: DecoderConfig,
    /// Ids of the end-of-sequence tokens. `generation_config.json` takes precedence.
    pub(crate) eos_token_ids: Vec<u32>,
    /// Id of the token that begins a sequence.
    pub(crate) bos_token_id: Option<u32>,
    /// How the matrices are quantised.
    pub(crate) quantization: Option<Quantization>,
}

/// Parses `config.json`. `file` is its name in error messages.
pub(crate) fn parse(file: &str, value: &Value) -> Result<ParsedConfig, ModelError> {
    let root = Keys::root(file, value)?;
    let mut quantization = quantization::parse(&root)?;
    let architecture = architecture(&root)?;
    // In multimodal models, the decoder's keys are in a nested object.
    let text = root.object("text_config")?;
    let keys = match (&text, root.text("model_type")?) {
        (Some(text), _) if architecture == Architecture::Gemma3 => {
            quantization = quantization.or(quantization::parse(text)?);
            text.clone()
        }
        (None, Some("gemma3")) => return Err(root.invalid("text_config", "an object")),
        _ => root.clone(),
    };
    let defaults = Defaults::of(architecture);
    let decoder = decoder(architecture, &keys, &root, &defaults)?;
    decoder.check(file)?;
    let eos_token_ids = match ids(&[&root, &keys], "eos_token_id")? {
        Some(ids) => ids,
        None => defaults.eos_token_id.into_iter().collect(),
    };
    let bos_token_id = match ids(&[&root, &keys], "bos_token_id")? {
        Some(ids) => ids.first().copied(),
        None => defaults.bos_token_id,
    };
    Ok(ParsedConfig { decoder, eos_token_ids, bos_token_id, quantization })
}

/// Token ids under `key` of the first object that has the key. An explicit null is an empty list.
fn ids(objects: &[&Keys<'_>], key: &str) -> Result<Option<Vec<u32>>, ModelError> {
    for object in objects {
        if let Some(ids) = object.token_ids(key)? {
            return Ok(Some(ids));
        }
    }
    Ok(objects.iter().any(|object| object.given(key)).then(Vec::new))
}

/// The architecture that `model_type` names, or else the class in `architectures`.
fn architecture(root: &Keys<'_>) -> Result<Architecture, ModelError> {
    let class = root.texts("architectures")?.and_then(|list| list.first().copied());
    let model_type = root.text("model_type")?;
    let known = match (model_type, class) {
        (Some(name), _) => Architecture::from_model_type(name),
        (None, Some(class)) => Architecture::from_class(class),
        (None, None) => None,
    };
    known.ok_or_else(|| ModelError::UnknownArchitecture {
        file: root.file.into(),
        got: match model_type.or(class) {
            Some(name) => quoted(&format!("`{name}`")),
            None => "nothing (no `model_type`)".into(),
        },
        expected: Architecture::model_types(),
    })
}

fn decoder(
    architecture: Architecture,
    keys: &Keys<'_>,
    root: &Keys<'_>,
    defaults: &Defaults,
) -> Result<DecoderConfig, ModelError> {
    let gemma = matches!(architecture, Architecture::Gemma2 | Architecture::Gemma3);
    let granite = architecture == Architecture::Granite;
    let hidden_size = keys.size("hidden_size")?.unwrap_or(defaults.hidden_size);
    let num_heads = keys.size("num_attention_heads")?.unwrap_or(defaults.num_heads);
    let num_kv_heads = match keys.size("num_key_value_heads")? {
        Some(count) => count,
        // Unlike a missing key, null means as many as query heads.
        None if keys.given("num_key_value_heads") => num_heads,
        None => defaults.num_kv_heads.unwrap_or(num_heads),
    };
    let head_dim = match keys.size("head_dim")?.or(defaults.head_dim) {
        Some(dim) => dim,
        None => hidden_size / num_heads,
    };
    let max_positions = keys.size("max_position_embeddings")?.unwrap_or(defaults.max_positions);
    let tied = match root.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => keys.flag("tie_word_embeddings")?.unwrap_or(defaults.tie_word_embeddings),
    };
    let gpt_oss = architecture == Architecture::GptOss;
    let attention_bias = keys.flag("attention_bias")?.unwrap_or(gpt_oss);
    let (qkv_bias, output_bias) = match architecture {
        Architecture::Mistral | Architecture::Mixtral | Architecture::Phi3 => (false, false),
        Architecture::Qwen2 => (true, false),
        Architecture::Qwen2Moe => (keys.flag("qkv_bias")?.unwrap_or(true), false),
        _ => (attention_bias, attention_bias),
    };
    let mlp_bias =
        matches!(architecture, Architecture::Llama | Architecture::Granite | Architecture::SmolLm3)
            && keys.flag("mlp_bias")?.unwrap_or(false)
            || gpt_oss;
    if keys.flag("use_bidirectional_attention")?.unwrap_or(false) {
        return Err(keys.unsupported("use_bidirectional_attention", "false"));
    }
    if keys.flag("is_causal")? == Some(false) {
        return Err(keys.unsupported("is_causal", "true"));
    }
    let softcap = |key: &str, default: Option<f32>| match keys.positive_f32(key)? {
        Some(_) if !gemma => Err(keys.unsupported(key, "null")),
        None if !keys.given(key) => Ok(default),
        cap => Ok(cap),
    };
    let ropes = rope::parse(architecture, keys, head_dim, max_positions)?;
    let mut layers = layers::parse(architecture, keys, defaults, ropes.local)?;
    let experts = experts::parse(architecture, keys, defaults.intermediate_size, &mut layers)?;
    let attention_scale = if granite {
        keys.positive("attention_multiplier")?.unwrap_or(1.0)
    } else if gemma {
        keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0).powf(-0.5)
    } else {
        (head_dim as f64).powf(-0.5)
    };
    let multiplier = |key: &str| match keys.positive_f32(key)? {
        Some(_) if !granite => Err(keys.unsupported(key, "null")),
        factor => Ok(factor.filter(|factor| *factor != 1.0)),
    };
    let embedding_scale = match multiplier("embedding_multiplier")? {
        None => gemma.then(|| (hidden_size as f64).sqrt() as f32),
        factor => factor,
    };
    Ok(DecoderConfig {
        architecture,
        vocab_size: keys.size("vocab_size")?.unwrap_or(defaults.vocab_size),
        hidden_size,
        intermediate_size: keys.size("intermediate_size")?.unwrap_or(defaults.intermediate_size),
        experts,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim: ropes.rotary_dim,
        rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32,
        norm_offset: if gemma { 1.0 } else { 0.0 },
        max_positions: ropes.list[0].context(max_positions),
        tie_word_embeddings: tied,
        qkv_bias,
        output_bias,
        mlp_bias,
        qk_norm: match architecture {
            Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3 => {
                Some(QkNorm::Head)
            }
            Architecture::Olmo2 => Some(QkNorm::Position),
            _ => None,
        },
        norms: match architecture {
            Architecture::Olmo2 => NormPlacement::Output,
            _ if gemma => NormPlacement::InputAndOutput,
            _ => NormPlacement::Input,
        },
        activation: match gpt_oss {
            true => clamped_swiglu(keys)?,
            false => activation(keys, gemma)?,
        },
        attention_sinks: gpt_oss,
        embedding_scale,
        residual_scale: multiplier("residual_multiplier")?,
        logit_scale: multiplier("logits_scaling")?.map(|divisor| 1.0 / divisor),
        attention_scale: attention_scale as f32,
        attention_softcap: softcap("attn_logit_softcapping", defaults.attention_softcap)?,
        logit_softcap: softcap("final_logit_softcapping", defaults.logit_softcap)?,
        ropes: ropes.list,
        layers,
        dtype: dtype(keys, root)?,
    })
}

/// The gate function of gpt-oss, which does not depend on `hidden_act`.
fn clamped_swiglu(keys: &Keys<'_>) -> Result<Activation, ModelError> {
    let alpha = keys.positive_f32("swiglu_alpha")?.unwrap_or(1.702);
    let limit = keys.positive_f32("swiglu_limit")?.unwrap_or(7.0);
    Ok(Activation::ClampedSwiglu { alpha, limit })
}

fn activation(keys: &Keys<'_>, gemma: bool) -> Result<Activation, ModelError> {
    let (key, default) =
        if gemma { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
    match keys.text(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        _ => Err(keys.unsupported(key, "silu or gelu_pytorch_tanh")),
    }
}

fn dtype(keys: &Keys<'_>, root: &Keys<'_>) -> Result<TensorType, ModelError> {
    for (object, key) in
        [(keys, "dtype"), (keys, "torch_dtype"), (root, "dtype"), (root, "torch_dtype")]
    {
        if let Some(name) = object.text(key)? {
            return match name.trim_start_matches("torch.") {
                "float32" | "auto" => Ok(TensorType::F32),
                "float16" => Ok(TensorType::F16),
                "bfloat16" => Ok(TensorType::Bf16),
                _ => Err(object.unsupported(key, "float32, float16 or bfloat16")),
            };
        }
    }
    Ok(TensorType::F32)
}

#[cfg(test)]
mod tests;
