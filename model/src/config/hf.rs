//! Parses a Hugging Face `config.json` into a [`DecoderConfig`].
//!
//! Missing keys have the same defaults as in transformers. Options that the decoder does not
//! implement are errors, because a model computes wrong results if an option is ignored.

mod experts;
mod rope;

use serde_json::Value;

use super::keys::Keys;
use super::quantization::{self, Quantization};
use super::{Activation, Architecture, DecoderConfig, LayerConfig, NormPlacement, QkNorm};
use crate::error::{ModelError, quoted};
use crate::weights::TensorType;

/// The supported values of `model_type`.
const KNOWN: &str = "llama, mistral, qwen2, qwen3, granite, olmo2, smollm3, phi3, gemma2, gemma3_text, gemma3, \
     mixtral, qwen2_moe, qwen3_moe, gpt_oss";

/// The defaults of transformers for keys that `config.json` lacks.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    /// `None`: equal to `num_heads`.
    num_kv_heads: Option<usize>,
    /// `None`: `hidden_size / num_heads`.
    head_dim: Option<usize>,
    max_positions: usize,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
    sliding_window: Option<usize>,
    attention_softcap: Option<f32>,
    logit_softcap: Option<f32>,
    eos_token_id: Option<u32>,
    bos_token_id: Option<u32>,
}

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
    let defaults = defaults(architecture);
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
    let by_class = match class {
        Some("LlamaForCausalLM") => Some("llama"),
        Some("MistralForCausalLM") => Some("mistral"),
        Some("Qwen2ForCausalLM") => Some("qwen2"),
        Some("Qwen3ForCausalLM") => Some("qwen3"),
        Some("MixtralForCausalLM") => Some("mixtral"),
        Some("Qwen2MoeForCausalLM") => Some("qwen2_moe"),
        Some("Qwen3MoeForCausalLM") => Some("qwen3_moe"),
        Some("GptOssForCausalLM") => Some("gpt_oss"),
        Some("GraniteForCausalLM") => Some("granite"),
        Some("Olmo2ForCausalLM") => Some("olmo2"),
        Some("SmolLM3ForCausalLM") => Some("smollm3"),
        Some("Phi3ForCausalLM") => Some("phi3"),
        Some("Gemma2ForCausalLM") => Some("gemma2"),
        Some("Gemma3ForCausalLM") => Some("gemma3_text"),
        Some("Gemma3ForConditionalGeneration") => Some("gemma3"),
        _ => None,
    };
    let unknown = |got: &str| ModelError::UnknownArchitecture {
        file: root.file.into(),
        got: quoted(got),
        expected: KNOWN.into(),
    };
    match root.text("model_type")?.or(by_class) {
        Some("llama") => Ok(Architecture::Llama),
        Some("mistral") => Ok(Architecture::Mistral),
        Some("qwen2") => Ok(Architecture::Qwen2),
        Some("qwen3") => Ok(Architecture::Qwen3),
        Some("mixtral") => Ok(Architecture::Mixtral),
        Some("qwen2_moe") => Ok(Architecture::Qwen2Moe),
        Some("qwen3_moe") => Ok(Architecture::Qwen3Moe),
        Some("gpt_oss") => Ok(Architecture::GptOss),
        Some("granite") => Ok(Architecture::Granite),
        Some("olmo2") => Ok(Architecture::Olmo2),
        Some("smollm3") => Ok(Architecture::SmolLm3),
        Some("phi3") => Ok(Architecture::Phi3),
        Some("gemma2") => Ok(Architecture::Gemma2),
        Some("gemma3_text" | "gemma3") => Ok(Architecture::Gemma3),
        Some(other) => Err(unknown(&format!("`{other}`"))),
        None => Err(unknown(&match class {
            Some(class) => format!("`{class}`"),
            None => "nothing (no `model_type`)".into(),
        })),
    }
}

fn defaults(architecture: Architecture) -> Defaults {
    let llama = Defaults {
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_layers: 32,
        num_heads: 32,
        num_kv_heads: None,
        head_dim: None,
        max_positions: 2048,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        sliding_window: None,
        attention_softcap: None,
        logit_softcap: None,
        eos_token_id: Some(2),
        bos_token_id: Some(1),
    };
    let qwen2 = Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        num_kv_heads: Some(32),
        max_positions: 32_768,
        sliding_window: Some(4096),
        eos_token_id: None,
        bos_token_id: None,
        ..llama
    };
    let gemma3 = Defaults {
        vocab_size: 262_208,
        hidden_size: 2304,
        intermediate_size: 9216,
        num_layers: 26,
        num_heads: 8,
        num_kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        tie_word_embeddings: true,
        sliding_window: Some(4096),
        eos_token_id: Some(1),
        bos_token_id: Some(2),
        ..llama
    };
    match architecture {
        Architecture::Llama | Architecture::Granite => llama,
        Architecture::Mistral => Defaults {
            intermediate_size: 14_336,
            num_kv_heads: Some(8),
            max_positions: 131_072,
            sliding_window: Some(4096),
            ..llama
        },
        Architecture::Qwen2 => qwen2,
        Architecture::Qwen3 => Defaults { head_dim: Some(128), ..qwen2 },
        Architecture::Mixtral => Defaults {
            intermediate_size: 14_336,
            num_kv_heads: Some(8),
            max_positions: 131_072,
            rms_norm_eps: 1e-5,
            ..llama
        },
        Architecture::Qwen2Moe => Defaults {
            hidden_size: 2048,
            intermediate_size: 5632,
            num_layers: 24,
            num_heads: 16,
            num_kv_heads: Some(16),
            ..qwen2
        },
        Architecture::Qwen3Moe => Defaults {
            hidden_size: 2048,
            intermediate_size: 6144,
            num_layers: 24,
            num_kv_heads: Some(4),
            ..qwen2
        },
        Architecture::GptOss => Defaults {
            vocab_size: 201_088,
            hidden_size: 2880,
            intermediate_size: 2880,
            num_layers: 36,
            num_heads: 64,
            num_kv_heads: Some(8),
            head_dim: Some(64),
            max_positions: 131_072,
            sliding_window: Some(128),
            rms_norm_eps: 1e-5,
            eos_token_id: None,
            bos_token_id: None,
            ..llama
        },
        Architecture::Olmo2 => Defaults {
            vocab_size: 50_304,
            rms_norm_eps: 1e-5,
            eos_token_id: Some(50_279),
            bos_token_id: None,
            ..llama
        },
        Architecture::SmolLm3 => Defaults {
            vocab_size: 128_256,
            hidden_size: 2048,
            num_layers: 36,
            num_heads: 16,
            num_kv_heads: Some(4),
            max_positions: 32_768,
            tie_word_embeddings: true,
            eos_token_id: Some(128_001),
            bos_token_id: Some(128_000),
            ..llama
        },
        Architecture::Phi3 => Defaults {
            vocab_size: 32_064,
            hidden_size: 3072,
            intermediate_size: 8192,
            max_positions: 4096,
            rms_norm_eps: 1e-5,
            eos_token_id: Some(32_000),
            ..llama
        },
        Architecture::Gemma2 => Defaults {
            vocab_size: 256_000,
            max_positions: 8192,
            attention_softcap: Some(50.0),
            logit_softcap: Some(30.0),
            ..gemma3
        },
        Architecture::Gemma3 => gemma3,
    }
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
    let softcap = |key: &str, default: Option<f32>| match keys.positive_f32(key)? {
        Some(_) if !gemma => Err(keys.unsupported(key, "null")),
        None if !keys.given(key) => Ok(default),
        cap => Ok(cap),
    };
    let ropes = rope::parse(architecture, keys, head_dim, max_positions)?;
    let mut layers = layers(architecture, keys, defaults, ropes.local)?;
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

/// The sliding window and the rotary embedding of each layer. `local` is the index of the rotary
/// embedding of layers with a sliding window.
fn layers(
    architecture: Architecture,
    keys: &Keys<'_>,
    defaults: &Defaults,
    local: usize,
) -> Result<Vec<LayerConfig>, ModelError> {
    let count = keys.size("num_hidden_layers")?.unwrap_or(defaults.num_layers);
    if count > super::LAYERS_MAX {
        return Err(keys.invalid("num_hidden_layers", &format!("at most {}", super::LAYERS_MAX)));
    }
    // Without this flag, these architectures ignore the window, which may then be 0.
    let windowless = match architecture {
        Architecture::Qwen2
        | Architecture::Qwen3
        | Architecture::Qwen2Moe
        | Architecture::Qwen3Moe
        | Architecture::SmolLm3 => !keys.flag("use_sliding_window")?.unwrap_or(false),
        _ => false,
    };
    let window = match keys.given("sliding_window") {
        _ if windowless => None,
        true => keys.size("sliding_window")?,
        false => defaults.sliding_window,
    };
    let full = LayerConfig { rope: Some(0), sliding_window: None, experts: false };
    let sliding = LayerConfig { rope: Some(local), sliding_window: window, experts: false };
    let kinds = match keys.texts("layer_types")? {
        // In these architectures all layers are of the same kind, and transformers ignores the key.
        _ if matches!(
            architecture,
            Architecture::Llama | Architecture::Granite | Architecture::Olmo2
        ) =>
        {
            return Ok(vec![full; count]);
        }
        _ if matches!(
            architecture,
            Architecture::Mistral
                | Architecture::Mixtral
                | Architecture::Qwen3Moe
                | Architecture::Phi3
        ) =>
        {
            return Ok(vec![sliding; count]);
        }
        Some(kinds) if kinds.len() != count => {
            return Err(keys.invalid("layer_types", &format!("{count} entries, one per layer")));
        }
        kinds => kinds,
    };
    let rotated = match architecture {
        Architecture::SmolLm3 => rotated_layers(keys, count)?,
        _ => vec![true; count],
    };
    let layer = |(kind, rotated): (LayerConfig, bool)| LayerConfig {
        rope: kind.rope.filter(|_| rotated),
        ..kind
    };
    if let Some(kinds) = kinds {
        let kind = |kind| match kind {
            "full_attention" => Ok(full),
            "sliding_attention" => Ok(sliding),
            _ => Err(keys.unsupported("layer_types", "full_attention or sliding_attention")),
        };
        let kinds = kinds.into_iter().map(kind).collect::<Result<Vec<_>, _>>()?;
        return Ok(kinds.into_iter().zip(rotated).map(layer).collect());
    }
    let is_sliding: Box<dyn Fn(usize) -> bool> = match architecture {
        Architecture::Gemma2 | Architecture::GptOss => Box::new(|layer| layer % 2 == 0),
        Architecture::SmolLm3 => Box::new(|layer| !rotated[layer]),
        Architecture::Qwen2Moe => {
            let windows = keys.count("max_window_layers")?.unwrap_or(28);
            Box::new(move |layer| layer % 2 == 0 && layer < windows)
        }
        Architecture::Gemma3 => {
            let pattern = keys.size("sliding_window_pattern")?.unwrap_or(6);
            Box::new(move |layer| (layer + 1) % pattern != 0)
        }
        _ => {
            let first = keys.count("max_window_layers")?.unwrap_or(28);
            Box::new(move |layer| layer >= first)
        }
    };
    let kinds = (0..count).map(|layer| if is_sliding(layer) { sliding } else { full });
    Ok(kinds.zip(rotated.iter().copied()).map(layer).collect())
}

/// Which layers have a rotary embedding (SmolLM3).
fn rotated_layers(keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ModelError> {
    // Despite its name, the list has 1 for layers with a rotary embedding.
    let key = "no_rope_layers";
    match keys.flags(key)? {
        Some(rotated) if rotated.len() >= count => Ok(rotated[..count].to_vec()),
        Some(_) => Err(keys.invalid(key, &format!("at least {count} entries, one per layer"))),
        None => {
            let interval = keys.size("no_rope_layer_interval")?.unwrap_or(4);
            Ok((1..=count).map(|number| number % interval != 0).collect())
        }
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
