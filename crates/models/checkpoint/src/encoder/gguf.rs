//! Reads the configuration of an encoder from the metadata of a GGUF file, as llama.cpp's converter
//! writes it.
//!
//! RoBERTa and DistilBERT have the architecture `bert`: the converter has removed the rows of
//! RoBERTa's positions that are not used, and DistilBERT has no token types. The function of the
//! MLPs is not in the file. It is taken to be GELU, as in llama.cpp, but with the error function, as in
//! transformers.

use super::{
    EncoderActivation, EncoderConfig, EncoderFamily, EncoderLayer, EncoderNorm, EncoderRope,
    LearnedPositions, NormOrder, QueryKeyNorms, ScoreBias, TensorNames, add_experts,
};
use crate::config::LAYERS_MAX;
use crate::config::gguf::Metadata;
use crate::error::ModelError;
use crate::gguf::{Header, Value};

/// The base of rotary embeddings in llama.cpp if a file has none.
const ROPE_THETA: f64 = 1e4;

/// The name of the architecture in the file, which is the prefix of keys.
pub(crate) fn prefix(header: &Header) -> &str {
    header.metadata.get("general.architecture").and_then(Value::as_text).unwrap_or_default()
}

/// The family of the model in the file with the header `header`; `None` if it is not an encoder.
pub(crate) fn family(header: &Header) -> Option<EncoderFamily> {
    EncoderFamily::of_gguf(prefix(header))
}

/// Reads the configuration of an encoder.
///
/// # Errors
/// [`ModelError::InvalidKey`], and [`ModelError::Unsupported`] for an option that is not
/// implemented.
pub(crate) fn parse(header: &Header, family: EncoderFamily) -> Result<EncoderConfig, ModelError> {
    let keys = Metadata { header, prefix: prefix(header) };
    refuse(&keys, family)?;
    let has = |name: &str| header.tensors.contains_key(name);
    let rows = |name: &str| {
        let shape = header.tensors.get(name).map(|info| info.shape.as_slice());
        shape.and_then(|shape| shape.first().copied()).unwrap_or(0)
    };
    let hidden_size = keys.required_size("embedding_length")?;
    let heads = keys.required_size("attention.head_count")?;
    let max_positions = keys.required_size("context_length")?;
    let is_gemma = family == EncoderFamily::Gemma;
    let is_rms = is_gemma || family == EncoderFamily::EuroBert;
    let head_dim = match is_gemma {
        true => keys.required_size("attention.key_length")?,
        false => hidden_size / heads,
    };
    let eps =
        if is_rms { "attention.layer_norm_rms_epsilon" } else { "attention.layer_norm_epsilon" };
    let config = EncoderConfig {
        family,
        names: TensorNames::Gguf,
        tasks: None,
        prefix: String::new(),
        vocab_size: rows("token_embd.weight"),
        token_types: rows("token_types.weight"),
        hidden_size,
        max_positions,
        learned_positions: (family == EncoderFamily::Bert)
            .then(|| LearnedPositions { rows: rows("position_embd.weight"), padding_id: None }),
        score_bias: (family == EncoderFamily::JinaBert).then_some(ScoreBias::Alibi),
        embedding_scale: is_gemma.then(|| (hidden_size as f32).sqrt()),
        embedding_norm: !is_rms,
        // The converter has added 1 to the weights of Gemma's norms.
        norm: if is_rms { EncoderNorm::Rms { offset: 0.0 } } else { EncoderNorm::Layer },
        norm_eps: keys.required_float(eps)? as f32,
        norm_bias: has("token_embd_norm.bias"),
        order: match family {
            EncoderFamily::ModernBert | EncoderFamily::EuroBert => NormOrder::Before,
            EncoderFamily::Gemma => NormOrder::Around,
            _ => NormOrder::After,
        },
        heads,
        kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        query_key_norms: if is_gemma { QueryKeyNorms::Heads } else { QueryKeyNorms::None },
        score_scale: match keys.float("attention.scale")? {
            Some(scale) => scale as f32,
            None => 1.0 / (head_dim as f32).sqrt(),
        },
        attention_bias: has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"),
        inner_size: keys.required_size("feed_forward_length")?,
        activation: match family {
            EncoderFamily::NomicBert | EncoderFamily::EuroBert => EncoderActivation::SiluGate,
            EncoderFamily::ModernBert | EncoderFamily::JinaBert => EncoderActivation::GeluGate,
            EncoderFamily::Gemma => EncoderActivation::GeluTanhGate,
            _ => EncoderActivation::Gelu,
        },
        inner_bias: has("blk.0.ffn_up.bias"),
        down_bias: has("blk.0.ffn_down.bias"),
        layers: layers(&keys, family)?,
    };
    config.check(&header.file)?;
    Ok(config)
}

/// Refuses options that would change the output.
fn refuse(keys: &Metadata<'_>, family: EncoderFamily) -> Result<(), ModelError> {
    if let Some(causal) = keys.value("attention.causal")
        && causal.as_bool() != Some(false)
    {
        let expected = "false, because an encoder attends in both directions";
        return Err(keys.unsupported("attention.causal", expected, causal.shown()));
    }
    if let Some(kind) = keys.value("rope.scaling.type")
        && kind.as_text() != Some("none")
    {
        return Err(keys.unsupported("rope.scaling.type", "`none`", kind.shown()));
    }
    if family != EncoderFamily::NomicBertMoe {
        keys.only("expert_count", 0.0)?;
    }
    if family == EncoderFamily::JinaBert {
        keys.only("attention.max_alibi_bias", 8.0)?;
    }
    Ok(())
}

/// The rotary embedding and the window of each layer.
fn layers(keys: &Metadata<'_>, family: EncoderFamily) -> Result<Vec<EncoderLayer>, ModelError> {
    let count = keys.required_size("block_count")?;
    if count > LAYERS_MAX {
        let expected = format!("an integer from 1 to {LAYERS_MAX}");
        return Err(keys.invalid("block_count", &expected, count));
    }
    let rope = EncoderRope::unscaled(keys.float("rope.freq_base")?.unwrap_or(ROPE_THETA));
    let full = match family {
        EncoderFamily::NomicBert
        | EncoderFamily::NomicBertMoe
        | EncoderFamily::ModernBert
        | EncoderFamily::Gemma
        | EncoderFamily::EuroBert => rope.layer(None),
        _ => EncoderLayer::default(),
    };
    let mut layers = vec![full; count];
    if family == EncoderFamily::NomicBertMoe {
        let keys =
            ["expert_count", "expert_used_count", "feed_forward_length", "moe_every_n_layers"]
                .map(|key| keys.required_size(key));
        let [count, per_token, width, step] = keys;
        add_experts(&mut layers, step?, [count?, per_token?, width?]);
    }
    // Every such layer sees all positions, the first or the last one of a group.
    let (step, last) = match family {
        EncoderFamily::ModernBert => (3, 0),
        EncoderFamily::Gemma => (6, 1),
        _ => return Ok(layers),
    };
    // The file has the length of the whole window.
    let window = Some(keys.required_size("attention.sliding_window")? / 2);
    let rope = EncoderRope::unscaled(keys.float("rope.freq_base_swa")?.unwrap_or(ROPE_THETA));
    let sliding = rope.layer(window);
    let key = "attention.sliding_window_pattern";
    let is_local: Vec<bool> = match keys.value(key) {
        Some(Value::Bools(flags)) if flags.len() == count => flags.clone(),
        Some(Value::Bools(flags)) => {
            return Err(keys.invalid(
                key,
                &format!("{count} booleans, one per layer"),
                flags.len(),
            ));
        }
        _ => {
            let step = keys.size(key)?.unwrap_or(step);
            (0..count).map(|layer| !(layer + last).is_multiple_of(step)).collect()
        }
    };
    Ok(is_local.into_iter().map(|local| if local { sliding } else { full }).collect())
}
