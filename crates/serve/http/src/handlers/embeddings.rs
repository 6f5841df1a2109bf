//! The handlers of `POST /v1/embeddings` and `POST /pooling`.

mod own_tokens;

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use stolon::Embedding;

use crate::api::completions::{Prompt, PromptInput};
use crate::api::embeddings::{
    self as api, EmbeddingsRequest, EncodingFormat, MAX_INPUTS, PooledVector,
};
use crate::api::options::Truncation;
use crate::api::reply::PromptTokensDetails;
use crate::handlers::app::App;
use crate::handlers::completions::engine_request;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::pooled::{self, Inputs};
use crate::handlers::scores;
use crate::wire::error::ApiError;

/// Maximum number of values in a reply: inputs times values of a vector. Each takes up to 16 bytes
/// as text. Vectors of up to 4,096 values fit for the maximum number of inputs.
const MAX_VALUES: usize = 1 << 23;

/// Names of a model's prompt for queries. Each is a kind of input in some API, too.
const QUERY: [&str; 4] = ["query", "search_query", "s2p_query", "retrieval.query"];
/// The task of queries and documents, in models that have one for both.
const RETRIEVAL: &str = "retrieval";
/// Names of a model's prompt for documents.
const DOCUMENT: [&str; 5] =
    ["document", "passage", "search_document", "corpus", "retrieval.passage"];

/// The handler.
pub(crate) async fn create(request: Incoming<EmbeddingsRequest>) -> Result<Response, ApiError> {
    respond(request, |Computed { model, embeddings }, usage, format| {
        let data = embeddings.into_iter().enumerate().map(|(index, embedding)| api::Embedding {
            object: "embedding",
            index,
            embedding: vector(embedding.values, format),
        });
        Json(api::Embeddings { object: "list", data: data.collect(), model, usage }).into_response()
    })
    .await
}

/// The handler of `POST /pooling`: the same vectors, in vLLM's form. That of a model for
/// classification has a score for each label.
pub(crate) async fn pool(request: Incoming<EmbeddingsRequest>) -> Result<Response, ApiError> {
    let info = request.context.app.engine.model_info();
    if info.embedding.is_none() && info.scores.is_some() {
        return scores::pool(request).await;
    }
    respond(request, |Computed { model, embeddings }, usage, format| {
        let data = embeddings.into_iter().enumerate().map(|(index, embedding)| PooledVector {
            index,
            object: "pooling",
            data: vector(embedding.values, format),
        });
        scores::list("pool", model, data.collect(), usage)
    })
    .await
}

/// Computes the vectors of a request, and writes the reply with `encode`.
async fn respond(
    Incoming { body: request, context }: Incoming<EmbeddingsRequest>,
    encode: impl FnOnce(Computed, api::EmbeddingsUsage, EncodingFormat) -> Response + Send + 'static,
) -> Result<Response, ApiError> {
    let (app, client) = (Arc::clone(&context.app), context.caller.identity.clone());
    let format = request.encoding_format.unwrap_or_default();
    let computed = compute(context, request).await?;
    let count = computed.embeddings.iter().map(|embedding| embedding.values.len()).sum();
    let usage = usage(&computed.embeddings, app.hide_cached_tokens);
    app.parser.run(client, count, move || encode(computed, usage, format)).await
}

/// The vectors of a request.
pub(crate) struct Computed {
    /// The model's name for the reply.
    pub(crate) model: String,
    /// One vector per input, in their order.
    pub(crate) embeddings: Vec<Embedding>,
}

/// Computes the vectors of all inputs.
pub(crate) async fn compute(
    context: RequestContext,
    request: EmbeddingsRequest,
) -> Result<Computed, ApiError> {
    let RequestContext { app, caller, ignored, held, .. } = context;
    let (model, adapter) = app.chosen(request.model.clone(), &ignored)?;
    let size = app.engine.embedding_size(request.dimensions)?;
    let Before { text: before, task } = before(&app, &request)?;
    let is_list = matches!(request.input, PromptInput::Texts(_) | PromptInput::TokenLists(_));
    let inputs = Inputs::new(&app, &caller, "input", is_list);
    let prompts = request.input.into_prompts();
    let count = prompts.len();
    inputs.check_count(count, MAX_INPUTS.min(MAX_VALUES / size.max(1)).max(1))?;
    own_tokens::check(&app, &prompts, is_list).await?;
    let most = truncation(&app, request.truncate_prompt_tokens);
    let input = |prompt: Prompt| {
        let prompt = match prompt {
            // Special tokens alone are not a text, so an empty text counts as an empty input.
            Prompt::Text(text) if text.is_empty() => return None,
            Prompt::Text(text) => Prompt::Text(format!("{before}{text}")),
            tokens @ Prompt::Tokens(_) => tokens,
        };
        Some(caller.sign(engine_request(prompt)))
    };
    let tokens = inputs.tokenize(prompts.into_iter().map(input), most).await?;
    drop(held);
    let salt = caller.tenant.salt(request.cache_salt.as_deref());
    let priority = app.priority.of(request.priority);
    let prompt = |tokens| {
        let (adapter, salt) = (adapter.as_deref(), salt.as_deref());
        let prompt = pooled::request(&caller, tokens, adapter, salt, priority);
        match &task {
            Some(task) => prompt.task(Arc::clone(task)),
            None => prompt,
        }
    };
    let prompts = tokens.into_iter().map(prompt).collect();
    let dimensions = request.dimensions;
    let embed = |app: Arc<App>, prompt| async move { app.engine.embed(prompt, dimensions).await };
    let embeddings = inputs.compute(prompts, embed).await?;
    Ok(Computed { model, embeddings })
}

/// What a request says about its inputs.
struct Before {
    /// The text before each input.
    text: String,
    /// The task whose matrices compute the vectors.
    task: Option<Arc<str>>,
}

/// The text before each input: the model's prompt with the name `prompt_name`, or for `task` or
/// `input_type`, or its default.
fn before(app: &App, request: &EmbeddingsRequest) -> Result<Before, ApiError> {
    let info = app.engine.model_info();
    let prompts = &info.prompts;
    let listed = |names: Vec<String>, none: &str| match names.is_empty() {
        true => none.to_owned(),
        false => format!("one of {}", names.join(", ")),
    };
    let names = || {
        let names = prompts.named.keys().map(|name| format!("`{name}`"));
        listed(names.collect(), "none, because the model has no prompts")
    };
    let task_of = |name: &str| info.tasks.iter().find(|task| *task == name);
    if let Some(task) = request.task.as_deref().filter(|task| task_of(task).is_none()) {
        let names = info.tasks.iter().map(|name| format!("`{name}`"));
        let expected = listed(names.collect(), "none, because the model has no matrices for tasks");
        return Err(ApiError::expected("task", &expected, &json!(task)));
    }
    let mut task = request.task.as_ref();
    let default = || {
        let default = prompts.default.as_ref().and_then(|name| prompts.named.get(name));
        default.cloned().unwrap_or_default()
    };
    let text = if let Some(name) = &request.prompt_name {
        let prompt = prompts.named.get(name);
        prompt.ok_or_else(|| ApiError::expected("prompt_name", &names(), &json!(name)))?.clone()
    } else if let Some(prompt) = task.and_then(|task| prompts.named.get(task)) {
        prompt.clone()
    } else if let Some(kind) = request.input_type.as_deref() {
        let first =
            |names: &[&str]| names.iter().find_map(|name| prompts.named.get_key_value(*name));
        let of_kind = [&QUERY[..], &DOCUMENT].into_iter().find(|names| names.contains(&kind));
        let found = first(&[kind]).or_else(|| first(of_kind?));
        let own = found.and_then(|(name, _)| task_of(name)).or_else(|| task_of(kind));
        task = task.or(own).or_else(|| of_kind.and_then(|_| task_of(RETRIEVAL)));
        // Documents of some models have no prompt, as those of snowflake-arctic-embed.
        let is_plain = DOCUMENT.contains(&kind) && first(&QUERY).is_some();
        let prompt = found.map(|(_, prompt)| prompt.clone());
        let prompt =
            prompt.or_else(|| is_plain.then(String::new)).or_else(|| own.map(|_| default()));
        prompt.ok_or_else(|| ApiError::expected("input_type", &names(), &json!(kind)))?
    } else {
        default()
    };
    Ok(Before { text, task: task.map(|task| task.as_str().into()) })
}

/// The maximum number of tokens that are used of an input; `None` if a longer one is refused.
pub(crate) fn truncation(app: &App, wanted: Option<Truncation>) -> Option<usize> {
    let context = app.engine.model_info().max_positions;
    let wanted = wanted.or_else(|| app.auto_truncate.then_some(Truncation::Context));
    wanted.map(|wanted| match wanted {
        Truncation::Context => context,
        Truncation::Tokens(count) => count.min(context),
    })
}

/// The numbers of tokens of all inputs.
fn usage(embeddings: &[Embedding], hides_cached_tokens: bool) -> api::EmbeddingsUsage {
    let prompt_tokens = embeddings.iter().map(|embedding| embedding.prompt_tokens).sum();
    let cached_tokens = embeddings.iter().map(|embedding| embedding.cached_tokens).sum();
    api::EmbeddingsUsage {
        prompt_tokens,
        total_tokens: prompt_tokens,
        prompt_tokens_details: (!hides_cached_tokens)
            .then_some(PromptTokensDetails { cached_tokens, image_tokens: 0 }),
    }
}

/// The values in a format.
pub(crate) fn vector(values: Vec<f32>, format: EncodingFormat) -> api::Vector {
    match format {
        EncodingFormat::Float => api::Vector::Float(values),
        EncodingFormat::Base64 => api::Vector::Base64(base64(&values)),
    }
}

/// The values as 32-bit little-endian numbers in base64.
fn base64(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}
