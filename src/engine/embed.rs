//! Embeddings.

use stolon_scheduler::{Event, RequestOptions, SequenceRequest, TokenSet};

use super::Engine;
use crate::{
    Embedding, EmbeddingInfo, EngineError, Error, ModelInfo, Pooling, Request, SamplingParams,
};

/// The result for one prompt.
#[derive(Debug)]
pub(super) struct Pooled {
    pub(super) values: Vec<f32>,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
}

impl Engine {
    /// Computes the embedding of a prompt, if the model is meant for embeddings
    /// ([`ModelInfo::embedding`](crate::ModelInfo::embedding)).
    ///
    /// The prompt is admitted, batched and cached as that of [`Engine::generate`], so that the
    /// common beginning of several prompts, an instruction for example, is computed once. With
    /// [`Pooling::Mean`](crate::Pooling::Mean) the whole prompt is computed, because a mean needs
    /// every position. The options of the request that concern generated tokens have no effect.
    /// Text is used as it is: instructions such as the prompts of sentence-transformers are part of
    /// it.
    ///
    /// `dimensions` shortens the embedding to that many values, which are normalized again, if the
    /// model's embeddings are. `None` returns all.
    ///
    /// If the future is dropped, the request is canceled.
    ///
    /// ```no_run
    /// # async fn embed() -> Result<(), stolon::Error> {
    /// use stolon::{Engine, Request};
    ///
    /// let engine = Engine::builder().model("Qwen/Qwen3-Embedding-0.6B").build().await?;
    /// let question = "Instruct: Retrieve the passage that answers the question\n\
    ///                 Query: What is a stolon?";
    /// let question = engine.embed(Request::text(question), None).await?;
    /// let passage = engine.embed(Request::text("A stolon is a stem."), None).await?;
    /// let products = question.values.iter().zip(&passage.values).map(|(a, b)| a * b);
    /// println!("similarity: {}", products.sum::<f32>());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NotForEmbeddings`], `InvalidParameter` if the model's embeddings cannot be
    /// shortened to `dimensions`, the errors of [`Engine::generate`] for the prompt, and the error
    /// that the request ends with.
    pub async fn embed(
        &self,
        request: Request,
        dimensions: Option<usize>,
    ) -> Result<Embedding, Error> {
        let info = self.embedding_info()?;
        let size = info.size_with(dimensions)?;
        let Pooled { values, prompt_tokens, cached_tokens } =
            self.pooled(request, info.config.pooling).await?;
        Ok(Embedding { values: info.finish(values, size), prompt_tokens, cached_tokens })
    }

    /// The pooled hidden state of a prompt, after the model's head, if it has one.
    pub(super) async fn pooled(&self, request: Request, pooling: Pooling) -> Result<Pooled, Error> {
        if request.has_images() {
            return Err(Error::invalid("images", "none for an embedding", request.images.len()));
        }
        let (request, task) = self.with_task(request)?;
        let (request, namespace) = self.with_adapter(request).await?;
        let mut tokens = self.inner.prompts.tokens(&request).await?.tokens;
        self.set_task(&mut tokens, task)?;
        let prompt_tokens = tokens.len();
        let options = RequestOptions {
            max_tokens: None,
            pooling: Some(pooling),
            prompt_logprobs: None,
            sampling: SamplingParams::default(),
            stop_ids: TokenSet::default(),
            ..request.options
        };
        let sequence = SequenceRequest { namespace, options, ..SequenceRequest::new(tokens, 1) };
        let sequence = self.inner.handle.with_stored(sequence).await;
        let mut events = self.inner.handle.submit(sequence)?;
        let mut pooled = Vec::new();
        while let Some(event) = events.next().await {
            match event? {
                Event::Embedding(values) => pooled = values,
                Event::Finished(finish) => {
                    let values = match &self.inner.head {
                        Some(head) => head.apply(pooled),
                        None => pooled,
                    };
                    let cached_tokens = finish.usage.cached_tokens;
                    return Ok(Pooled { values, prompt_tokens, cached_tokens });
                }
                _ => {}
            }
        }
        Err(EngineError::Stopped.into())
    }

    /// Checks the task of a request, and returns its index among the model's tasks. In models other
    /// than encoders, a task is an adapter.
    fn with_task(&self, mut request: Request) -> Result<(Request, Option<usize>), Error> {
        let ModelInfo { tasks, task_required, is_encoder, .. } = &self.inner.info;
        let refused = |got: &str| {
            let expected = match &tasks[..] {
                [] => "none, because the model has no matrices for tasks".to_owned(),
                tasks => format!("one of the model's tasks: {}", tasks.join(", ")),
            };
            Error::invalid("task", expected, got)
        };
        let Some(task) = request.task.take() else {
            let is_missing = *task_required && request.adapter.is_none();
            return if is_missing { Err(refused("none")) } else { Ok((request, None)) };
        };
        let index = tasks.iter().position(|known| **known == *task);
        let index = index.ok_or_else(|| refused(&task))?;
        if *is_encoder {
            return Ok((request, Some(index)));
        }
        match request.adapter.replace(task.to_string()) {
            Some(adapter) => {
                let expected = "no task with an adapter, because the model's tasks are adapters";
                Err(Error::invalid("task", expected, adapter))
            }
            None => Ok((request, None)),
        }
    }

    /// Gives the tokens of a prompt the numbers that they have in the task with this index.
    fn set_task(&self, tokens: &mut [u32], task: Option<usize>) -> Result<(), Error> {
        let ModelInfo { tasks, is_encoder, .. } = &self.inner.info;
        if !is_encoder || tasks.is_empty() {
            return Ok(());
        }
        let set = task.map_or(0, |index| index + 1);
        let spec = &self.inner.handle.context().spec;
        let each = spec.token_types / (tasks.len() + 1) * spec.vocab_size;
        for (index, token) in tokens.iter_mut().enumerate() {
            if *token as usize >= each {
                let (got, vocab_size) = (*token, spec.vocab_size);
                return Err(EngineError::TokenOutOfRange { index, got, vocab_size }.into());
            }
            // A number that is too large is refused with the prompt.
            *token = u32::try_from(set * each + *token as usize).unwrap_or(u32::MAX);
        }
        Ok(())
    }

    /// The number of values of an embedding with these `dimensions`, as [`Engine::embed`] has them.
    ///
    /// # Errors
    /// [`Error::NotForEmbeddings`], and `InvalidParameter` if the model's embeddings cannot be
    /// shortened to `dimensions`.
    pub fn embedding_size(&self, dimensions: Option<usize>) -> Result<usize, Error> {
        self.embedding_info()?.size_with(dimensions)
    }

    /// Whether the tokens can be the input of an embedding, for programs that embed several inputs
    /// and refuse all if one is wrong.
    ///
    /// # Errors
    /// `EmptyPrompt`, `PromptTooLong` and `TokenOutOfRange`, as [`Engine::embed`].
    pub fn check_embedding(&self, tokens: &[u32]) -> Result<(), Error> {
        Ok(self.inner.handle.context().check_embedding(tokens)?)
    }

    fn embedding_info(&self) -> Result<&EmbeddingInfo, Error> {
        let info = &self.inner.info;
        info.embedding.as_ref().ok_or_else(|| Error::NotForEmbeddings { model: info.id.clone() })
    }
}
