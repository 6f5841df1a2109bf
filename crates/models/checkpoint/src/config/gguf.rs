//! Parses the metadata of a GGUF file into a [`DecoderConfig`], and maps tensor names.
//!
//! Some parts of a model are different in GGUF files and in Hugging Face's files. The offset is
//! already added to Gemma's norms, Llama 3.1's rope scaling is a tensor of divisors, and the rows
//! of Llama's q and k projections have another order, which [`Weights`](crate::Weights) reverses.

mod delta_net;
mod encoder;
mod experts;
mod gemma4;
mod latent;
mod layers;
mod mamba2;
mod metadata;
mod mixers;
mod names;
mod rope;

use std::collections::HashMap;

use stolon_backend::Pooling;
use stolon_kernels::TensorType;

use super::architecture::{AttentionScale, Description, Dialect, Gate};
use super::{
    Activation, Architecture, AttentionConfig, DecoderConfig, FeedForwardConfig, GateFunction,
    KeysAndValues, LatentConfig, LatentSizes, LayerConfig, MlpConfig, NormKind, NormsConfig,
    PlainFunction, QkNorm, TensorRole, TensorSpec, draft_head,
};
use crate::error::{ModelError, quoted};
use crate::gguf::{Header, Value};
pub(crate) use encoder::{EncoderKind, encoder, encoder_tensor_name, largest_edge, pixels};
pub(crate) use metadata::Metadata;
pub(crate) use names::{mtp_tensor_name, tensor_name};

/// Reads the content of a small tensor of F32 values, if the file has it.
pub(crate) type SmallTensors<'a> = dyn Fn(&str) -> Result<Option<Vec<f32>>, ModelError> + 'a;

/// How embeddings are computed, from `pooling_type`; `None` if the model is not an embedding model.
pub(crate) fn pooling(header: &Header) -> Result<Option<Pooling>, ModelError> {
    let (_, prefix) = architecture(header)?;
    let keys = Metadata { header, prefix };
    let Some(value) = keys.value("pooling_type") else { return Ok(None) };
    match value.as_u64() {
        Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(3) => Ok(Some(Pooling::Last)),
        Some(4) if rank_matrix(header).is_some() => Ok(None),
        _ => {
            let expected = "0 (none), 1 (mean), 3 (last), or 4 (rank) with a matrix of two rows";
            Err(keys.unsupported("pooling_type", expected, value.shown()))
        }
    }
}

/// The matrix of the two answers of a reranker, `[2, hidden_size]`, if the file has one. Its rows
/// are those of the output matrix for the tokens that say yes and no.
pub(crate) fn rank_matrix(header: &Header) -> Option<TensorSpec> {
    const NAME: &str = "cls.output.weight";
    let shape = header.tensors.get(NAME)?.shape.clone();
    let width = header.tensors.get("token_embd.weight")?.shape.get(1)?;
    (shape == [2, *width]).then(|| TensorSpec {
        name: NAME.to_owned(),
        shape,
        role: TensorRole::Matrix,
    })
}

/// Refuses a file whose head for multi-token prediction has more than one layer, for a model that is
/// to use it.
pub(crate) fn check_one_mtp_layer(header: &Header) -> Result<(), ModelError> {
    let (_, prefix) = architecture(header)?;
    let keys = Metadata { header, prefix };
    match keys.prediction_layers()? {
        0 | 1 => Ok(()),
        count => Err(keys.unsupported("nextn_predict_layers", "1 with `mtp`", count)),
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
    let heads = keys.heads(row, hidden_size / num_heads, layer_count)?;
    let Heads { latent, global_dim, head_dim, rotary_dim, score_scale } = heads;
    let scale = |key: &str| keys.factor(key).map(|factor| factor.filter(|factor| *factor != 1.0));
    let has = |name: &str| header.tensors.contains_key(name);
    let max_positions = keys.required_size("context_length")?;
    let rope = keys.rope(row, (rotary_dim.unwrap_or(global_dim), max_positions), tensors)?;
    let (kv_heads, with_attention) = match (latent, row.dialect) {
        // Latent attention has one KV head, and layers of Gemma 4 may differ.
        (Some(_), _) | (None, Dialect::Gemma4) => (1, None),
        (None, _) => keys.kv_heads(row, num_heads, layer_count)?,
    };
    let attention = AttentionConfig {
        heads: num_heads,
        kv_heads,
        head_dim,
        rotary_dim: rotary_dim.unwrap_or(head_dim),
        rope: Some(0),
        sliding_window: None,
        keys_and_values: KeysAndValues::Own,
        // `add_parts` sets the biases, when the layers that have attention are known.
        qkv_bias: false,
        output_bias: false,
        sinks: false,
        qk_norm: None,
        output_gate: row.output_gate,
        value_norm: row.value_norm,
        selective: false,
        scale: score_scale,
        softcap: keys.softcap(row, "attn_logit_softcapping", |caps| caps.attention)?,
        query_scaling: keys.query_scaling(row)?,
        // Converters have already multiplied the weights by this factor.
        output_factor: 1.0,
    };
    let mlp = MlpConfig {
        width: keys.dense_width(row)?,
        activation: activation(row),
        bias: false,
        output_factor: 1.0,
    };
    let plain = LayerConfig::new(attention, mlp);
    let (ropes, mut layers) = keys.layers(row, layer_count, rope, &plain)?;
    if row.dialect == Dialect::Gemma4 {
        keys.gemma4_layers([global_dim, head_dim], num_heads, &mut layers)?;
    }
    keys.replace_attention(row, with_attention, &mut layers)?;
    keys.delta_net(row, &mut layers)?;
    keys.add_parts(row, &mut layers);
    if let Some(sizes) = latent {
        LatentConfig::replace_attention(&header.file, sizes, &mut layers)?;
    }
    keys.experts(row, &mut layers)?;
    let config = DecoderConfig {
        architecture,
        vocab_size: vocab_size(header, hidden_size)?,
        hidden_size,
        norms: NormsConfig::of(row, keys.norm_eps(row.norm_kind)?).in_gguf(),
        max_positions: ropes[0].context(max_positions),
        tie_word_embeddings: !has("output.weight"),
        head_bias: false,
        per_layer_input: keys.per_layer_input(&mlp)?,
        layer_scales: row.dialect == Dialect::Gemma4 && has("blk.0.layer_output_scale.weight"),
        embedding_scale: scale("embedding_scale")?
            .or(row.scaled_embedding.then(|| (hidden_size as f64).sqrt() as f32)),
        residual_scale: scale("residual_scale")?,
        logit_scale: scale("logit_scale")?.map(|factor| logit_factor(row, factor)),
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
    latent: Option<LatentSizes>,
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

    /// Adds the parts of attention and of MLPs for which the file has tensors. The first layer with
    /// attention, or with an MLP, determines the parts of all layers.
    fn add_parts(&self, row: &Description, layers: &mut [LayerConfig]) {
        let has = |layer: usize, name: &str| {
            self.header.tensors.contains_key(&format!("blk.{layer}.{name}"))
        };
        let first = layers.iter().position(LayerConfig::has_attention).unwrap_or(0);
        for attention in layers.iter_mut().filter_map(LayerConfig::attention_mut) {
            attention.qkv_bias = has(first, "attn_q.bias") || has(first, "attn_qkv.bias");
            attention.output_bias = has(first, "attn_output.bias");
            attention.sinks = has(first, "attn_sinks.weight");
            attention.qk_norm = (row.qk_norm.filter(|norm| *norm == QkNorm::Position)).or(has(
                first,
                "attn_q_norm.weight",
            )
            .then_some(QkNorm::Head));
        }
        let first = layers.iter().position(|layer| layer.mlp.is_some()).unwrap_or(0);
        for layer in layers {
            if let Some(FeedForwardConfig::Dense(mlp)) = &mut layer.mlp {
                mlp.bias = has(first, "ffn_up.bias") || has(first, "ffn_up_exps.bias");
            }
        }
    }

    /// The epsilon of norms. Files of Nemotron-H have the key of layer norms, although the norms
    /// are RMS norms.
    fn norm_eps(&self, kind: NormKind) -> Result<f32, ModelError> {
        let (rms, layer) = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon");
        let key = match kind {
            NormKind::Rms if self.value(rms).is_some() || self.value(layer).is_none() => rms,
            NormKind::Rms | NormKind::Layer | NormKind::LayerWithoutBias => layer,
        };
        Ok(self.required_float(key)? as f32)
    }
}

/// The factor of the logits. Files of Granite have its reciprocal.
fn logit_factor(row: &Description, number: f32) -> f32 {
    if row.logit_scale.is_some() { number } else { 1.0 / number }
}

fn activation(row: &Description) -> Activation {
    match (row.gate, row.mlp_gate) {
        (Gate::ClampedSwiglu, _) => GateFunction::ClampedSwiglu { alpha: 1.702, limit: 7.0 }.into(),
        (Gate::Key(_, function), true) => function.into(),
        (Gate::Key(..), false) => Activation::Plain(PlainFunction::GeluTanh),
        (Gate::SquaredRelu, _) => Activation::Plain(PlainFunction::SquaredRelu),
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

/// The architecture, and its name in the file, which is also the prefix of keys.
pub(crate) fn architecture(header: &Header) -> Result<(Architecture, &str), ModelError> {
    let key = "general.architecture";
    let value = header.metadata.get(key);
    let name = value.and_then(Value::as_text).unwrap_or_default();
    if let Some(error) = draft_head::refused(&header.file, key, name) {
        return Err(error);
    }
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
