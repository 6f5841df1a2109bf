//! The assistants of Gemma 4: small decoders that guess tokens for the model for which they were
//! trained, published in files of their own.
//!
//! The input of an assistant is a projection of `[embedding of a token, hidden state of the position
//! before it]`, both of the model. Its layers are layers of Gemma 4 that compute queries only: they
//! attend to the keys and values of the model's last layer of the same kind, with or without a
//! sliding window, at all positions before that of the token. So an assistant keeps nothing of a
//! sequence, and every guess has the position of the last token. A second projection of its result is
//! the hidden state for the next guess.
//!
//! The vocabulary may be divided into clusters: only the tokens in the best of them get logits.

use serde_json::Value;

use super::draft_head::check_sizes;
use super::tensors::LinearWeights;
use super::{
    DecoderConfig, Dialect, Keys, KeysAndValues, LayerConfig, TensorRole, TensorSpec, parse_json,
};
use crate::error::ModelError;

/// The `model_type` of the files.
const MODEL_TYPE: &str = "gemma4_assistant";
/// The object with the configuration of the layers.
const LAYERS: &str = "text_config";
/// The key of the number of layers that read the keys and values of others: all of them.
const SHARED: &str = "num_kv_shared_layers";
/// Maximum hidden size of a model.
const WIDTH_MAX: usize = 1 << 20;

/// The parts of an assistant that are not in the configuration of its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssistantConfig {
    /// The hidden size of the model.
    pub model_width: usize,
    /// How the vocabulary is divided; `None` if all tokens get logits.
    pub clusters: Option<ClusterConfig>,
}

/// The clusters of a vocabulary, which have the same number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Number of clusters, a divisor of the vocabulary size.
    pub count: usize,
    /// Number of clusters whose tokens get logits, from 1 to `count`.
    pub chosen: usize,
}

/// The weights of an assistant that are not those of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct AssistantWeights {
    /// The projection of an embedding and a hidden state, `[hidden_size, 2 * model_width]`.
    pub input: LinearWeights,
    /// The projection of the result to a hidden state, `[model_width, hidden_size]`.
    pub output: LinearWeights,
    /// The projection to the scores of the clusters, `[clusters, hidden_size]`.
    pub clusters: Option<LinearWeights>,
}

impl AssistantWeights {
    /// All tensors.
    #[must_use]
    pub fn tensors(self) -> Vec<TensorSpec> {
        let Self { input, output, clusters } = self;
        let mut list = Vec::new();
        [Some(input), Some(output), clusters]
            .into_iter()
            .flatten()
            .for_each(|projection| projection.list(&mut list));
        list
    }
}

impl AssistantConfig {
    /// The weights that the decoder does not have.
    #[must_use]
    pub fn own_weights(&self, decoder: &DecoderConfig) -> AssistantWeights {
        let linear = |name: &str, shape: [usize; 2]| LinearWeights {
            weight: TensorSpec {
                name: format!("{name}.weight"),
                shape: shape.to_vec(),
                role: TensorRole::Matrix,
            },
            bias: None,
        };
        let (width, model_width) = (decoder.hidden_size, self.model_width);
        AssistantWeights {
            input: linear("pre_projection", [width, 2 * model_width]),
            output: linear("post_projection", [model_width, width]),
            clusters: self
                .clusters
                .map(|clusters| linear("masked_embedding.centroids", [clusters.count, width])),
        }
    }
}

/// Whether a `config.json` describes an assistant.
pub(super) fn is_assistant(value: &Value) -> bool {
    value["model_type"] == MODEL_TYPE
}

/// The decoder of an assistant, whose layers are not those of a model yet, and its other parts. `file`
/// is its name in error messages.
///
/// # Errors
/// Those of [`DecoderConfig::from_json`], and [`ModelError::Unsupported`] for other assistants.
pub(crate) fn parse(
    file: &str,
    value: &Value,
) -> Result<(DecoderConfig, AssistantConfig), ModelError> {
    let root = Keys::root(file, value)?;
    let layers = root.object(LAYERS)?.ok_or_else(|| root.invalid(LAYERS, "an object"))?;
    for key in ["enable_moe_block", "use_double_wide_mlp", "attention_k_eq_v"] {
        if layers.flag(key)? == Some(true) {
            return Err(layers.unsupported(key, "false in an assistant"));
        }
    }
    let count = layers.size("num_hidden_layers")?;
    if layers.size(SHARED)?.is_some_and(|shared| Some(shared) != count) {
        return Err(layers.unsupported(SHARED, "num_hidden_layers in an assistant"));
    }
    // The layers are checked as those of a model, which have keys and values of the same sizes.
    let mut layer_json = value[LAYERS].clone();
    if let Some(keys) = layer_json.as_object_mut() {
        keys.insert(SHARED.to_owned(), 0.into());
        keys.insert("hidden_size_per_layer_input".to_owned(), 0.into());
        keys.insert("final_logit_softcapping".to_owned(), Value::Null);
    }
    let parsed = parse_json(file, &layer_json)?;
    let mut decoder = parsed.decoder;
    let is_gemma4 = decoder.architecture.description().dialect == Dialect::Gemma4;
    if !is_gemma4 || parsed.quantization.is_some() {
        return Err(layers.unsupported("model_type", "gemma4_text, without quantized weights"));
    }
    // The projections to keys and values are the model's, so the files have none.
    let attentions = decoder.layers.iter_mut().filter_map(LayerConfig::attention_mut);
    attentions.for_each(|attention| attention.keys_and_values = KeysAndValues::OfModel(0));
    // The embedding is the output matrix only: the input has the model's.
    decoder.tie_word_embeddings = false;
    let model_width = root.required("backbone_hidden_size")?;
    if model_width > WIDTH_MAX {
        return Err(root.invalid("backbone_hidden_size", &format!("at most {WIDTH_MAX}")));
    }
    let clusters = match root.flag("use_ordered_embeddings")? {
        Some(true) => Some(clusters(&root, decoder.vocab_size)?),
        _ => None,
    };
    Ok((decoder, AssistantConfig { model_width, clusters }))
}

fn clusters(root: &Keys<'_>, vocab_size: usize) -> Result<ClusterConfig, ModelError> {
    let count = root.size("num_centroids")?.unwrap_or(2048);
    if count > vocab_size || !vocab_size.is_multiple_of(count) {
        let expected = format!("a divisor of vocab_size, {vocab_size}");
        return Err(root.invalid("num_centroids", &expected));
    }
    let key = "centroid_intermediate_top_k";
    let chosen = root.size(key)?.unwrap_or(32);
    if chosen > count {
        return Err(root.invalid(key, &format!("at most num_centroids, {count}")));
    }
    Ok(ClusterConfig { count, chosen })
}

/// Makes the decoder of an assistant that of one for `model`: its layers read the keys and values of
/// the model's layers, and it has the model's context length and embeddings.
///
/// # Errors
/// [`ModelError::InvalidKey`] if the assistant was made for another model.
pub(crate) fn fit(
    file: &str,
    mut decoder: DecoderConfig,
    config: &AssistantConfig,
    model: &DecoderConfig,
) -> Result<DecoderConfig, ModelError> {
    if model.architecture.description().dialect != Dialect::Gemma4 {
        let (expected, got) = ("an assistant for Gemma 4", format!("{:?}", model.architecture));
        return Err(ModelError::unsupported(file, "model_type", expected, got));
    }
    check_sizes(
        file,
        [
            ("backbone_hidden_size", config.model_width, model.hidden_size),
            ("vocab_size", decoder.vocab_size, model.vocab_size),
        ],
    )?;
    let kept = model.kept_indices();
    let own = model.layers.iter().zip(&kept).filter_map(|(layer, kept)| {
        let attention = layer.attention().filter(|attention| attention.has_own_kv())?;
        Some((attention, *kept.first()?))
    });
    let own: Vec<_> = own.collect();
    for attention in decoder.layers.iter_mut().filter_map(LayerConfig::attention_mut) {
        let is_local = attention.sliding_window.is_some();
        let source = own.iter().rev().find(|(own, _)| own.sliding_window.is_some() == is_local);
        let sizes = (attention.kv_heads, attention.head_dim);
        match source {
            Some((own, kept)) if (own.kv_heads, own.head_dim) == sizes => {
                attention.keys_and_values = KeysAndValues::OfModel(*kept);
            }
            _ => {
                let kind = if is_local { "a window" } else { "no window" };
                let expected = format!(
                    "layers with {kind} whose keys and values have the sizes of the model's, {:?}",
                    source.map(|(own, _)| (own.kv_heads, own.head_dim))
                );
                let got = format!("{sizes:?}");
                return Err(ModelError::unsupported(file, "head_dim", expected, got));
            }
        }
    }
    decoder.max_positions = model.max_positions;
    decoder.embedding_scale = model.embedding_scale;
    Ok(decoder)
}

#[cfg(test)]
mod tests;
