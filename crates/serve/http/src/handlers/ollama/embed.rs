//! The handlers of `POST /api/embed` and `POST /api/embeddings`.

use std::time::Instant;

use axum::Json;

use super::reply::nanoseconds;
use crate::api::completions::PromptInput;
use crate::api::embeddings::EmbeddingsRequest;
use crate::api::fields::UnknownFields;
use crate::api::ollama::{Embedded, Embeddings, OllamaEmbed, OllamaEmbeddings};
use crate::api::options::Truncation;
use crate::handlers::context::{Incoming, RequestContext};
use crate::handlers::embeddings::{Computed, compute};
use crate::wire::error::ApiError;

/// `POST /api/embed`.
pub(crate) async fn embed(
    Incoming { body: request, context }: Incoming<OllamaEmbed>,
) -> Result<Json<Embedded>, ApiError> {
    let begin = Instant::now();
    let name = request.model.clone().unwrap_or_else(|| context.app.model_name().to_owned());
    let mut asked = asked(&context, request.model, request.input, request.dimensions);
    if request.truncate == Some(false) {
        asked.truncate_prompt_tokens = None;
    }
    let Computed { embeddings, .. } = compute(context, asked).await?;
    let prompt_eval_count = embeddings.iter().map(|embedding| embedding.prompt_tokens).sum();
    Ok(Json(Embedded {
        model: name,
        embeddings: embeddings.into_iter().map(|embedding| embedding.values).collect(),
        total_duration: nanoseconds(begin.elapsed()),
        load_duration: 0,
        prompt_eval_count,
    }))
}

/// `POST /api/embeddings`.
pub(crate) async fn embeddings(
    Incoming { body: request, context }: Incoming<OllamaEmbeddings>,
) -> Result<Json<Embeddings>, ApiError> {
    let input = PromptInput::Text(request.prompt);
    let asked = asked(&context, request.model, input, None);
    let Computed { embeddings, .. } = compute(context, asked).await?;
    let embedding = embeddings.into_iter().next().ok_or_else(ApiError::internal)?.values;
    Ok(Json(Embeddings { embedding }))
}

/// The request in the form of `/v1/embeddings`. Inputs that are too long are cut.
fn asked(
    context: &RequestContext,
    model: Option<String>,
    input: PromptInput,
    dimensions: Option<usize>,
) -> EmbeddingsRequest {
    EmbeddingsRequest {
        input,
        model: model.map(|model| context.app.listed_name(model)),
        encoding_format: None,
        dimensions,
        prompt_name: None,
        input_type: None,
        task: None,
        truncate_prompt_tokens: Some(Truncation::Context),
        cache_salt: None,
        priority: None,
        unknown: UnknownFields::default(),
    }
}
