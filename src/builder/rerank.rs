//! The settings of a language model as a reranker.

use stolon_checkpoint::{
    DecoderConfig, LoadedScores, PairForm, ScoreActivation, ScoreTokens, Weights,
};

use crate::Error;
use crate::text::Text;

/// The tokens and the template of a reranker; without a value, those in the model's files.
#[derive(Debug, Default)]
pub(crate) struct RerankSettings {
    /// The answer that raises the score, and the one that lowers it.
    pub(crate) tokens: Option<(String, Option<String>)>,
    /// The template of a query and a document.
    pub(crate) template: Option<String>,
}

impl RerankSettings {
    /// The first setting that has a value, by its name.
    pub(super) fn name(&self) -> Option<&'static str> {
        let template = self.template.as_ref().map(|_| "rerank_template");
        self.tokens.as_ref().map(|_| "rerank_tokens").or(template)
    }

    /// The scores of a model: those of its files, or of the tokens of these settings. The row of the
    /// output matrix that computes them is added to `weights`.
    pub(super) fn scores(
        &self,
        own: Option<LoadedScores>,
        text: &Text,
        config: &DecoderConfig,
        weights: &mut Weights,
    ) -> Result<Option<LoadedScores>, Error> {
        let is_classifier = own.as_ref().is_some_and(|own| own.pairs == PairForm::Tokenizer);
        if let Some(name) = self.name().filter(|_| is_classifier) {
            let expected = "no value, because the model is a classifier";
            return Err(Error::invalid(name, expected, "a value"));
        }
        match self.score_tokens(text)? {
            Some(tokens) => {
                // The files of the model may name tokens, too.
                let heads = own.iter().flat_map(|own| own.head.tensors());
                heads.for_each(|tensor| weights.remove(&tensor.name));
                Ok(Some(LoadedScores::of_tokens(tokens, config, weights)?))
            }
            None if own.is_none() && self.template.is_some() => {
                let expected = "`rerank_tokens`, too, because the model's files name no tokens";
                Err(Error::invalid("rerank_template", expected, "a template alone"))
            }
            None => Ok(own),
        }
    }

    /// The ids of the tokens, each of which must be one token of the vocabulary.
    fn score_tokens(&self, text: &Text) -> Result<Option<ScoreTokens>, Error> {
        let Some((positive, negative)) = &self.tokens else { return Ok(None) };
        let id = |answer: &str| match text.encode(answer, false)?[..] {
            [id] => Ok(id),
            ref ids => {
                let got = format!("`{answer}`, which is {}", ids.len());
                Err(Error::invalid("rerank_tokens", "texts that are one token each", got))
            }
        };
        let negative = negative.as_deref().map(id).transpose()?;
        let activation = ScoreActivation::Sigmoid;
        Ok(Some(ScoreTokens { positive: id(positive)?, negative, activation }))
    }
}
