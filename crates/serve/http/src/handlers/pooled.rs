//! What routes share whose answer is a vector or a score for each of many texts: the texts are
//! tokenized and checked before any is computed, and a bounded number of them is in the engine at
//! the same time.

use std::future::Future;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use stolon::{EngineError, Error, Prompt, Request};
use tokio::sync::Semaphore;

use crate::guard::access::Caller;
use crate::guard::deadline::Deadline;
use crate::handlers::app::App;
use crate::wire::error::ApiError;

/// Maximum number of inputs of one request in the engine at the same time: enough to fill its
/// batches, and few enough to leave room in its queue for other clients.
const INPUTS_AT_ONCE: u32 = 64;

/// What an error says about an input that is too long.
const CUT_HINT: &str = "; `truncate_prompt_tokens: -1` in the request, or the server's flag \
                        `--auto-truncate`, cuts longer texts";

/// Maximum number of tokens of all inputs of a request together.
pub(crate) const MAX_TOKENS: usize = 1 << 20;

/// The engine's request for the tokens of a client's prompt.
pub(crate) fn request(
    caller: &Caller,
    tokens: Vec<u32>,
    adapter: Option<&str>,
    salt: Option<&str>,
    priority: i32,
) -> Request {
    let mut request = caller.sign(Request::tokens(tokens).priority(priority));
    if let Some(adapter) = adapter {
        request = request.adapter(adapter);
    }
    match salt {
        Some(salt) => request.cache_salt(salt),
        None => request,
    }
}

/// The common data of the inputs of one request.
pub(crate) struct Inputs {
    pub(crate) app: Arc<App>,
    /// The client in whose share texts are tokenized.
    pub(crate) client: Option<Arc<str>>,
    deadline: Deadline,
    /// One permit for each input that is in the engine.
    permits: Semaphore,
    /// The parameter with the inputs.
    param: &'static str,
    /// Whether it is a list of inputs, so that errors name the index.
    is_list: bool,
}

impl Inputs {
    /// The inputs in the parameter `param` of a client's request.
    pub(crate) fn new(
        app: &Arc<App>,
        caller: &Caller,
        param: &'static str,
        is_list: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            app: Arc::clone(app),
            client: caller.identity.clone(),
            deadline: caller.deadline.within(app.request_timeout),
            permits: Semaphore::new(INPUTS_AT_ONCE as usize),
            param,
            is_list,
        })
    }

    /// Refuses a number of inputs other than 1 to `most`.
    pub(crate) fn check_count(&self, count: usize, most: usize) -> Result<(), ApiError> {
        if (1..=most).contains(&count) {
            return Ok(());
        }
        let param = self.param;
        let message = format!("`{param}`: expected 1 to {most} inputs, got {count}");
        Err(ApiError::invalid(Some(param), message).code("invalid_value"))
    }

    /// The token ids of all inputs; `None` is an empty one. Each is checked before any is computed.
    /// Of inputs with more than `most` tokens, the first ones are used.
    pub(crate) async fn tokenize(
        &self,
        inputs: impl IntoIterator<Item = Option<Request>>,
        most: Option<usize>,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let mut all = Vec::new();
        let mut sum = 0;
        for (index, input) in inputs.into_iter().enumerate() {
            let tokens = match input {
                None => Vec::new(),
                Some(request) => {
                    let tokens = match most {
                        Some(most) => self.first_tokens(request, most).await,
                        None => self.app.engine.prompt_tokens(&request).await,
                    };
                    tokens.map_err(|error| self.refused(index, error))?
                }
            };
            // The engine would refuse the input too, but only after it has begun with others.
            let checked = self.app.engine.check_embedding(&tokens);
            checked.map_err(|error| self.refused(index, error))?;
            sum += tokens.len();
            if sum > MAX_TOKENS {
                let param = self.param;
                let message =
                    format!("`{param}`: expected at most {MAX_TOKENS} tokens in all, got more");
                return Err(ApiError::invalid(Some(param), message).code("invalid_value"));
            }
            all.push(tokens);
            // Short texts are tokenized on this thread, and there may be many.
            tokio::task::yield_now().await;
        }
        Ok(all)
    }

    /// The first `most` tokens of an input. A token that ends every text stays at the end.
    async fn first_tokens(&self, request: Request, most: usize) -> Result<Vec<u32>, Error> {
        let (engine, info) = (&self.app.engine, self.app.engine.model_info());
        let mut tokens = match request.prompt() {
            // The text may be longer than the engine takes.
            Prompt::Text(text) if info.generates || !info.is_encoder && info.scores.is_none() => {
                engine.tokenize_for(text.clone(), true, self.client.clone()).await?
            }
            // An encoder's tokenizer removes tokens itself, of two texts from the longer one.
            _ => engine.prompt_tokens(&request.truncate(most)).await?,
        };
        if tokens.len() > most {
            let end = tokens.last().copied().filter(|token| info.eos_token_ids.contains(token));
            tokens.truncate(most);
            if let (Some(end), Some(last)) = (end, tokens.last_mut()) {
                *last = end;
            }
        }
        Ok(tokens)
    }

    /// The results of `compute` for all prompts, in their order.
    pub(crate) async fn compute<T, F>(
        self: &Arc<Self>,
        prompts: Vec<Request>,
        compute: impl Fn(Arc<App>, Request) -> F + Clone,
    ) -> Result<Vec<T>, ApiError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let one = |(index, prompt)| Arc::clone(self).one(index, prompt, compute.clone());
        // Collected, because a closure that borrows cannot be part of a handler's future.
        let all = stream::iter(prompts.into_iter().enumerate().map(one).collect::<Vec<_>>());
        all.buffered(INPUTS_AT_ONCE as usize).try_collect().await
    }

    /// Computes one input.
    async fn one<T, F>(
        self: Arc<Self>,
        index: usize,
        prompt: Request,
        compute: impl Fn(Arc<App>, Request) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let run = || {
            let prompt = match self.deadline.left() {
                Some(left) => prompt.clone().timeout(left),
                None => prompt.clone(),
            };
            compute(Arc::clone(&self.app), prompt)
        };
        // The semaphore is never closed.
        let permit = self.permits.acquire().await.map_err(|_| ApiError::internal())?;
        let mut result = run().await;
        drop(permit);
        if matches!(
            result,
            Err(Error::Engine(EngineError::Overloaded { .. } | EngineError::QuotaExceeded { .. }))
        ) {
            // The other inputs may fill the queue or the quota: try again when they have ended.
            let all = self.permits.acquire_many(INPUTS_AT_ONCE).await;
            let _all = all.map_err(|_| ApiError::internal())?;
            result = run().await;
        }
        result.map_err(|error| self.refused(index, error))
    }

    /// The reply for an error of one input.
    fn refused(&self, index: usize, error: Error) -> ApiError {
        let Self { param, is_list, .. } = self;
        let name = if *is_list { format!("{param}[{index}]") } else { (*param).to_owned() };
        let is_too_long = matches!(error, Error::Engine(EngineError::PromptTooLong { .. }));
        let error = ApiError::from(error).of_prompt(&name);
        match is_too_long {
            true => error.with_hint(CUT_HINT),
            false => error,
        }
    }
}
