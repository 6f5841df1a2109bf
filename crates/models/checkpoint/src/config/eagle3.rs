//! EAGLE-3 heads (<https://arxiv.org/abs/2503.01840>), as SpecForge, speculators and the authors
//! publish them for a model, in files of their own.
//!
//! The hidden states of a position after several layers of the model are joined and projected to one
//! vector, the *features* of the position. The layer of the head is a layer of Llama, except that its
//! queries, keys and values are projections of `[norm(embedding of a token), norm(features of the
//! position before it)]`, and that its residual stream begins with the features. Its result is used in
//! place of features after the first guess. The output matrix may have fewer tokens than the model.

use serde_json::{Map, Value};

use super::draft_head::check_sizes;
use super::tensors::LinearWeights;
use super::{
    AttentionWeights, DecoderConfig, DecoderWeights, Dialect, Keys, MixerWeights, NormWeights,
    RopeScaling, TensorRole, TensorSpec, parse_json,
};
use crate::error::ModelError;

/// The names of the classes of supported heads. Heads of the authors have the name of Llama's class.
const CLASSES: [&str; 5] = [
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
];
/// The object with the configuration of the layer in files of speculators.
const LAYER: &str = "transformer_layer_config";
/// The key of the layers whose hidden states are read.
const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";
/// The key of a description of quantized weights.
const QUANTIZATION: &str = "quantization_config";
/// Maximum number of hidden states that a head reads of a position. Known heads read three.
const STATES_MAX: usize = 16;
/// The least number of layers of a model for which a head may leave out [`LAYER_IDS`].
const LAYERS_MIN: usize = 7;
/// Keys of a head, which are not keys of its layer.
const OWN_KEYS: [&str; 10] = [
    LAYER_IDS,
    "draft_vocab_size",
    "eagle_config",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    QUANTIZATION,
    "target_hidden_size",
    "target_model_type",
];

/// How the hidden states of a position are normalized before they are projected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureNorm {
    /// They are not.
    None,
    /// All together (`norm_before_fc`).
    Joined,
    /// Each has its own weights (`fc_norm`).
    Each,
}

/// The parts of an EAGLE-3 head that are not in the configuration of its layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3Config {
    /// Number of tokens that can be guessed, which is the number of rows of the output matrix; at
    /// most the vocabulary size of the model.
    pub vocab_size: usize,
    /// For each hidden state that is read of a position, after how many layers of the model it is
    /// read: 0 for the embedding, up to the number of layers. From 1 to 16 numbers.
    pub layers: Vec<usize>,
    /// How these states are normalized.
    pub feature_norm: FeatureNorm,
    /// Whether the residual stream begins with the normalized features.
    pub norm_before_residual: bool,
    /// Whether the result of the layer is used after the last norm in place of features.
    pub norm_output: bool,
}

/// The weights of an EAGLE-3 head that are not those of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3Weights {
    /// The norm of the features, `[hidden_size]`.
    pub hidden_norm: NormWeights,
    /// The norms of the hidden states of the model: none, one of all states together, `[states *
    /// hidden_size]`, or one of each, `[hidden_size]`.
    pub state_norms: Vec<NormWeights>,
    /// The projection of the states to the features, `[hidden_size, states * hidden_size]`.
    pub projection: LinearWeights,
}

impl Eagle3Weights {
    /// All tensors.
    #[must_use]
    pub fn tensors(self) -> Vec<TensorSpec> {
        let Self { hidden_norm, state_norms, projection } = self;
        let mut list = Vec::new();
        hidden_norm.list(&mut list);
        state_norms.into_iter().for_each(|norm| norm.list(&mut list));
        projection.list(&mut list);
        list
    }
}

impl Eagle3Config {
    /// The weights of the head's decoder: those of a decoder with this configuration, except that the
    /// projections of attention read two rows, and that the output matrix has the tokens that can be
    /// guessed.
    pub(super) fn decoder_weights(&self, decoder: &DecoderConfig) -> DecoderWeights {
        let mut weights = decoder.weights();
        for mixer in weights.layers.iter_mut().flat_map(|layer| &mut layer.mixers) {
            if let MixerWeights::Attention(AttentionWeights { qkv, .. }) = mixer {
                let parts = [Some(&mut qkv.query), qkv.key.as_mut(), qkv.value.as_mut()];
                parts.into_iter().flatten().for_each(|part| part.weight.shape[1] *= 2);
            }
        }
        if let Some(head) = &mut weights.head {
            head.shape[0] = self.vocab_size;
        }
        weights
    }

    /// The weights that the decoder does not have.
    #[must_use]
    pub fn input_weights(&self, decoder: &DecoderConfig) -> Eagle3Weights {
        let (width, states) = (decoder.hidden_size, self.layers.len());
        let mut joined = decoder.residual_norm("input_norm");
        joined.weight.shape = vec![states * width];
        let state_norms = match self.feature_norm {
            FeatureNorm::None => Vec::new(),
            FeatureNorm::Joined => vec![joined],
            FeatureNorm::Each => (0..states)
                .map(|state| decoder.residual_norm(&format!("fc_norm.{state}")))
                .collect(),
        };
        let weight = TensorSpec {
            name: "fc.weight".to_owned(),
            shape: vec![width, states * width],
            role: TensorRole::Matrix,
        };
        Eagle3Weights {
            hidden_norm: decoder.residual_norm("model.layers.0.hidden_norm"),
            state_norms,
            projection: LinearWeights { weight, bias: None },
        }
    }
}

/// Whether a `config.json` describes an EAGLE-3 head.
pub(super) fn is_eagle3(value: &Value) -> bool {
    let class = class(value);
    let is_named = class.is_some_and(|class| class.to_ascii_lowercase().contains("eagle3"));
    // The heads of the authors have the class of Llama.
    let has_own_vocabulary = || {
        let is_llama = class.is_none_or(|class| class == "LlamaForCausalLM");
        is_llama && !value["draft_vocab_size"].is_null() && value["num_hidden_layers"] == 1
    };
    is_named || value["speculators_model_type"] == "eagle3" || has_own_vocabulary()
}

fn class(value: &Value) -> Option<&str> {
    value.get("architectures")?.get(0)?.as_str()
}

/// The decoder of an EAGLE-3 head, and its other parts. `layer_count` is the number of layers of the
/// model, from which the layers follow whose states are read if the file does not say it. `file` is
/// its name in error messages.
///
/// # Errors
/// Those of [`DecoderConfig::from_json`], and [`ModelError::Unsupported`] for other heads.
pub(crate) fn parse(
    file: &str,
    value: &Value,
    layer_count: usize,
) -> Result<(DecoderConfig, Eagle3Config), ModelError> {
    let root = Keys::root(file, value)?;
    if class(value).is_some_and(|class| !CLASSES.contains(&class)) {
        return Err(root.unsupported("architectures", &format!("one of {}", CLASSES.join(", "))));
    }
    let own = root.object("eagle_config")?;
    check_flags(own.as_ref())?;
    let layer = root.object(LAYER)?;
    let keys = layer.as_ref().unwrap_or(&root);
    for keys in [&root, keys] {
        if keys.value(QUANTIZATION).is_some() {
            return Err(
                keys.unsupported(QUANTIZATION, "null: the weights of a head are not quantized")
            );
        }
    }
    check_layer(keys)?;
    let decoder = parse_json(file, &layer_json(value))?;
    decoder.notes.iter().for_each(|note| tracing::warn!("{note}"));
    let decoder = decoder.decoder;
    if let Some(RopeScaling::Divisors { .. }) = decoder.ropes.first().map(|rope| &rope.scaling) {
        return Err(keys.unsupported("rope_scaling", "default, linear, llama3 or yarn"));
    }
    let vocab_size = root.size("draft_vocab_size")?.unwrap_or(decoder.vocab_size);
    if vocab_size > decoder.vocab_size {
        let expected = format!("at most vocab_size, {}", decoder.vocab_size);
        return Err(root.invalid("draft_vocab_size", &expected));
    }
    if root.size("target_hidden_size")?.is_some_and(|size| size != decoder.hidden_size) {
        let expected = format!("hidden_size, {}", decoder.hidden_size);
        return Err(root.unsupported("target_hidden_size", &expected));
    }
    // NVIDIA's files have this flag in the inner object.
    let joined = [Some(&root), own.as_ref()].into_iter().flatten();
    let joined = joined.map(|keys| keys.flag("norm_before_fc")).collect::<Result<Vec<_>, _>>()?;
    let feature_norm = match (joined.contains(&Some(true)), root.flag("fc_norm")?) {
        (false, Some(true)) => FeatureNorm::Each,
        (true, Some(true)) => return Err(root.unsupported("fc_norm", "false with norm_before_fc")),
        (true, _) => FeatureNorm::Joined,
        (false, _) => FeatureNorm::None,
    };
    let config = Eagle3Config {
        vocab_size,
        layers: layers(&root, own.as_ref(), layer_count)?,
        feature_norm,
        // The defaults of vLLM.
        norm_before_residual: root.flag("norm_before_residual")?.unwrap_or(layer.is_some()),
        norm_output: root.flag("norm_output")? == Some(true),
    };
    Ok((decoder, config))
}

/// Refuses flags that would change what is computed.
fn check_flags(own: Option<&Keys<'_>>) -> Result<(), ModelError> {
    for (key, expected) in [
        ("use_aux_hidden_state", true),
        ("use_input_layernorm_in_first_layer", true),
        ("use_last_layernorm", true),
        ("use_mtp_layernorm", false),
    ] {
        if let Some(own) = own
            && own.flag(key)?.is_some_and(|flag| flag != expected)
        {
            return Err(own.unsupported(key, &expected.to_string()));
        }
    }
    Ok(())
}

/// Checks that the layer is one of Llama, with full attention.
fn check_layer(keys: &Keys<'_>) -> Result<(), ModelError> {
    if keys.size("num_hidden_layers")?.unwrap_or(1) != 1 {
        return Err(keys.unsupported("num_hidden_layers", "1"));
    }
    if keys.text("model_type")?.is_some_and(|kind| kind != "llama") {
        return Err(keys.unsupported("model_type", "llama"));
    }
    let kinds = keys.texts("layer_types")?.unwrap_or_default();
    if kinds.iter().any(|kind| *kind != "full_attention") {
        return Err(keys.unsupported("layer_types", "full_attention"));
    }
    Ok(())
}

/// The configuration of the layer as that of a model of Llama.
fn layer_json(value: &Value) -> Value {
    let outer = value.as_object().cloned().unwrap_or_default();
    let inner = outer.get(LAYER).and_then(Value::as_object).cloned();
    let mut layer = match inner {
        None => outer,
        Some(mut inner) => {
            let types = ["dtype", "torch_dtype"].into_iter();
            let given = types.filter_map(|key| Some((key.to_owned(), outer.get(key)?.clone())));
            given.for_each(|(key, value)| _ = inner.entry(key).or_insert(value));
            inner
        }
    };
    OWN_KEYS.into_iter().for_each(|key| drop(layer.remove(key)));
    layer.extend(Map::from_iter([
        ("model_type".to_owned(), "llama".into()),
        ("num_hidden_layers".to_owned(), 1.into()),
        ("tie_word_embeddings".to_owned(), false.into()),
    ]));
    Value::Object(layer)
}

/// After how many layers of the model hidden states are read.
fn layers(
    root: &Keys<'_>,
    own: Option<&Keys<'_>>,
    layer_count: usize,
) -> Result<Vec<usize>, ModelError> {
    for keys in [Some(root), own].into_iter().flatten() {
        let ids = keys.counts(LAYER_IDS)?.unwrap_or_default();
        if ids.len() > STATES_MAX {
            return Err(keys.invalid(LAYER_IDS, &format!("at most {STATES_MAX} numbers")));
        }
        // vLLM reads the inputs of the layers in the outer list, and SGLang the outputs of those in
        // the inner one. Some of the inner lists count as the outer one, but only those with the
        // number of layers show it.
        let is_inner = !std::ptr::eq(keys, root);
        let are_outputs = is_inner && ids.iter().all(|id| *id < layer_count);
        if !ids.is_empty() {
            return Ok(ids.iter().map(|id| id + usize::from(are_outputs)).collect());
        }
    }
    if layer_count < LAYERS_MIN {
        let expected = format!("numbers of layers, because the model has only {layer_count}");
        return Err(root.invalid(LAYER_IDS, &expected));
    }
    Ok(vec![2, layer_count / 2, layer_count - 3])
}

/// Makes the decoder of a head that of a head for `model`: it has the context length of the model.
///
/// # Errors
/// [`ModelError::InvalidKey`] and [`ModelError::Unsupported`] if the head was made for another model,
/// or if heads of such a model are not supported.
pub(crate) fn fit(
    file: &str,
    decoder: DecoderConfig,
    config: &Eagle3Config,
    model: &DecoderConfig,
) -> Result<DecoderConfig, ModelError> {
    check_sizes(
        file,
        [
            ("hidden_size", decoder.hidden_size, model.hidden_size),
            ("vocab_size", decoder.vocab_size, model.vocab_size),
        ],
    )?;
    if let Some(layer) = config.layers.iter().find(|layer| **layer > model.layers.len()) {
        let expected = format!("numbers of layers of the model, which has {}", model.layers.len());
        return Err(ModelError::key(file, LAYER_IDS, expected, layer));
    }
    let description = model.architecture.description();
    let is_plain = model.embedding_scale.is_none()
        && !model.norms.embedding
        && model.per_layer_input.is_none()
        && description.dialect != Dialect::Moondream;
    if !is_plain {
        let expected = "a head for a model without factors and norms of embeddings, per-layer \
                        embeddings and coordinates";
        let got = format!("one for {:?}", model.architecture);
        return Err(ModelError::unsupported(file, "architectures", expected, got));
    }
    let decoder = DecoderConfig { max_positions: model.max_positions, ..decoder };
    decoder.check(file)?;
    Ok(decoder)
}

#[cfg(test)]
mod tests;
