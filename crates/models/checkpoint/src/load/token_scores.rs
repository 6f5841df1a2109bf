//! Scores of language models that answer with one of two tokens, such as Qwen3-Reranker, which
//! answers `yes` or `no`: the difference of two logits, which needs two rows of the output matrix.
//!
//! sentence-transformers has a module for it, `LogitScore`. llama.cpp's converter writes the two rows
//! to a tensor of their own.

use std::path::Path;

use serde_json::Value;

use super::directory;
use super::embedding::{self, MODULES};
use super::encoder::PROMPTS;
use super::model::{LoadedScores, PairForm};
use crate::config::{DecoderConfig, Keys, LinearWeights, TensorRole, TensorSpec};
use crate::encoder::{HeadActivation, HeadConfig, HeadLayer, ScoreActivation, ScoreConfig};
use crate::error::ModelError;
use crate::files::{optional, read_json};
use crate::weights::Weights;

/// The configuration of the module, which must have this path.
pub(crate) const LOGIT_SCORE: &str = "1_LogitScore/config.json";
const LOGIT_SCORE_PATH: &str = "1_LogitScore";
/// The row that computes the score, which no file has under this name.
const ROW: &str = "token_score.weight";
/// Its bias.
const BIAS: &str = "token_score.bias";

/// The tokens whose logits become a score, and the function of the score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreTokens {
    /// The token whose logit raises the score.
    pub positive: u32,
    /// The token whose logit lowers it; `None` if the logit of `positive` alone is the score.
    pub negative: Option<u32>,
    /// The function of the score: [`ScoreActivation::Sigmoid`] for the probability of `positive`
    /// among the two tokens.
    pub activation: ScoreActivation,
}

impl ScoreTokens {
    fn ids(self) -> impl Iterator<Item = usize> {
        [self.positive].into_iter().chain(self.negative).map(|id| id as usize)
    }

    /// Whether `decoder` can compute the score.
    ///
    /// # Errors
    /// [`ModelError::InvalidOption`] for a token that is not in the vocabulary, and
    /// [`ModelError::Unsupported`] for a model whose logits are capped.
    pub(crate) fn check(self, decoder: &DecoderConfig) -> Result<(), ModelError> {
        let size = decoder.vocab_size;
        if let Some(id) = self.ids().find(|id| *id >= size) {
            let expected = format!("token ids below {size}, the size of the vocabulary");
            return Err(ModelError::option("score tokens", expected, id));
        }
        let Some(cap) = decoder.logit_softcap else { return Ok(()) };
        let expected = "logits that are not capped, for a score of tokens";
        let (file, key) = (directory::CONFIG, "final_logit_softcapping");
        Err(ModelError::unsupported(file, key, expected, cap.to_string()))
    }
}

impl LoadedScores {
    /// The scores that a language model computes with these tokens. Adds a row to `weights`: that of
    /// the output matrix of `decoder` for the positive token, minus that for the negative one.
    ///
    /// # Errors
    /// [`ModelError::InvalidOption`] for a token that is not in the vocabulary,
    /// [`ModelError::Unsupported`] for a model whose logits are capped, and the errors of
    /// [`Weights::tensor`] for the output matrix.
    pub fn of_tokens(
        tokens: ScoreTokens,
        decoder: &DecoderConfig,
        weights: &mut Weights,
    ) -> Result<Self, ModelError> {
        tokens.check(decoder)?;
        let ids: Vec<usize> = tokens.ids().collect();
        let specs = decoder.weights();
        let matrix = specs.head.unwrap_or(specs.embedding);
        let bias = match &specs.head_bias {
            Some(bias) => Some(weights.floats(bias)?),
            None => None,
        };
        let scale = decoder.logit_scale.unwrap_or(1.0);
        let difference = |mut values: Vec<Vec<f32>>| {
            let other = if values.len() > 1 { values.pop() } else { None };
            let mut row = values.pop().unwrap_or_default();
            if let Some(other) = other {
                row.iter_mut().zip(other).for_each(|(value, other)| *value -= other);
            }
            row.iter_mut().for_each(|value| *value *= scale);
            row
        };
        let row = difference(weights.rows(&matrix, &ids)?);
        let bias = bias.map(|bias| difference(ids.iter().map(|&id| vec![bias[id]]).collect()));
        Self::of_row(row, bias, tokens.activation, weights)
    }

    /// The score is the product of the last hidden state with `row`, plus the bias.
    fn of_row(
        row: Vec<f32>,
        bias: Option<Vec<f32>>,
        activation: ScoreActivation,
        weights: &mut Weights,
    ) -> Result<Self, ModelError> {
        let spec = |name: &str, shape, role| TensorSpec { name: name.to_owned(), shape, role };
        let weight = spec(ROW, vec![1, row.len()], TensorRole::Matrix);
        weights.add_floats(&weight, &row)?;
        let bias_spec = bias.as_ref().map(|_| spec(BIAS, vec![1], TensorRole::Bias));
        if let Some((spec, bias)) = bias_spec.as_ref().zip(bias) {
            weights.add_floats(spec, &bias)?;
        }
        let linear = LinearWeights { weight, bias: bias_spec };
        let layer = HeadLayer::Linear { weights: linear, activation: HeadActivation::Identity };
        let config = ScoreConfig { labels: vec!["LABEL_0".to_owned()], activation };
        Ok(Self { head: HeadConfig { layers: vec![layer] }, config, pairs: PairForm::Template })
    }

    /// The scores of a model in a GGUF file of llama.cpp: the probability of the first of the two
    /// rows of `matrix`, `[2, hidden_size]`. Removes the matrix.
    ///
    /// # Errors
    /// The errors of [`Weights::tensor`].
    pub(crate) fn of_two_rows(
        matrix: &TensorSpec,
        weights: &mut Weights,
    ) -> Result<Self, ModelError> {
        let mut rows = weights.rows(matrix, &[0, 1])?.into_iter();
        let (first, second) = (rows.next().unwrap_or_default(), rows.next().unwrap_or_default());
        let row = first.iter().zip(&second).map(|(first, second)| first - second).collect();
        weights.remove(&matrix.name);
        Self::of_row(row, None, ScoreActivation::Sigmoid, weights)
    }
}

/// The tokens of a reranker with `decoder`, from the files of sentence-transformers in `directory`;
/// `None` if the model is not one.
///
/// # Errors
/// [`ModelError::Unsupported`] for further modules, [`ModelError::InvalidKey`], and the errors of
/// [`ScoreTokens::check`].
pub(crate) fn of_directory(
    directory: &Path,
    decoder: &DecoderConfig,
) -> Result<Option<ScoreTokens>, ModelError> {
    let tokens = read(directory)?;
    tokens.map_or(Ok(()), |tokens| tokens.check(decoder))?;
    Ok(tokens)
}

fn read(directory: &Path) -> Result<Option<ScoreTokens>, ModelError> {
    let path = directory.join(MODULES);
    let Some(value) = optional(read_json(&path))? else { return Ok(None) };
    if !is_logit_score(&path.display().to_string(), &value)? {
        return Ok(None);
    }
    let path = directory.join(LOGIT_SCORE);
    let (file, value) = (path.display().to_string(), read_json(&path)?);
    let keys = Keys::root(&file, &value)?;
    let id = |key: &str| -> Result<Option<u32>, ModelError> {
        let id = keys.count(key)?.map(u32::try_from).transpose();
        id.map_err(|_| keys.invalid(key, "a token id"))
    };
    let positive =
        id("true_token_id")?.ok_or_else(|| keys.invalid("true_token_id", "a token id"))?;
    let activation = activation(directory)?;
    Ok(Some(ScoreTokens { positive, negative: id("false_token_id")?, activation }))
}

/// Whether the modules are those of a reranker with two tokens.
fn is_logit_score(file: &str, value: &Value) -> Result<bool, ModelError> {
    let (kinds, paths) = embedding::module_list(file, value)?;
    if !kinds.contains(&"LogitScore") {
        return Ok(false);
    }
    if kinds != ["Transformer", "LogitScore"] {
        let expected = "Transformer and LogitScore";
        return Err(ModelError::unsupported(file, "type", expected, kinds.join(", ")));
    }
    match paths[1] {
        LOGIT_SCORE_PATH => Ok(true),
        other => Err(ModelError::key(file, "path", LOGIT_SCORE_PATH, other)),
    }
}

/// The function of scores: the sigmoid unless the files say otherwise.
fn activation(directory: &Path) -> Result<ScoreActivation, ModelError> {
    let path = directory.join(PROMPTS);
    let file = path.display().to_string();
    let Some(value) = optional(read_json(&path))? else { return Ok(ScoreActivation::Sigmoid) };
    let keys = Keys::root(&file, &value)?;
    match keys.text("activation_fn")?.map(HeadActivation::of_class) {
        None | Some(Some(HeadActivation::Sigmoid)) => Ok(ScoreActivation::Sigmoid),
        Some(Some(HeadActivation::Identity)) => Ok(ScoreActivation::Identity),
        Some(_) => Err(keys.unsupported("activation_fn", "Identity or Sigmoid")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn write(directory: &Path, name: &str, value: &Value) {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        std::fs::write(path, value.to_string()).expect("written");
    }

    /// Goal: the tokens and the function of a reranker are read, and everything that would compute
    /// another score is refused by its key.
    #[test]
    fn tokens_are_read_or_refused() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path();
        assert_eq!(read(path).expect("no modules"), None);
        let modules = |kinds: &[&str], at: &str| -> Value {
            let module = |(index, kind): (usize, &&str)| json!({"type": format!("a.b.{kind}"), "path": if index == 0 { "" } else { at }});
            kinds.iter().enumerate().map(module).collect()
        };
        let names = ["Transformer", "LogitScore"];
        write(path, MODULES, &modules(&names, LOGIT_SCORE_PATH));
        write(path, LOGIT_SCORE, &json!({"true_token_id": 7, "false_token_id": 3}));
        let tokens = |negative, activation| ScoreTokens { positive: 7, negative, activation };
        let expected = tokens(Some(3), ScoreActivation::Sigmoid);
        assert_eq!(read(path).expect("valid"), Some(expected));
        write(path, PROMPTS, &json!({"activation_fn": "torch.nn.modules.linear.Identity"}));
        write(path, LOGIT_SCORE, &json!({"true_token_id": 7, "false_token_id": null}));
        let expected = tokens(None, ScoreActivation::Identity);
        assert_eq!(read(path).expect("valid"), Some(expected));
        for (name, value, key) in [
            (PROMPTS, json!({"activation_fn": "torch.nn.Tanh"}), "`activation_fn`"),
            (LOGIT_SCORE, json!({"true_token_id": -1}), "`true_token_id`"),
            (LOGIT_SCORE, json!({"true_token_id": 1_u64 << 40}), "`true_token_id`"),
            (LOGIT_SCORE, json!({}), "`true_token_id`"),
            (MODULES, modules(&["Transformer", "LogitScore", "Dense"], "1_LogitScore"), "Dense"),
            (MODULES, modules(&names, "../1_LogitScore"), "`path`"),
        ] {
            let before = std::fs::read(path.join(name)).expect("a file");
            write(path, name, &value);
            let error = read(path).expect_err(key).to_string();
            assert!(error.contains(key), "{key}: {error}");
            std::fs::write(path.join(name), before).expect("written");
        }
    }
}
