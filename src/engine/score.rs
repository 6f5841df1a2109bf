//! Scores of texts and of pairs of texts, by models for classification and reranking.

use futures::{StreamExt, TryStreamExt, stream};
use stolon_checkpoint::ScoreConfig;

use super::Engine;
use super::embed::Pooled;
use crate::{Error, Pooling, Request};

/// Maximum number of documents of a call that are in the engine at the same time.
const AT_ONCE: usize = 64;

/// The scores of a text or of a pair of texts. Made with [`Engine::score`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Scores {
    /// The score of each label, in the order of [`ScoreConfig::labels`]; one for a reranker.
    pub values: Vec<f32>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
}

/// A document and its score for a query. Made with [`Engine::rerank`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Ranked {
    /// Index of the document.
    pub index: usize,
    /// How well it answers the query; more is better.
    pub score: f32,
    /// Number of tokens of the query and the document together.
    pub prompt_tokens: usize,
}

impl Engine {
    /// Computes the scores of a text, or of the two texts of a [`Request::pair`], if the model
    /// computes scores ([`ModelInfo::scores`](crate::ModelInfo::scores)).
    ///
    /// The prompt is admitted and batched as that of [`Engine::embed`]. If the future is dropped, the
    /// request is canceled.
    ///
    /// # Errors
    /// [`Error::NotForScores`], the errors of [`Engine::generate`] for the prompt, and the error that
    /// the request ends with.
    pub async fn score(&self, request: Request) -> Result<Scores, Error> {
        let (config, pooling) = self.score_config()?;
        let Pooled { mut values, prompt_tokens, .. } = self.pooled(request, pooling).await?;
        config.activation.apply(&mut values);
        Ok(Scores { values, prompt_tokens })
    }

    /// Scores each of `documents` for a query and returns them with the best one first. Among
    /// equals, the earlier one comes first. Texts that are too long for the model are cut.
    ///
    /// ```no_run
    /// # async fn rerank() -> Result<(), stolon::Error> {
    /// use stolon::Engine;
    ///
    /// let engine = Engine::builder().model("BAAI/bge-reranker-v2-m3").build().await?;
    /// let documents = ["A stem that grows along the ground.", "The capital of France."];
    /// let ranked = engine.rerank("What is a stolon?", documents).await?;
    /// println!("the best one: {}", documents[ranked[0].index]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Engine::score`], and [`Error::NotForScores`] if the model has several labels.
    pub async fn rerank(
        &self,
        query: impl Into<String>,
        documents: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Vec<Ranked>, Error> {
        if self.score_config()?.0.labels.len() != 1 {
            return Err(self.not_for_scores());
        }
        let query = query.into();
        let most = self.inner.info.max_positions;
        let score = |(index, document): (usize, String)| {
            let pair = Request::pair(query.clone(), document).truncate(most);
            async move {
                let Scores { values, prompt_tokens } = self.score(pair).await?;
                Ok::<_, Error>(Ranked { index, score: values[0], prompt_tokens })
            }
        };
        let documents: Vec<_> = documents.into_iter().map(Into::into).enumerate().collect();
        let scores = stream::iter(documents.into_iter().map(score)).buffered(AT_ONCE);
        let mut ranked: Vec<Ranked> = scores.try_collect().await?;
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
        Ok(ranked)
    }

    fn score_config(&self) -> Result<(&ScoreConfig, Pooling), Error> {
        let config = self.inner.info.scores.as_ref();
        config.zip(self.inner.score_pooling).ok_or_else(|| self.not_for_scores())
    }

    fn not_for_scores(&self) -> Error {
        Error::NotForScores { model: self.inner.info.id.clone() }
    }
}
