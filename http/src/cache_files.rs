//! `POST /v1/cache/export` and `/v1/cache/import`: cached prefixes as files, for operators.
//!
//! One prefix is exported or imported at a time, because a whole copy of it is in memory outside of
//! the KV pool. It is at most as large as the pool.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use http_body_util::BodyExt;
use stolon::PrefixImport;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::App;
use super::activity::Activity;
use super::error::ApiError;
use super::receive::{Received, check_content_encoding};
use crate::api::cache::{CacheRequest, Imported};

/// The media type of exported prefixes. A web page can send it to another site only after a CORS
/// preflight request.
const CONTENT_TYPE: &str = "application/octet-stream";

/// Lets one prefix be exported or imported at a time.
#[derive(Debug)]
pub(super) struct PrefixFiles(Arc<Semaphore>);

impl PrefixFiles {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }

    fn begin(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.0).try_acquire_owned().map_err(|_| {
            let message = "another prefix is being exported or imported: try again";
            ApiError::unavailable(message, Duration::from_secs(1))
        })
    }
}

/// `POST /v1/cache/export`: computes the part of a prompt that is not cached, and sends its KV as a
/// file.
pub(super) async fn export(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Response, ApiError> {
    let request: CacheRequest = app.parser.parse(body).await?;
    let permit = app.prefix_files.begin()?;
    let requests = app.tokenized(request.prompts).await?;
    let [request] = &requests[..] else {
        let message = format!("`prompt`: expected one prompt, got {}", requests.len());
        return Err(ApiError::invalid(Some("prompt"), message));
    };
    let request = match app.request_timeout {
        Some(timeout) => request.clone().timeout(timeout),
        None => request.clone(),
    };
    let prefix = app.engine.cache().export(&request).await?;
    let headers = [
        (header::CONTENT_TYPE, CONTENT_TYPE.to_owned()),
        (header::CONTENT_LENGTH, prefix.file_bytes().to_string()),
    ];
    let records = prefix.map(move |record| {
        let _held_until_the_end = &permit;
        Ok::<_, Infallible>(record)
    });
    Ok((headers, Body::from_stream(stream::iter(records))).into_response())
}

/// `POST /v1/cache/import`: verifies an exported prefix and adds it to the cache.
pub(super) async fn import(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Imported>, ApiError> {
    let activity = request.extensions().get::<Arc<Activity>>().cloned();
    let begun = begin_import(&app, request.headers());
    let mut body = request.into_body();
    let received = match begun {
        Ok((mut import, permit)) => {
            receive(&app, &mut body, &mut import).await.map(|()| (import, permit))
        }
        Err(error) => Err(error),
    };
    if received.is_err() {
        discard(&app, &mut body).await;
    }
    if let Some(activity) = activity {
        activity.busy();
    }
    let (import, _permit) = received?;
    Ok(Json(Imported { tokens: import.finish().await? }))
}

fn begin_import(
    app: &App,
    headers: &HeaderMap,
) -> Result<(PrefixImport, OwnedSemaphorePermit), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if given != Some(CONTENT_TYPE) {
        let got = given.unwrap_or("none");
        let message = format!("expected the header Content-Type: {CONTENT_TYPE}, got {got}");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    check_content_encoding(headers)?;
    Ok((app.engine.cache().import()?, app.prefix_files.begin()?))
}

/// Receives a file. The total time is not limited, but each piece must arrive within the time limit
/// of a whole body. The import limits the size, because it knows the pool.
async fn receive(app: &App, body: &mut Body, import: &mut PrefixImport) -> Result<(), ApiError> {
    let limit = app.bodies.time;
    loop {
        let frame = tokio::time::timeout(limit, body.frame()).await.map_err(|_| {
            let message = format!("nothing of the body arrived within {limit:?}");
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
        })?;
        let Some(frame) = frame else { return Ok(()) };
        let frame = frame
            .map_err(|error| ApiError::invalid(None, format!("the body was cut off: {error}")))?;
        if let Some(data) = frame.data_ref() {
            import.push(data)?;
        }
    }
}

/// Reads the rest of a refused file, up to the size of the pool: a client that is refused while it
/// sends may not see the reply.
async fn discard(app: &App, body: &mut Body) {
    let mut left = app.engine.model_info().kv_bytes;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(app.bodies.time, body.frame()).await {
        let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, |data| data.len())) else {
            return;
        };
        left = rest;
    }
}
