//! Why prompts were not cached: `/v1/cache/explain`, `/v1/cache/misses` and the header
//! `x-stolon-cache` of replies.

use std::fmt::Write;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderValue;
use stolon::{CacheMiss, Request};

use crate::api::cache::{ClientMiss, Explanation, Explanations, Miss, Misses};
use crate::handlers::app::App;
use crate::wire::error::ApiError;

/// Maximum number of misses of one reply.
const LISTED: usize = 50;

/// `GET /v1/cache/misses`.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Misses> {
    let cache = app.engine.cache();
    let mut misses = cache.misses();
    misses.sort_by_key(|logged| std::cmp::Reverse(logged.miss.lost_tokens));
    misses.truncate(LISTED);
    Json(Misses {
        reasons: cache.miss_counts().into_iter().map(Into::into).collect(),
        misses: misses.iter().map(ClientMiss::from).collect(),
    })
}

/// Explains the prompts of a request, which is not run.
pub(crate) async fn explain(
    app: &App,
    requests: Vec<Request>,
) -> Result<Json<Explanations>, ApiError> {
    let mut results = Vec::new();
    for request in requests {
        let request = app.engine.tokenized(request).await?;
        let miss = app.engine.cache().explain(&request).await?;
        let (prompt_tokens, cached_tokens) = match &miss {
            Some(miss) => (miss.prompt_tokens, miss.cached_tokens),
            None => {
                let estimate = app.engine.estimate(&request)?;
                (estimate.prompt_tokens, estimate.cached_tokens)
            }
        };
        let miss = miss.as_ref().map(Miss::from);
        results.push(Explanation { prompt_tokens, cached_tokens, miss });
    }
    Ok(Json(Explanations { results }))
}

/// The value of the header for a miss: a dictionary of structured fields (RFC 9651).
pub(crate) fn header(miss: &CacheMiss) -> Option<HeaderValue> {
    let mut value = format!(
        "reason={}, lost={}, cached={}, prompt={}",
        miss.reason.as_str(),
        miss.lost_tokens,
        miss.cached_tokens,
        miss.prompt_tokens
    );
    if let Some(message) = &miss.message {
        // Writing to a string cannot fail.
        let _ = write!(value, ", message={}", message.index);
    }
    HeaderValue::from_str(&value).ok()
}
