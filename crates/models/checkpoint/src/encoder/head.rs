//! What is computed from a pooled hidden state: the dense layers of an embedding model, or the
//! labels of a classifier.

use serde::Serialize;

use super::weights::linear;
use super::{EncoderConfig, EncoderFamily, EncoderNormWeights};
use crate::config::{Keys, LinearWeights, TensorRole, TensorSpec};
use crate::error::ModelError;
use crate::gguf::{Header, Value};

/// Maximum number of labels of a classifier.
const LABELS_MAX: usize = 1 << 16;

/// The layers after the pooling. The first one takes a pooled hidden state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeadConfig {
    /// The layers, in order; empty if the pooled hidden state itself is the result.
    pub layers: Vec<HeadLayer>,
}

/// One layer of a head.
#[derive(Clone, Debug, PartialEq)]
pub enum HeadLayer {
    /// A projection, and a function of its results.
    Linear {
        /// The matrix and the bias.
        weights: LinearWeights,
        /// The function.
        activation: HeadActivation,
    },
    /// A layer norm.
    Norm {
        /// The weight and the bias.
        weights: EncoderNormWeights,
        /// The epsilon, above 0.
        eps: f32,
    },
}

/// A function in a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadActivation {
    /// None.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// GELU with the error function.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x / (1 + e^-x)`.
    Silu,
}

/// How the results of a classifier's head become scores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScoreConfig {
    /// The name of each label; one for a reranker.
    pub labels: Vec<String>,
    /// The function from the head's results to scores.
    pub activation: ScoreActivation,
}

/// The function from the results of a classifier's head to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoreActivation {
    /// The results are the scores.
    Identity,
    /// Each score is `1 / (1 + e^-x)`: labels that do not exclude each other, or a single one.
    Sigmoid,
    /// The scores are probabilities with the sum 1.
    Softmax,
}

impl HeadActivation {
    /// The function with this name: the last part of the name of a class of PyTorch.
    pub(crate) fn of_class(name: &str) -> Option<Self> {
        Some(match name.rsplit('.').next().unwrap_or(name) {
            "Identity" => Self::Identity,
            "Tanh" => Self::Tanh,
            "GELU" => Self::Gelu,
            "ReLU" => Self::Relu,
            "Sigmoid" => Self::Sigmoid,
            "SiLU" => Self::Silu,
            _ => return None,
        })
    }
}

impl ScoreActivation {
    /// Turns the results of a head into scores.
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Sigmoid => values.iter_mut().for_each(|value| {
                *value = (1.0 / (1.0 + (-f64::from(*value)).exp())) as f32;
            }),
            Self::Softmax => {
                let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f64> =
                    values.iter().map(|value| f64::from(value - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                values.iter_mut().zip(weights).for_each(|(to, weight)| *to = (weight / sum) as f32);
            }
        }
    }
}

impl ScoreConfig {
    /// Reads the labels and the function from the content of `config.json`.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`], and [`ModelError::Unsupported`] for another function.
    pub(crate) fn parse(keys: &Keys<'_>) -> Result<Self, ModelError> {
        let names = keys.object("id2label")?;
        let named = names.as_ref().map(|names| names.names().count());
        let count = match (keys.size("num_labels")?, named) {
            (Some(count), _) | (None, Some(count)) => count,
            (None, None) => 2,
        };
        if !(1..=LABELS_MAX).contains(&count) {
            return Err(keys.invalid("id2label", &format!("1 to {LABELS_MAX} labels")));
        }
        let mut labels = Vec::with_capacity(count);
        for index in 0..count {
            let name = match &names {
                Some(names) => names.text(&index.to_string())?,
                None => None,
            };
            labels.push(name.map_or_else(|| format!("LABEL_{index}"), str::to_owned));
        }
        let own = keys.object("sentence_transformers")?;
        let own = match &own {
            Some(own) => own.text(own.name_of(["activation_fn", "activation_function"]))?,
            None => keys.text("sbert_ce_default_activation_function")?,
        };
        let activation = match own.map(HeadActivation::of_class) {
            Some(Some(HeadActivation::Identity)) => ScoreActivation::Identity,
            Some(Some(HeadActivation::Sigmoid)) => ScoreActivation::Sigmoid,
            Some(_) => return Err(keys.unsupported("sentence_transformers", "Identity or Sigmoid")),
            None if count == 1 => ScoreActivation::Sigmoid,
            None => match keys.text("problem_type")? {
                Some("multi_label_classification") => ScoreActivation::Sigmoid,
                Some("regression") => ScoreActivation::Identity,
                _ => ScoreActivation::Softmax,
            },
        };
        Ok(Self { labels, activation })
    }
}

impl ScoreConfig {
    /// The labels of a classifier in a GGUF file.
    pub(crate) fn of_gguf(header: &Header) -> Result<Self, ModelError> {
        let count = rank_labels(header);
        if !(1..=LABELS_MAX).contains(&count) {
            let expected = format!("a matrix of 1 to {LABELS_MAX} rows");
            return Err(ModelError::key(&header.file, RANK, expected, count));
        }
        let key = format!("{}.classifier.output_labels", super::gguf::prefix(header));
        let labels = match header.metadata.get(&key) {
            Some(Value::Texts(labels)) if labels.len() == count => labels.clone(),
            _ => (0..count).map(|index| format!("LABEL_{index}")).collect(),
        };
        let activation =
            if count == 1 { ScoreActivation::Sigmoid } else { ScoreActivation::Softmax };
        Ok(Self { labels, activation })
    }
}

/// The matrix of the labels in a GGUF file.
const RANK: &str = "cls.output.weight";

/// Number of its rows; 0 without it.
fn rank_labels(header: &Header) -> usize {
    match header.tensors.get(RANK).map(|info| info.shape.as_slice()) {
        Some([rows, _]) => *rows,
        Some([_]) => 1,
        _ => 0,
    }
}

impl HeadConfig {
    /// The head of a classifier of `family`, whose encoder has the prefix `prefix`.
    pub(crate) fn classifier(
        keys: &Keys<'_>,
        family: EncoderFamily,
        prefix: &str,
        hidden: usize,
        labels: usize,
    ) -> Result<Self, ModelError> {
        let square = |module: &str, with_bias, activation| HeadLayer::Linear {
            weights: linear(module, [hidden, hidden], with_bias),
            activation,
        };
        let last = |module: &str| HeadLayer::Linear {
            weights: linear(module, [labels, hidden], true),
            activation: HeadActivation::Identity,
        };
        let layers = match family {
            EncoderFamily::Bert
            | EncoderFamily::JinaBert
            | EncoderFamily::JinaCode
            | EncoderFamily::Gte => vec![
                square(&format!("{prefix}pooler.dense"), true, HeadActivation::Tanh),
                last("classifier"),
            ],
            EncoderFamily::Roberta | EncoderFamily::JinaRoberta | EncoderFamily::MpNet => vec![
                square("classifier.dense", true, HeadActivation::Tanh),
                last("classifier.out_proj"),
            ],
            EncoderFamily::DistilBert => {
                vec![square("pre_classifier", true, HeadActivation::Relu), last("classifier")]
            }
            EncoderFamily::ModernBert => {
                if !matches!(keys.text("classifier_activation")?, None | Some("gelu")) {
                    return Err(keys.unsupported("classifier_activation", "`gelu`"));
                }
                let with_bias = keys.flag("classifier_bias")?.unwrap_or(false);
                let spec = |part: &str, role| TensorSpec {
                    name: format!("head.norm.{part}"),
                    shape: vec![hidden],
                    role,
                };
                let has_bias = keys.flag("norm_bias")?.unwrap_or(false);
                vec![
                    square("head.dense", with_bias, HeadActivation::Gelu),
                    HeadLayer::Norm {
                        weights: EncoderNormWeights {
                            weight: spec("weight", TensorRole::PlainNorm),
                            bias: has_bias.then(|| spec("bias", TensorRole::Bias)),
                        },
                        eps: keys.positive_f32("norm_eps")?.unwrap_or(1e-5),
                    },
                    last("classifier"),
                ]
            }
            EncoderFamily::NomicBert
            | EncoderFamily::NomicBertMoe
            | EncoderFamily::Gemma
            | EncoderFamily::EuroBert => {
                let expected = format!("an embedding model of {}", family.name());
                return Err(keys.unsupported("architectures", &expected));
            }
        };
        Ok(Self { layers })
    }

    /// The dense layers of an embedding model in a GGUF file, which have no biases and no function.
    pub(crate) fn dense_of_gguf(header: &Header) -> Self {
        let layer = |name: &str| {
            let shape = header.tensors.get(&format!("{name}.weight"))?.shape.as_slice();
            let &[rows, columns] = shape else { return None };
            let weights = linear(name, [rows, columns], false);
            Some(HeadLayer::Linear { weights, activation: HeadActivation::Identity })
        };
        Self { layers: ["dense_2", "dense_3"].into_iter().filter_map(layer).collect() }
    }

    /// The head of a classifier in a GGUF file, whose encoder has the configuration `config`: the
    /// matrices of `cls` and `cls.output`, and the norm between them.
    pub(crate) fn of_gguf(header: &Header, config: &EncoderConfig) -> Self {
        let has = |name: &str| header.tensors.contains_key(name);
        let (hidden, rows) = (config.hidden_size, rank_labels(header));
        let dense = |name: &str, rows: usize, activation| HeadLayer::Linear {
            weights: linear(name, [rows, hidden], has(&format!("{name}.bias"))),
            activation,
        };
        let function = match config.family {
            EncoderFamily::ModernBert => HeadActivation::Gelu,
            // DistilBERT, which has no token types.
            _ if config.token_types == 0 => HeadActivation::Relu,
            _ => HeadActivation::Tanh,
        };
        let mut layers = vec![dense("cls", hidden, function)];
        if has("cls.norm.weight") {
            let weights = config.norm("cls.norm");
            layers.push(HeadLayer::Norm { weights, eps: config.norm_eps });
        }
        layers.push(dense("cls.output", rows, HeadActivation::Identity));
        Self { layers }
    }

    /// All tensors of the head.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        for layer in self.layers.clone() {
            match layer {
                HeadLayer::Linear { weights, activation: _ } => {
                    list.push(weights.weight);
                    list.extend(weights.bias);
                }
                HeadLayer::Norm { weights, eps: _ } => {
                    list.push(weights.weight);
                    list.extend(weights.bias);
                }
            }
        }
        list
    }

    /// Number of values of the result for pooled hidden states of `hidden` values.
    #[must_use]
    pub fn output_size(&self, hidden: usize) -> usize {
        let rows = self.layers.iter().rev().find_map(|layer| match layer {
            HeadLayer::Linear { weights, .. } => Some(weights.weight.shape[0]),
            HeadLayer::Norm { .. } => None,
        });
        rows.unwrap_or(hidden)
    }
}

/// Whether the class in `architectures` computes labels of whole texts.
pub(crate) fn is_classifier(config: &serde_json::Value) -> bool {
    let class = config["architectures"][0].as_str().unwrap_or_default();
    class.ends_with("ForSequenceClassification")
}
