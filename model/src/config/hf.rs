//! Parses a Hugging Face `config.json` into a [`DecoderConfig`].
//!
//! Missing keys have the same defaults as in transformers. Options that the decoder does not
//! implement are errors, because a model computes wrong results if an option is ignored.

mod experts;
mod rope;

use serde_json::Value;

use super::keys::Keys;
use super::{Activation, Architecture, DecoderConfig, LayerConfig};
use crate::error::{ModelError, quoted};
use crate::weights::TensorType;

/// The supported values of `model_type`.
const KNOWN: &str =
    "llama, mistral, qwen2, qwen3, gemma3_text, gemma3, mixtral, qwen2_moe, qwen3_moe";

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
    tie_word_embeddings: bool,
    sliding_window: Option<usize>,
    rms_norm_eps: f64,
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
}

/// Parses `config.json`. `file` is its name in error messages.
pub(crate) fn parse(file: &str, value: &Value) -> Result<ParsedConfig, ModelError> {
    let root = Keys::root(file, value)?;
    refuse_quantized(&root)?;
    let architecture = architecture(&root)?;
    // In multimodal models, the decoder's keys are in a nested object.
    let text = root.object("text_config")?;
    let keys = match (&text, root.text("model_type")?) {
        (Some(text), _) if architecture == Architecture::Gemma3 => {
            refuse_quantized(text)?;
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
    Ok(ParsedConfig { decoder, eos_token_ids, bos_token_id })
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

fn refuse_quantized(keys: &Keys<'_>) -> Result<(), ModelError> {
    for key in ["quantization_config", "compression_config"] {
        if keys.value(key).is_some() {
            return Err(keys.unsupported(key, "safetensors without quantization, or a GGUF file"));
        }
    }
    Ok(())
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
        tie_word_embeddings: false,
        sliding_window: None,
        rms_norm_eps: 1e-6,
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
    match architecture {
        Architecture::Llama => llama,
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
        Architecture::Gemma3 => Defaults {
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
            rms_norm_eps: 1e-6,
            eos_token_id: Some(1),
            bos_token_id: Some(2),
        },
    }
}

fn decoder(
    architecture: Architecture,
    keys: &Keys<'_>,
    root: &Keys<'_>,
    defaults: &Defaults,
) -> Result<DecoderConfig, ModelError> {
    let gemma = architecture == Architecture::Gemma3;
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
    let attention_bias = keys.flag("attention_bias")?.unwrap_or(false);
    let (qkv_bias, output_bias) = match architecture {
        Architecture::Mistral | Architecture::Mixtral => (false, false),
        Architecture::Qwen2 => (true, false),
        Architecture::Qwen2Moe => (keys.flag("qkv_bias")?.unwrap_or(true), false),
        _ => (attention_bias, attention_bias),
    };
    let mlp_bias = architecture == Architecture::Llama && keys.flag("mlp_bias")?.unwrap_or(false);
    refuse_options(keys)?;
    let (ropes, local) = rope::parse(architecture, keys, max_positions)?;
    let mut layers = layers(architecture, keys, defaults, local)?;
    let experts = experts::parse(architecture, keys, defaults.intermediate_size, &mut layers)?;
    let score_dim = match keys.positive("query_pre_attn_scalar")? {
        Some(scalar) if gemma => scalar,
        _ if gemma => 256.0,
        _ => head_dim as f64,
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
        rms_norm_eps: keys.positive("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps) as f32,
        norm_offset: if gemma { 1.0 } else { 0.0 },
        max_positions: ropes[0].context(max_positions),
        tie_word_embeddings: tied,
        qkv_bias,
        output_bias,
        mlp_bias,
        qk_norm: matches!(
            architecture,
            Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3
        ),
        sandwich_norms: gemma,
        activation: activation(keys, gemma)?,
        embedding_scale: gemma.then(|| (hidden_size as f64).sqrt() as f32),
        attention_scale: score_dim.powf(-0.5) as f32,
        ropes,
        layers,
        dtype: dtype(keys, root)?,
    })
}

fn refuse_options(keys: &Keys<'_>) -> Result<(), ModelError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if keys.value(key).is_some() {
            return Err(keys.unsupported(key, "null"));
        }
    }
    if keys.flag("use_bidirectional_attention")?.unwrap_or(false) {
        return Err(keys.unsupported("use_bidirectional_attention", "false"));
    }
    if keys.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "1.0"));
    }
    Ok(())
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
    // Without this flag, the Qwen architectures ignore the window, which may then be 0.
    let windowless = match architecture {
        Architecture::Qwen2
        | Architecture::Qwen3
        | Architecture::Qwen2Moe
        | Architecture::Qwen3Moe => !keys.flag("use_sliding_window")?.unwrap_or(false),
        _ => false,
    };
    let window = match keys.given("sliding_window") {
        _ if windowless => None,
        true => keys.size("sliding_window")?,
        false => defaults.sliding_window,
    };
    let full = LayerConfig { rope: 0, sliding_window: None, experts: false };
    let sliding = LayerConfig { rope: local, sliding_window: window, experts: false };
    let kinds = match keys.texts("layer_types")? {
        // In these architectures all layers are of the same kind, and transformers ignores the key.
        _ if architecture == Architecture::Llama => return Ok(vec![full; count]),
        _ if matches!(
            architecture,
            Architecture::Mistral | Architecture::Mixtral | Architecture::Qwen3Moe
        ) =>
        {
            return Ok(vec![sliding; count]);
        }
        Some(kinds) if kinds.len() != count => {
            return Err(keys.invalid("layer_types", &format!("{count} entries, one per layer")));
        }
        kinds => kinds,
    };
    if let Some(kinds) = kinds {
        return kinds
            .into_iter()
            .map(|kind| match kind {
                "full_attention" => Ok(full),
                "sliding_attention" => Ok(sliding),
                _ => Err(keys.unsupported("layer_types", "full_attention or sliding_attention")),
            })
            .collect();
    }
    let is_sliding: Box<dyn Fn(usize) -> bool> = if architecture == Architecture::Gemma3 {
        let pattern = keys.size("sliding_window_pattern")?.unwrap_or(6);
        Box::new(move |layer| (layer + 1) % pattern != 0)
    } else {
        let windows = keys.count("max_window_layers")?.unwrap_or(28);
        match architecture {
            Architecture::Qwen2Moe => Box::new(move |layer| layer % 2 == 0 && layer < windows),
            _ => Box::new(move |layer| layer >= windows),
        }
    };
    Ok((0..count).map(|layer| if is_sliding(layer) { sliding } else { full }).collect())
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
