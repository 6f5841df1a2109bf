//! [`Outline`] has the architecture and sizes of a model. They are read from its configuration if
//! that is supported, and otherwise from the usual keys.

use serde::Serialize;
use serde_json::Value as Json;

use super::TensorSummary;
use crate::config::{AttentionConfig, DecoderConfig, MixerConfig};
use crate::error::quoted;
use crate::gguf::{Header, Value};

/// The architecture and the sizes of a model. A field is `None` if the files do not state it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Outline {
    /// Name of the architecture, as in the model's files.
    pub architecture: Option<String>,
    /// The format of quantized safetensors files, such as `fp8` or `awq`.
    pub quantization: Option<String>,
    /// Maximum number of positions, prompt and generated tokens together.
    pub context_length: Option<u64>,
    /// Number of layers.
    pub layers: Option<u64>,
    /// Width of the residual stream.
    pub hidden_size: Option<u64>,
    /// Number of query heads.
    pub heads: Option<u64>,
    /// Number of key heads and of value heads.
    pub kv_heads: Option<u64>,
    /// Number of elements of a head, in most layers.
    pub head_dim: Option<u64>,
    /// Number of layers with keys and values of their own, if the model is supported. Other layers
    /// have no attention, or read the keys and values of another layer.
    pub kv_layers: Option<u64>,
    /// Size of the vocabulary.
    pub vocab_size: Option<u64>,
}

impl Outline {
    /// The outline according to the metadata of a GGUF file.
    pub(super) fn of_gguf(header: &Header) -> Self {
        let text = |key: &str| header.metadata.get(key).and_then(Value::as_text);
        let architecture = text("general.architecture");
        let number = |key: &str| {
            let key = format!("{}.{key}", architecture.unwrap_or_default());
            header.metadata.get(&key).and_then(Value::as_u64)
        };
        let vocabulary = header.tensors.get("token_embd.weight");
        Self {
            architecture: architecture.map(quoted),
            quantization: None,
            context_length: number("context_length"),
            layers: number("block_count"),
            hidden_size: number("embedding_length"),
            heads: number("attention.head_count"),
            kv_heads: number("attention.head_count_kv"),
            head_dim: number("attention.key_length"),
            kv_layers: None,
            vocab_size: vocabulary.and_then(|info| Some(*info.shape.first()? as u64)),
        }
    }

    /// The outline according to a `config.json`.
    pub(super) fn of_json(config: &Json) -> Self {
        let inner = config.get("text_config").filter(|inner| inner.is_object());
        let value = |key: &str| inner.and_then(|inner| inner.get(key)).or_else(|| config.get(key));
        let number = |key: &str| value(key).and_then(Json::as_u64);
        let class = || config.get("architectures")?.get(0)?.as_str();
        let method = |key: &str| config.get(key)?.get("quant_method")?.as_str();
        let quantization = method("quantization_config").or_else(|| method("compression_config"));
        Self {
            architecture: config
                .get("model_type")
                .and_then(Json::as_str)
                .or_else(class)
                .map(quoted),
            quantization: quantization.map(quoted),
            context_length: number("max_position_embeddings"),
            layers: number("num_hidden_layers"),
            hidden_size: number("hidden_size"),
            heads: number("num_attention_heads"),
            kv_heads: number("num_key_value_heads"),
            head_dim: number("head_dim"),
            kv_layers: None,
            vocab_size: number("vocab_size"),
        }
    }

    /// Replaces the sizes with the sizes of a supported configuration.
    pub(super) fn set(&mut self, config: &DecoderConfig) {
        let size = |size: usize| Some(size as u64);
        self.context_length = size(config.max_positions);
        self.layers = size(config.layers.len());
        self.hidden_size = size(config.hidden_size);
        let of_attention = |mixer: &MixerConfig| match mixer {
            MixerConfig::Attention(AttentionConfig { heads, kv_heads, head_dim, .. }) => {
                Some([*heads, *kv_heads, *head_dim])
            }
            MixerConfig::Latent(latent) => Some([latent.heads, 1, latent.sizes.kept_dim()]),
            _ => None,
        };
        if let Some(sizes) = config.mixers().find_map(of_attention) {
            [self.heads, self.kv_heads, self.head_dim] = sizes.map(size);
        }
        let has_own_kv = |mixer: &&MixerConfig| match mixer {
            MixerConfig::Attention(attention) => attention.has_own_kv(),
            MixerConfig::Latent(_) => true,
            _ => false,
        };
        self.kv_layers = size(config.mixers().filter(has_own_kv).count());
        self.vocab_size = size(config.vocab_size);
    }
}

/// The tensors of a GGUF file by their names in the file.
pub(super) fn gguf_tensors(header: &Header) -> Vec<TensorSummary> {
    let summary = |(name, info): (&String, &crate::gguf::TensorInfo)| TensorSummary {
        name: quoted(name),
        dtype: info.dtype.clone().map_or_else(|other| other, |dtype| dtype.name().to_owned()),
        shape: info.shape.clone(),
        bytes: info.range.len() as u64,
    };
    header.tensors.iter().map(summary).collect()
}
