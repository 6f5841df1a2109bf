//! Parses the metadata of a GGUF file into a [`DecoderConfig`], and maps tensor names.
//!
//! Some parts of a model differ between GGUF files and Hugging Face's: the offset is already added
//! to Gemma's norms, Llama 3.1's rope scaling is a tensor of divisors, and the rows of Llama's q
//! and k projections are in a different order, which [`Weights`](crate::Weights) reverses.

mod convolutions;
mod delta_net;
mod encoder;
mod experts;
mod gemma4;
mod latent;
mod layers;
mod mamba2;
mod metadata;
mod names;
mod rope;

use std::collections::HashMap;

use stolon_backend::Pooling;
use stolon_kernels::TensorType;

use super::architecture::{AttentionScale, Description, Gate};
use super::{Activation, Architecture, DecoderConfig, LatentConfig, LayerConfig, NormKind, QkNorm};
use crate::error::{ModelError, quoted};
use crate::gguf::{Header, Value};
pub(crate) use encoder::{EncoderKind, encoder, encoder_tensor_name, largest_edge, pixels};
use metadata::Metadata;
pub(crate) use names::tensor_name;

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
    let row = architecture.description();
    keys.refuse_options(row)?;
    let hidden_size = keys.required_size("embedding_length")?;
    let num_heads = keys.required_size("attention.head_count")?;
    let layer_count = keys.layer_count()?;
    keys.log_prediction_layers()?;
    let heads = keys.heads(row, hidden_size / num_heads, layer_count)?;
    let Heads { latent, global_dim, head_dim, rotary_dim, score_scale } = heads;
    let scale = |key: &str| keys.factor(key).map(|factor| factor.filter(|factor| *factor != 1.0));
    let has = |name: &str| header.tensors.contains_key(name);
    let max_positions = keys.required_size("context_length")?;
    let rope = keys.rope(row, (rotary_dim.unwrap_or(global_dim), max_positions), tensors)?;
    let (ropes, mut layers) = keys.layers(row, layer_count, rope)?;
    let experts = keys.experts(row, &mut layers)?;
    LatentConfig::mark_layers(latent, &mut layers);
    let num_kv_heads = match (latent, row.gemma4) {
        (Some(_), _) => 1,
        (None, true) => keys.gemma4_layers([global_dim, head_dim], num_heads, &mut layers)?,
        (None, false) => keys.kv_heads(row, num_heads, &mut layers)?,
    };
    let convolution_taps = keys.convolution_taps(&layers)?;
    let mamba2 = keys.mamba2(&layers)?;
    let delta_net = keys.delta_net(row, &mut layers)?;
    let attention = layers.iter().position(LayerConfig::has_attention).unwrap_or(0);
    let attention_has = |name: &str| has(&format!("blk.{attention}.{name}"));
    let mlp = layers.iter().position(|layer| layer.mlp.is_some()).unwrap_or(0);
    let mlp_has = |name: &str| has(&format!("blk.{mlp}.{name}"));
    let config = DecoderConfig {
        architecture,
        vocab_size: vocab_size(header, hidden_size)?,
        hidden_size,
        intermediate_size: keys.dense_width(row)?,
        experts,
        convolution_taps,
        latent,
        delta_net,
        mamba2,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        rms_norm_eps: keys.norm_eps(row.norm_kind)?,
        norm_offset: 0.0,
        max_positions: ropes[0].context(max_positions),
        tie_word_embeddings: !has("output.weight"),
        head_bias: false,
        qkv_bias: attention_has("attn_q.bias") || attention_has("attn_qkv.bias"),
        output_bias: attention_has("attn_output.bias"),
        output_gate: row.output_gate,
        mlp_bias: mlp_has("ffn_up.bias") || mlp_has("ffn_up_exps.bias"),
        qk_norm: (row.qk_norm.filter(|norm| *norm == QkNorm::Position))
            .or(attention_has("attn_q_norm.weight").then_some(QkNorm::Head)),
        value_norm: row.value_norm,
        norms: row.norms,
        norm_kind: row.norm_kind,
        activation: activation(row.gate),
        mlp_gate: row.mlp_gate,
        per_layer_input: keys.per_layer_input()?,
        layer_scales: row.gemma4 && has("blk.0.layer_output_scale.weight"),
        selective_attention: false,
        attention_sinks: attention_has("attn_sinks.weight"),
        embedding_scale: scale("embedding_scale")?
            .or(row.scaled_embedding.then(|| (hidden_size as f64).sqrt() as f32)),
        residual_scale: scale("residual_scale")?,
        // Converters multiply the weights.
        multipliers: None,
        logit_scale: scale("logit_scale")?.map(|factor| logit_factor(row, factor)),
        attention_scale: score_scale,
        query_scaling: keys.query_scaling(row)?,
        attention_softcap: keys.softcap(row, "attn_logit_softcapping", |caps| caps.attention)?,
        logit_softcap: keys.softcap(row, "final_logit_softcapping", |caps| caps.logits)?,
        ropes,
        layers,
        dtype: most_common_type(header),
    };
    config.check(&header.file)?;
    Ok(config)
}

/// The sizes of heads, and the factor of the scores.
struct Heads {
    latent: Option<LatentConfig>,
    /// Number of elements of a head in layers without a sliding window.
    global_dim: usize,
    head_dim: usize,
    rotary_dim: Option<usize>,
    score_scale: f32,
}

impl Metadata<'_> {
    /// The sizes of heads. `default_dim` is the number of elements of a head if the key is missing.
    fn heads(
        &self,
        row: &Description,
        default_dim: usize,
        layer_count: usize,
    ) -> Result<Heads, ModelError> {
        let latent = self.latent(row)?;
        let global_dim = self.size("attention.key_length")?.unwrap_or(default_dim);
        let (head_dim, rotary_dim) = match latent {
            Some(latent) => (latent.kept_dim(), Some(latent.rotary_dim)),
            None => {
                let rotary_dim = self.rotary_dim(row, global_dim)?;
                (self.local_head_dim(row, global_dim)?, rotary_dim)
            }
        };
        let is_wide = row.gguf.wide_scale_layers == Some(layer_count);
        let own_dim = latent.map_or(head_dim, |latent| latent.query_dim());
        let score_dim = if is_wide { default_dim } else { own_dim } as f32;
        let factor = self.latent_score_factor(latent)?;
        let score_scale = match row.attention_scale {
            AttentionScale::One => 1.0,
            _ => self.factor("attention.scale")?.unwrap_or(factor / score_dim.sqrt()),
        };
        Ok(Heads { latent, global_dim, head_dim, rotary_dim, score_scale })
    }

    /// What norms add to the mean square or the variance. Files of Nemotron-H have the key of layer
    /// norms in the place of that of RMS norms.
    fn norm_eps(&self, kind: NormKind) -> Result<f32, ModelError> {
        let (rms, layer) = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon");
        let key = match kind {
            NormKind::Rms if self.value(rms).is_some() || self.value(layer).is_none() => rms,
            NormKind::Rms | NormKind::Layer | NormKind::LayerWithoutBias => layer,
        };
        Ok(self.required_float(key)? as f32)
    }
}

/// The factor of the logits. The number in files of Granite is a divisor.
fn logit_factor(row: &Description, number: f32) -> f32 {
    if row.logit_scale.is_some() { number } else { 1.0 / number }
}

fn activation(gate: Gate) -> Activation {
    match gate {
        Gate::ClampedSwiglu => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        Gate::Gelu | Gate::GeluAct => Activation::GeluTanh,
        Gate::SquaredRelu => Activation::SquaredRelu,
        Gate::Silu => Activation::Silu,
    }
}

/// Number of rows of the embedding.
fn vocab_size(header: &Header, hidden_size: usize) -> Result<usize, ModelError> {
    let embedding = "token_embd.weight";
    match header.tensors.get(embedding) {
        Some(info) => Ok(info.shape.first().copied().unwrap_or(0)),
        None => Err(ModelError::MissingTensor {
            file: header.file.clone(),
            tensor: embedding.into(),
            expected: vec![0, hidden_size],
        }),
    }
}

/// The architecture and the name that the file has for it, with which the keys begin.
pub(crate) fn architecture(header: &Header) -> Result<(Architecture, &str), ModelError> {
    let value = header.metadata.get("general.architecture");
    let known = value.and_then(Value::as_text).and_then(|name| {
        let architecture = Architecture::from_gguf(name)?;
        let window = header.metadata.get(&format!("{name}.attention.sliding_window"));
        let has_window = window.is_some_and(|window| window.as_u64() != Some(0));
        let windowed = architecture.description().gguf.windowed.filter(|_| has_window);
        Some((windowed.unwrap_or(architecture), name))
    });
    known.ok_or_else(|| ModelError::UnknownArchitecture {
        file: header.file.clone(),
        got: value.map_or_else(|| "nothing".into(), |name| quoted(&name.shown())),
        expected: Architecture::gguf_names(),
    })
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
