//! Refuses models that compute scores or labels instead of text: classifiers, rerankers and reward
//! models. With a tied embedding they have all weights of a language model.

use serde_json::Value;

use super::model::{LoadedScores, PairForm};
use crate::config::{Keys, LinearWeights, TensorRole, TensorSpec};
use crate::encoder::{HeadActivation, HeadConfig, HeadLayer, ScoreConfig, is_classifier};
use crate::error::ModelError;
use crate::weights::Weights;

/// Suffixes of the names of classes of language models.
const LANGUAGE_MODELS: [&str; 5] =
    ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText", "HfMoondream"];
/// Prefixes of the names of matrices that compute scores and labels.
const SCORES: [&str; 10] = [
    "score.",
    "model.score.",
    "classifier.",
    "classification_head.",
    "v_head.",
    "value_head.",
    "reward_head.",
    "regression_layer.",
    "qa_outputs.",
    "cls.output.",
];
const HEAD: &str = "lm_head.weight";
/// The matrix of the labels of a classifier with a decoder.
const SCORE: &str = "score.weight";

/// Refuses a model whose class in `architectures` is not a language model, unless it has an output
/// matrix and no matrix for scores. In this case, transformers loads it as a language model by its
/// `model_type`. Also refuses weights with a matrix for scores and no output matrix. `value` is the
/// content of `config.json`, and `file` its name.
///
/// # Errors
/// [`ModelError::Unsupported`] for the key `architectures`, or for the name of the matrix.
pub(crate) fn refuse_scores(
    file: &str,
    value: &Value,
    weights: &Weights,
) -> Result<(), ModelError> {
    let keys = Keys::root(file, value)?;
    let class = keys.texts("architectures")?.and_then(|list| list.first().copied());
    let is_score = |name: &&str| SCORES.iter().any(|start| name.starts_with(start));
    let score = weights.names().filter(is_score).min();
    let has_output = weights.contains(HEAD);
    if class.is_some_and(|class| !generates_text(class)) && (!has_output || score.is_some()) {
        let expected = "a language model (such as LlamaForCausalLM): classifiers, rerankers and \
                        reward models cannot be served";
        return Err(keys.unsupported("architectures", expected));
    }
    match score.filter(|_| !has_output) {
        Some(score) => Err(weights_for_scores(file, score)),
        None => Ok(()),
    }
}

/// How a classifier or reranker with a decoder computes its scores; `None` if the model is not one,
/// or has no matrix for scores. `hidden` is the width of its hidden states.
///
/// # Errors
/// [`ModelError::InvalidKey`] and [`ModelError::Unsupported`] for keys about labels, and
/// [`ModelError::WrongShape`] for another number of labels.
pub(crate) fn scores(
    file: &str,
    value: &Value,
    weights: &Weights,
    hidden: usize,
) -> Result<Option<LoadedScores>, ModelError> {
    if !is_classifier(value) || !weights.contains(SCORE) {
        return Ok(None);
    }
    let config = ScoreConfig::parse(&Keys::root(file, value)?)?;
    let shape = vec![config.labels.len(), hidden];
    let weight = TensorSpec { name: SCORE.to_owned(), shape, role: TensorRole::Matrix };
    let weights_of = LinearWeights { weight: weight.clone(), bias: None };
    let layer = HeadLayer::Linear { weights: weights_of, activation: HeadActivation::Identity };
    weights.check_all([weight])?;
    let head = HeadConfig { layers: vec![layer] };
    Ok(Some(LoadedScores { head, config, pairs: PairForm::Tokenizer }))
}

/// The error for weights that have the matrix `score` instead of an output matrix.
pub(crate) fn weights_for_scores(file: &str, score: &str) -> ModelError {
    let expected = "a language model, which has an output matrix; classifiers, rerankers and \
                    reward models cannot be served";
    ModelError::unsupported(file, score, expected, "a matrix for scores")
}

/// Whether `class` of transformers is a language model or a model without a head. Only models
/// without a head have a name that ends in `Model` and names no task.
fn generates_text(class: &str) -> bool {
    let is_base = class.ends_with("Model") && !class.contains("For") && !class.contains("Reward");
    is_base || LANGUAGE_MODELS.iter().any(|end| class.ends_with(end))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stolon_kernels::TensorType;

    use super::*;
    use crate::config::Architecture;
    use crate::weights::Tensor;

    fn refused(class: Option<&str>, names: &[&str]) -> Option<String> {
        let tensors = names.iter().map(|name| Tensor {
            name: (*name).to_owned(),
            dtype: TensorType::F32,
            shape: vec![1],
            bytes: vec![0; 4].into(),
        });
        let weights = Weights::from_tensors("memory", tensors).unwrap();
        let config = json!({ "model_type": "llama", "architectures": class.map(|class| [class]) });
        refuse_scores("config.json", &config, &weights).err().map(|error| error.to_string())
    }

    /// Goal: classifiers, rerankers and reward models are refused because of their class or their
    /// matrix. Language models and models without a head are accepted.
    #[test]
    fn models_of_scores_are_refused() {
        let (tied, embedding) = ([].as_slice(), ["model.norm.weight"].as_slice());
        for class in [
            "LlamaForSequenceClassification",
            "Qwen3ForTokenClassification",
            "Gemma3ForQuestionAnswering",
            "Qwen2ForRewardModel",
            "Qwen2ForProcessRewardModel",
            "LlamaRewardModel",
            "LlamaForMaskedLM",
        ] {
            for names in [tied, embedding, &["score.weight"], &["score.weight", HEAD]] {
                let error = refused(Some(class), names).expect(class);
                assert!(error.contains("`architectures`") && error.contains(class), "{error}");
            }
            assert_eq!(refused(Some(class), &[HEAD]), None, "{class}");
        }
        for class in [None, Some("LlamaForCausalLM"), Some("LlamaModel"), Some("GPT2LMHeadModel")] {
            assert_eq!(refused(class, tied), None);
            assert_eq!(refused(class, &["v_head.summary.weight", HEAD]), None);
            let error = refused(class, &["score.weight"]).unwrap();
            assert!(error.contains("`score.weight`"), "{error}");
        }
    }

    /// Goal: the classes of all supported architectures generate text.
    #[test]
    fn all_known_classes_generate_text() {
        let classes = Architecture::all().flat_map(Architecture::classes);
        let other: Vec<_> = classes.filter(|class| !generates_text(class)).collect();
        assert!(other.is_empty(), "{other:?}");
    }
}
