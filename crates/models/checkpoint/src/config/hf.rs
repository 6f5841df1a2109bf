//! Parses a Hugging Face `config.json` into a [`DecoderConfig`].
//!
//! Missing keys have the same defaults as in transformers. Options that the decoder does not
//! implement are errors, because a model computes wrong results if an option is ignored.

mod convolutions;
mod delta_net;
mod experts;
mod falcon;
mod gemma4;
mod kimi;
mod latent;
mod layers;
mod mamba;
mod mlp;
mod moondream;
mod nemotron;
mod other_keys;
mod rope;

use serde_json::Value;
use stolon_kernels::TensorType;

use super::architecture::{AttentionScale, Bias, Defaults, Description, Dialect, Mamba, Softcaps};
use super::keys::Keys;
use super::quantization::{self, Quantization};
use super::{
    Architecture, AttentionConfig, DecoderConfig, KeysAndValues, LatentConfig, LatentSizes,
    LayerConfig, NormsConfig, QkNorm, QueryScaling, draft_head,
};
use crate::error::{ModelError, quoted};
use falcon::Factors;
use gemma4::HeadShape;

/// The content of `config.json`: the decoder's configuration and the special token ids.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParsedConfig {
    /// The decoder's configuration.
    pub(crate) decoder: DecoderConfig,
    /// Ids of the end-of-sequence tokens. `generation_config.json` may list more.
    pub(crate) eos_token_ids: Vec<u32>,
    /// Whether the file has no such ids, so that they are the default of the architecture.
    pub(crate) default_eos: bool,
    /// Id of the token that begins a sequence.
    pub(crate) bos_token_id: Option<u32>,
    /// How the matrices are quantized.
    pub(crate) quantization: Option<Quantization>,
    /// Whether the embedding is used as the output matrix if the weights have none.
    pub(crate) may_lack_head: bool,
    /// Notes for users about keys that have no effect.
    pub(crate) notes: Vec<String>,
}

/// The values of `model_type` of multimodal models whose embedding is also the output matrix by
/// default in transformers.
const TIED_WRAPPERS: [&str; 1] = ["mistral3"];

/// Parses `config.json`. `file` is its name in error messages.
pub(crate) fn parse(file: &str, value: &Value) -> Result<ParsedConfig, ModelError> {
    let root = Keys::root(file, value)?;
    let mut quantization = quantization::parse(&root)?;
    let architecture = architecture(&root)?;
    if architecture.description().dialect == Dialect::Moondream {
        return moondream::parse(architecture.description(), &root);
    }
    // In multimodal models, the decoder's keys are in a nested object.
    let text = root.object("text_config")?;
    let row = architecture.description();
    let keys = match &text {
        Some(text) if !row.multimodal.is_empty() => {
            quantization = quantization.or(quantization::parse(text)?);
            text.clone()
        }
        None if root.text("model_type")?.is_some_and(|name| row.multimodal.contains(&name)) => {
            return Err(root.invalid("text_config", "an object"));
        }
        _ => root.clone(),
    };
    let decoder = decoder(row, &keys, &root)?;
    decoder.check(file)?;
    let given = ids(&[&root, &keys], "eos_token_id")?;
    let default_eos = given.is_none();
    let eos_token_ids = given.unwrap_or_else(|| row.defaults.eos_token_ids.to_vec());
    let bos_token_id = match ids(&[&root, &keys], "bos_token_id")? {
        Some(ids) => ids.first().copied(),
        None => row.defaults.bos_token_id,
    };
    let may_lack_head = may_lack_head(&keys, &root)?;
    let notes = other_keys::notes(&root);
    Ok(ParsedConfig {
        decoder,
        eos_token_ids,
        default_eos,
        bos_token_id,
        quantization,
        may_lack_head,
        notes,
    })
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
    let text_type = match root.object("text_config")? {
        Some(text) => text.text("model_type")?,
        None => None,
    };
    for (key, name) in [("architectures", class), ("model_type", model_type)] {
        let refused = name.and_then(|name| draft_head::refused(root.file, key, name));
        if let Some(error) = refused {
            return Err(error);
        }
    }
    let known = match (model_type, class) {
        (Some(name), _) => Architecture::from_model_type(name)
            .or_else(|| Architecture::in_multimodal(name, text_type?)),
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
    row: &Description,
    keys: &Keys<'_>,
    root: &Keys<'_>,
) -> Result<DecoderConfig, ModelError> {
    refuse_options(row, keys)?;
    let defaults = &row.defaults;
    let hidden_size = keys.size("hidden_size")?.unwrap_or(defaults.hidden_size);
    let latent = latent::parse(row, keys)?;
    let [num_heads, num_kv_heads, head_dim] = heads(defaults, latent, keys, hidden_size)?;
    let max_positions = keys.name_of(["max_position_embeddings", "model_max_length"]);
    let max_positions = keys.size(max_positions)?.unwrap_or(defaults.max_positions);
    let heads = HeadShape { kv_heads: num_kv_heads, head_dim };
    let global_heads = gemma4::global_heads(row, keys, heads)?;
    let ropes = rope::parse(&row.rotation, keys, global_heads.head_dim, max_positions)?;
    let (factors, score_factor) = match row.mamba {
        Some(Mamba::Falcon) => falcon::factors(keys)?,
        _ => (Factors::NEUTRAL, latent::score_factor(row, latent, keys)?),
    };
    let cap = |cap: fn(Softcaps) -> Option<f32>| row.softcaps.and_then(cap);
    let attention = AttentionConfig {
        heads: num_heads,
        kv_heads: num_kv_heads,
        head_dim,
        rotary_dim: ropes.rotary_dim.unwrap_or(head_dim),
        rope: Some(0),
        sliding_window: None,
        keys_and_values: KeysAndValues::Own,
        qkv_bias: row.qkv_bias.of(keys)?,
        output_bias: row.output_bias.of(keys)?,
        output_gate: row.output_gate,
        qk_norm: qk_norm(row, keys)?,
        value_norm: row.value_norm,
        selective: false,
        sinks: row.attention_sinks,
        scale: row.attention_scale.of(keys, latent, head_dim)? as f32 * score_factor,
        softcap: softcap(keys, "attn_logit_softcapping", cap(|caps| caps.attention))?,
        query_scaling: query_scaling(row, keys)?,
        output_factor: factors.attention_output,
    };
    let mlp = mlp::parse(row, keys, &factors)?;
    let mut layers = layers::parse(row, keys, ropes.local, &LayerConfig::new(attention, mlp))?;
    gemma4::layers(row, keys, [heads, global_heads], &mut layers)?;
    mamba::parse(row, keys, hidden_size, &factors, &mut layers)?;
    experts::parse(row, keys, &mlp, &mut layers)?;
    if let Some(sizes) = latent {
        LatentConfig::replace_attention(root.file, sizes, &mut layers)?;
    }
    convolutions::parse(row, keys, &mut layers)?;
    delta_net::parse(row, keys, &mut layers)?;
    Ok(DecoderConfig {
        architecture: row.architecture,
        vocab_size: keys.size("vocab_size")?.unwrap_or(defaults.vocab_size),
        hidden_size,
        norms: NormsConfig::parse(row, keys)?,
        max_positions: ropes.list[0].context(max_positions),
        tie_word_embeddings: tied(row, keys, root)?,
        head_bias: false,
        per_layer_input: gemma4::per_layer_input(row, keys, &mlp)?,
        layer_scales: row.dialect == Dialect::Gemma4,
        embedding_scale: embedding_scale(row, keys, hidden_size)?,
        residual_scale: multiplier(keys, "residual_multiplier")?,
        logit_scale: logit_scale(row, keys)?,
        logit_softcap: softcap(keys, "final_logit_softcapping", cap(|caps| caps.logits))?,
        ropes: ropes.list,
        layers,
        dtype: dtype(keys, root)?,
    })
}

/// Numbers of query heads, of KV heads, and of elements of a head.
fn heads(
    defaults: &Defaults,
    latent: Option<LatentSizes>,
    keys: &Keys<'_>,
    hidden_size: usize,
) -> Result<[usize; 3], ModelError> {
    let num_heads = keys.size("num_attention_heads")?.unwrap_or(defaults.num_heads);
    if let Some(latent) = latent {
        return Ok([num_heads, 1, latent.kept_dim()]);
    }
    let num_kv_heads = match keys.size("num_key_value_heads")? {
        Some(count) => count,
        // Unlike a missing key, null means the number of query heads.
        None if keys.given("num_key_value_heads") => num_heads,
        None => defaults.num_kv_heads.unwrap_or(num_heads),
    };
    let head_dim = match keys.size("head_dim")? {
        Some(dim) => dim,
        // Older files of Nemotron-H have the key `attention_head_dim`.
        None => match keys.size("attention_head_dim")?.or(defaults.head_dim) {
            Some(dim) => dim,
            None => hidden_size / num_heads,
        },
    };
    Ok([num_heads, num_kv_heads, head_dim])
}

/// Whether the embedding is also the output matrix. In a multimodal model, both objects may say it;
/// if they contradict each other, the weights decide, which may have no output matrix.
fn tied(row: &Description, keys: &Keys<'_>, root: &Keys<'_>) -> Result<bool, ModelError> {
    // Files of LFM2 may have the key `tie_embedding` instead.
    let own = if row.convolutions { root.flag("tie_embedding")? } else { None };
    if let Some(tied) = own {
        return Ok(tied);
    }
    let flags = [root.flag("tie_word_embeddings")?, keys.flag("tie_word_embeddings")?];
    Ok(flags
        .into_iter()
        .flatten()
        .reduce(|a, b| a || b)
        .unwrap_or(row.defaults.tie_word_embeddings))
}

/// Whether a multimodal model uses the embedding as its output matrix if its weights have none and
/// its configuration does not say whether the two are tied.
fn may_lack_head(keys: &Keys<'_>, root: &Keys<'_>) -> Result<bool, ModelError> {
    const KEY: &str = "tie_word_embeddings";
    let is_wrapper = root.text("model_type")?.is_some_and(|name| TIED_WRAPPERS.contains(&name));
    Ok(is_wrapper && root.value(KEY).is_none() && keys.value(KEY).is_none())
}

/// Refuses options that the architecture does not have in transformers, or that the decoder does
/// not implement.
fn refuse_options(row: &Description, keys: &Keys<'_>) -> Result<(), ModelError> {
    let key = "use_bidirectional_attention";
    // In Gemma 4, positions of images may attend in both directions.
    let is_of_images =
        row.dialect == Dialect::Gemma4 && keys.value(key).and_then(Value::as_str) == Some("vision");
    if !is_of_images && keys.value(key).is_some_and(|value| *value != Value::Bool(false)) {
        return Err(keys.unsupported(key, "false"));
    }
    if row.dialect != Dialect::Gemma4 && keys.value("per_layer_config").is_some() {
        return Err(keys.unsupported("per_layer_config", "nothing"));
    }
    for key in ["is_encoder_decoder", "add_cross_attention"] {
        if keys.flag(key)? == Some(true) {
            return Err(keys.unsupported(key, "false"));
        }
    }
    if keys.object("pruned_heads")?.is_some_and(|heads| heads.names().next().is_some()) {
        return Err(keys.unsupported("pruned_heads", "nothing"));
    }
    if row.own_gate_matrix && keys.flag("attention_bias")? == Some(true) {
        // The projection to gates has no bias, unlike the other projections.
        return Err(keys.unsupported("attention_bias", "false"));
    }
    if keys.flag("is_causal")? == Some(false) {
        return Err(keys.unsupported("is_causal", "true"));
    }
    if keys.positive("clip_qkv")?.is_some() {
        return Err(keys.unsupported("clip_qkv", "null"));
    }
    let softcaps = ["attn_logit_softcapping", "final_logit_softcapping"];
    let multipliers = ["embedding_multiplier", "residual_multiplier", "logits_scaling"];
    let softcaps = softcaps.iter().filter(|_| row.softcaps.is_none());
    let multipliers = multipliers.iter().filter(|_| !row.multipliers);
    for key in softcaps.chain(multipliers) {
        if keys.positive_f32(key)?.is_some() {
            return Err(keys.unsupported(key, "null"));
        }
    }
    Ok(())
}

/// The norms of queries and keys.
fn qk_norm(row: &Description, keys: &Keys<'_>) -> Result<Option<QkNorm>, ModelError> {
    let used = !row.qk_norm_needs_flag || keys.flag("use_qk_norm")?.unwrap_or(false);
    Ok(row.qk_norm.filter(|_| used))
}

/// The factor of the logits.
fn logit_scale(row: &Description, keys: &Keys<'_>) -> Result<Option<f32>, ModelError> {
    if let Some((key, default)) = row.logit_scale {
        let factor = keys.positive_f32(key)?.unwrap_or(default);
        return Ok(Some(factor).filter(|factor| *factor != 1.0));
    }
    Ok(multiplier(keys, "logits_scaling")?.map(|divisor| 1.0 / divisor))
}

/// The factor of queries that grows with the position.
fn query_scaling(row: &Description, keys: &Keys<'_>) -> Result<Option<QueryScaling>, ModelError> {
    let Some(default) = row.query_scaling else { return Ok(None) };
    let Some(rope) = keys.object("rope_parameters")? else {
        return Ok(row.rotation.original().map(|step| QueryScaling { beta: default, step }));
    };
    let Some(beta) = rope.positive_f32("llama_4_scaling_beta")? else { return Ok(None) };
    match rope.size("original_max_position_embeddings")? {
        Some(step) => Ok(Some(QueryScaling { beta, step })),
        None => Err(rope.invalid("original_max_position_embeddings", "an integer")),
    }
}

/// The factor of the embeddings.
fn embedding_scale(
    row: &Description,
    keys: &Keys<'_>,
    hidden_size: usize,
) -> Result<Option<f32>, ModelError> {
    let of_size = row.scaled_embedding.then(|| (hidden_size as f64).sqrt() as f32);
    Ok(multiplier(keys, "embedding_multiplier")?.or(of_size))
}

/// A factor; `None` if it is missing or 1.
fn multiplier(keys: &Keys<'_>, key: &str) -> Result<Option<f32>, ModelError> {
    Ok(keys.positive_f32(key)?.filter(|factor| *factor != 1.0))
}

/// A soft cap. Unlike a missing key, null means that there is none.
fn softcap(keys: &Keys<'_>, key: &str, default: Option<f32>) -> Result<Option<f32>, ModelError> {
    Ok(if keys.given(key) { keys.positive_f32(key)? } else { default })
}

impl Bias {
    fn of(self, keys: &Keys<'_>) -> Result<bool, ModelError> {
        match self {
            Self::Never => Ok(false),
            Self::Always => Ok(true),
            Self::Key(key, default) => Ok(keys.flag(key)?.unwrap_or(default)),
        }
    }
}

impl AttentionScale {
    fn of(
        self,
        keys: &Keys<'_>,
        latent: Option<LatentSizes>,
        head_dim: usize,
    ) -> Result<f64, ModelError> {
        let query_dim = latent.map_or(head_dim, |latent| latent.query_dim());
        match self {
            Self::HeadDim => Ok((query_dim as f64).powf(-0.5)),
            Self::QueryScalar => {
                Ok(keys.positive("query_pre_attn_scalar")?.unwrap_or(256.0).powf(-0.5))
            }
            Self::Multiplier => Ok(keys.positive("attention_multiplier")?.unwrap_or(1.0)),
            Self::QkFactor => {
                let factor = keys.positive("qk_scale_factor")?.unwrap_or(3.87);
                Ok(factor * (query_dim as f64).powf(-0.5))
            }
            Self::One => Ok(1.0),
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
