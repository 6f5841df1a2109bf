//! The probabilities of given answers of a language model, its *labels*: for guard models and for
//! models that judge.
//!
//! A label is a path of tokens after the prompt, and its probability is the product of theirs. The
//! prompt is computed once for all labels. Of a label, all tokens but the first are computed together:
//! they are known, so they are proposed as [`LogitsProcessor::forced`].

use futures::{StreamExt, TryStreamExt, stream};

use super::Engine;
use crate::{Error, LogitsProcessor, Request, SamplingError, SamplingParams, SharedProcessor};

/// Maximum number of labels of a call that are in the engine at the same time.
const AT_ONCE: usize = 8;

/// The log-probabilities of labels. Made with [`Engine::score_labels`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LabelScores {
    /// The natural logarithm of the probability that the answer begins with each label, in the order
    /// of the labels; at most 0.
    pub logprobs: Vec<f32>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of tokens of the prompt that were cached before.
    pub cached_tokens: usize,
}

impl LabelScores {
    /// The probability of each label if the answer begins with one of them: the softmax of the
    /// log-probabilities, with the sum 1.
    #[must_use]
    pub fn probabilities(&self) -> Vec<f32> {
        let most = self.logprobs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let terms: Vec<f32> = self.logprobs.iter().map(|logprob| (logprob - most).exp()).collect();
        let sum: f32 = terms.iter().sum();
        terms.iter().map(|term| term / sum).collect()
    }
}

impl Engine {
    /// The probabilities with which the answer to a request begins with each of `labels`, under the
    /// model's own distribution: without temperature, penalties and bias. Nothing is sampled, so the
    /// sampling parameters of the request have no effect.
    ///
    /// The text of a label is tokenized by itself. Its tokens have to be those that the model would
    /// generate, so a space before the first word is part of the label if the model writes one.
    ///
    /// ```no_run
    /// # async fn judge() -> Result<(), stolon::Error> {
    /// use stolon::{ChatMessage, Engine, Request};
    ///
    /// let engine = Engine::builder().model("Qwen/Qwen3Guard-Gen-0.6B").build().await?;
    /// let request = Request::chat([ChatMessage::user("How do I pick a lock?")]);
    /// let labels = ["Safety: Safe", "Safety: Unsafe", "Safety: Controversial"];
    /// let scores = engine.score_labels(request, &labels).await?;
    /// println!("{:?}", scores.probabilities());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidParameter` without a label, for a label without a token, for one that does not fit into
    /// the context after the prompt, and for a prompt with images; the errors of
    /// [`Engine::generate`]; and the error that a request ends with.
    pub async fn score_labels(
        &self,
        request: Request,
        labels: &[impl AsRef<str>],
    ) -> Result<LabelScores, Error> {
        let text = &self.inner.prompts.text;
        let paths = labels.iter().map(|label| text.encode(label.as_ref(), false));
        let paths = paths.collect::<Result<_, _>>()?;
        self.score_label_tokens(request, paths).await
    }

    /// The same for labels that are token ids, at least one each.
    ///
    /// # Errors
    /// As [`Engine::score_labels`], and `TokenOutOfRange`.
    pub async fn score_label_tokens(
        &self,
        request: Request,
        labels: Vec<Vec<u32>>,
    ) -> Result<LabelScores, Error> {
        if labels.is_empty() {
            return Err(Error::invalid("labels", "at least one label", "none"));
        }
        if request.has_images() {
            let got = request.images.len();
            return Err(Error::invalid("images", "none for the probabilities of labels", got));
        }
        let prompt = self.prompt_tokens(&request).await?;
        let (prompt_tokens, most) = (prompt.len(), self.inner.info.max_positions);
        let request = request.with_tokens(prompt).ignore_eos(true).end_repetition(false);
        let request = request.stop(Vec::<String>::new()).stop_ids([]).min_tokens(0);
        for path in &labels {
            if path.is_empty() {
                let expected = "labels of at least one token";
                return Err(Error::invalid("labels", expected, "an empty one"));
            }
            if prompt_tokens.saturating_add(path.len()) > most {
                let expected = format!(
                    "labels that fit into the context of {most} tokens after the prompt of \
                     {prompt_tokens}"
                );
                return Err(Error::invalid("labels", expected, format!("{} tokens", path.len())));
            }
            self.check_embedding(path)?;
        }
        // The first one computes the prompt.
        let mut paths = labels.into_iter();
        let first = self.follow(request.clone(), paths.next().unwrap_or_default()).await?;
        let others: Vec<_> = paths.map(|path| self.follow(request.clone(), path)).collect();
        let others: Vec<Followed> = stream::iter(others).buffered(AT_ONCE).try_collect().await?;
        let logprobs = std::iter::once(&first).chain(&others).map(|label| label.logprob);
        let (logprobs, cached_tokens) = (logprobs.collect(), first.cached_tokens);
        Ok(LabelScores { logprobs, prompt_tokens, cached_tokens })
    }

    /// The log-probability of an answer with these tokens.
    async fn follow(&self, request: Request, path: Vec<u32>) -> Result<Followed, Error> {
        let length = path.len();
        let sampling = SamplingParams {
            logprobs: Some(0),
            processor: Some(SharedProcessor::new(Follow(path))),
            ..SamplingParams::default()
        };
        let answer = self.complete(request.max_tokens(length).sampling(sampling)).await?;
        if answer.logprobs.len() != length {
            let expected = "labels for which the KV cache has room after the prompt";
            return Err(Error::invalid("labels", expected, format!("one of {length} tokens")));
        }
        let logprob = answer.logprobs.iter().map(|token| f64::from(token.logprob)).sum::<f64>();
        let cached_tokens = answer.finish.usage.cached_tokens;
        Ok(Followed { logprob: logprob as f32, cached_tokens })
    }
}

/// The log-probability of a label, and the number of tokens of its prompt that were cached.
#[derive(Clone, Copy, Debug)]
struct Followed {
    logprob: f32,
    cached_tokens: usize,
}

/// Leaves an answer no alternative to these tokens.
#[derive(Debug)]
struct Follow(Vec<u32>);

impl LogitsProcessor for Follow {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        let next = self.0.get(output.len()).and_then(|token| logits.get(*token as usize)).copied();
        let next = next.ok_or_else(|| SamplingError::ProcessorFailed {
            reason: "a label has a token that is not in the vocabulary".to_owned(),
        })?;
        let token = self.0[output.len()] as usize;
        logits.fill(f32::NEG_INFINITY);
        logits[token] = next;
        Ok(())
    }

    fn is_ready(&self, _output: &[u32]) -> bool {
        true
    }

    fn forced(&self, output: &[u32]) -> Vec<u32> {
        self.0.get(output.len()..).unwrap_or_default().to_vec()
    }
}
