//! The handler of `POST /v1/embeddings`.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{StreamExt, TryStreamExt, stream};
use stolon::{Embedding, EngineError, Error, Request};
use tokio::sync::Semaphore;

use crate::api::completions::{Prompt, PromptInput};
use crate::api::embeddings::{self as api, EmbeddingsRequest, EncodingFormat, MAX_INPUTS};
use crate::api::reply::PromptTokensDetails;
use crate::guard::access::Caller;
use crate::guard::deadline::Deadline;
use crate::handlers::app::App;
use crate::handlers::completions::engine_request;
use crate::handlers::context::{Incoming, RequestContext};
use crate::wire::error::ApiError;

/// Maximum number of inputs of one request in the engine at the same time: enough to fill its
/// batches, and few enough to leave room in its queue for other clients.
const INPUTS_AT_ONCE: u32 = 64;

/// Maximum number of values in a reply: inputs times values of a vector. Each takes up to 16 bytes
/// as text. Vectors of up to 4,096 values fit for the maximum number of inputs.
const MAX_VALUES: usize = 1 << 23;

/// Maximum number of tokens of all inputs of a request together.
const MAX_TOKENS: usize = 1 << 20;

/// The common data of the inputs of one request.
struct Inputs {
    app: Arc<App>,
    dimensions: Option<usize>,
    /// Whether inputs that are too long are cut.
    truncates: bool,
    deadline: Deadline,
    /// One permit for each input that is in the engine.
    permits: Semaphore,
    /// Whether the input is a list of inputs, so that errors name the index.
    is_list: bool,
}

/// The handler.
pub(crate) async fn create(
    Incoming { body: request, context }: Incoming<EmbeddingsRequest>,
) -> Result<Response, ApiError> {
    let (app, client) = (Arc::clone(&context.app), context.caller.identity.clone());
    let format = request.encoding_format.unwrap_or_default();
    let Computed { model, embeddings } = compute(context, request, false).await?;
    let count = embeddings.iter().map(|embedding| embedding.values.len()).sum();
    let hides_cached_tokens = app.hide_cached_tokens;
    let encode = move || reply(embeddings, model, format, hides_cached_tokens);
    app.parser.run(client, count, encode).await
}

/// The vectors of a request.
pub(crate) struct Computed {
    /// The model's name for the reply.
    pub(crate) model: String,
    /// One vector per input, in their order.
    pub(crate) embeddings: Vec<Embedding>,
}

/// Computes the vectors of all inputs. With `truncates`, inputs that are too long are cut.
pub(crate) async fn compute(
    context: RequestContext,
    request: EmbeddingsRequest,
    truncates: bool,
) -> Result<Computed, ApiError> {
    let RequestContext { app, caller, ignored, held, .. } = context;
    let (model, adapter) = app.chosen(request.model, &ignored)?;
    let size = app.engine.embedding_size(request.dimensions)?;
    let inputs = Arc::new(Inputs {
        app: Arc::clone(&app),
        dimensions: request.dimensions,
        truncates,
        deadline: caller.deadline.within(app.request_timeout),
        permits: Semaphore::new(INPUTS_AT_ONCE as usize),
        is_list: matches!(request.input, PromptInput::Texts(_) | PromptInput::TokenLists(_)),
    });
    let prompts = request.input.into_prompts();
    let count = prompts.len();
    check_count(count, size)?;
    let tokens = inputs.tokenise(prompts, &caller).await?;
    drop(held);
    let salt = caller.tenant.salt(request.cache_salt.as_deref());
    let priority = app.priority.of(request.priority);
    let prompt = |tokens| {
        let prompt = Request::tokens(tokens).priority(priority);
        let prompt = caller.sign(prompt);
        let prompt = match &adapter {
            Some(adapter) => prompt.adapter(adapter),
            None => prompt,
        };
        match &salt {
            Some(salt) => prompt.cache_salt(salt.clone()),
            None => prompt,
        }
    };
    let prompts = tokens.into_iter().map(prompt).enumerate();
    let embed = |(index, prompt)| Arc::clone(&inputs).embed(index, prompt);
    // Collected, because a closure that borrows cannot be part of a handler's future.
    let embeddings = stream::iter(prompts.map(embed).collect::<Vec<_>>());
    let embeddings: Vec<Embedding> =
        embeddings.buffered(INPUTS_AT_ONCE as usize).try_collect().await?;
    Ok(Computed { model, embeddings })
}

/// Refuses an empty list of inputs, and one whose vectors would exceed [`MAX_VALUES`].
fn check_count(count: usize, size: usize) -> Result<(), ApiError> {
    let most = MAX_INPUTS.min(MAX_VALUES / size.max(1)).max(1);
    if (1..=most).contains(&count) {
        return Ok(());
    }
    let message = format!("`input`: expected 1 to {most} inputs, got {count}");
    Err(ApiError::invalid(Some("input"), message).code("invalid_value"))
}

impl Inputs {
    /// The token ids of all inputs. Each is checked before any is computed.
    async fn tokenise(
        &self,
        prompts: Vec<Prompt>,
        caller: &Caller,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let mut all = Vec::with_capacity(prompts.len());
        let mut sum = 0;
        for (index, prompt) in prompts.into_iter().enumerate() {
            let mut tokens = match prompt {
                Prompt::Tokens(tokens) => tokens,
                // Special tokens alone are not a text, so an empty text counts as an empty input.
                Prompt::Text(text) if text.is_empty() => Vec::new(),
                // The text may be longer than the engine takes.
                Prompt::Text(text) if self.truncates => {
                    let client = caller.identity.clone();
                    self.app.engine.tokenize_for(text, true, client).await?
                }
                text @ Prompt::Text(_) => {
                    let request = caller.sign(engine_request(text));
                    let tokens = self.app.engine.prompt_tokens(&request).await;
                    tokens.map_err(|error| self.refused(index, error))?
                }
            };
            // The engine would refuse the input too, but only after it has begun with others.
            let mut checked = self.app.engine.check_embedding(&tokens);
            if let Err(Error::Engine(EngineError::PromptTooLong { limit, .. })) = checked
                && self.truncates
            {
                self.cut(&mut tokens, limit);
                checked = self.app.engine.check_embedding(&tokens);
            }
            checked.map_err(|error| self.refused(index, error))?;
            sum += tokens.len();
            if sum > MAX_TOKENS {
                let message =
                    format!("`input`: expected at most {MAX_TOKENS} tokens in all, got more");
                return Err(ApiError::invalid(Some("input"), message).code("invalid_value"));
            }
            all.push(tokens);
            // Short texts are tokenized on this thread, and there may be many.
            tokio::task::yield_now().await;
        }
        Ok(all)
    }

    /// Cuts the end of an input, except for a token that ends texts.
    fn cut(&self, tokens: &mut Vec<u32>, limit: usize) {
        let ends = &self.app.engine.model_info().eos_token_ids;
        let end = tokens.last().copied().filter(|token| ends.contains(token));
        tokens.truncate(limit);
        if let (Some(end), Some(last)) = (end, tokens.last_mut()) {
            *last = end;
        }
    }

    /// Computes the embedding of one input.
    async fn embed(self: Arc<Self>, index: usize, prompt: Request) -> Result<Embedding, ApiError> {
        let embed = || {
            let prompt = match self.deadline.left() {
                Some(left) => prompt.clone().timeout(left),
                None => prompt.clone(),
            };
            self.app.engine.embed(prompt, self.dimensions)
        };
        // The semaphore is never closed.
        let permit = self.permits.acquire().await.map_err(|_| ApiError::internal())?;
        let mut result = embed().await;
        drop(permit);
        if matches!(
            result,
            Err(Error::Engine(EngineError::Overloaded { .. } | EngineError::QuotaExceeded { .. }))
        ) {
            // The other inputs may fill the queue or the quota: try again when they have ended.
            let all = self.permits.acquire_many(INPUTS_AT_ONCE).await;
            let _all = all.map_err(|_| ApiError::internal())?;
            result = embed().await;
        }
        result.map_err(|error| self.refused(index, error))
    }

    /// The reply for an error of one input.
    fn refused(&self, index: usize, error: Error) -> ApiError {
        let name = if self.is_list { format!("input[{index}]") } else { "input".to_owned() };
        ApiError::from(error).of_prompt(&name)
    }
}

/// The reply.
fn reply(
    embeddings: Vec<Embedding>,
    model: String,
    format: EncodingFormat,
    hides_cached_tokens: bool,
) -> Response {
    let prompt_tokens = embeddings.iter().map(|embedding| embedding.prompt_tokens).sum();
    let cached_tokens = embeddings.iter().map(|embedding| embedding.cached_tokens).sum();
    let data = embeddings.into_iter().enumerate().map(|(index, embedding)| api::Embedding {
        object: "embedding",
        index,
        embedding: match format {
            EncodingFormat::Float => api::Vector::Float(embedding.values),
            EncodingFormat::Base64 => api::Vector::Base64(base64(&embedding.values)),
        },
    });
    let usage = api::EmbeddingsUsage {
        prompt_tokens,
        total_tokens: prompt_tokens,
        prompt_tokens_details: (!hides_cached_tokens)
            .then_some(PromptTokensDetails { cached_tokens, image_tokens: 0 }),
    };
    Json(api::Embeddings { object: "list", data: data.collect(), model, usage }).into_response()
}

/// The values as 32-bit little-endian numbers in base64.
fn base64(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}
