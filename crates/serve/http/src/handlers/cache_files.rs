//! `POST /v1/cache/export` and `/v1/cache/import`: cached prefixes as files, for operators.
//!
//! One prefix is exported or imported at a time, because a whole copy of it is in memory outside of
//! the KV pool. It is at most as large as the pool. A client that is slower than [`MIN_RATE`] is
//! cut off, so that it does not block other exports and imports.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::stream;
use http_body_util::BodyExt;
use stolon::PrefixImport;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::api::cache::{CacheRequest, Imported};
use crate::handlers::app::App;
use crate::wire::activity::Activity;
use crate::wire::error::ApiError;
use crate::wire::receive::{Received, check_content_encoding, linger};

/// The media type of exported prefixes. A web page can send it to another site only after a CORS
/// preflight request.
const CONTENT_TYPE: &str = "application/octet-stream";

/// Bytes per second at which a file must be sent or received, on average over the whole file.
const MIN_RATE: f64 = (256 << 10) as f64;

/// Lets one prefix be exported or imported at a time.
#[derive(Debug)]
pub(crate) struct PrefixFiles(Arc<Semaphore>);

impl PrefixFiles {
    pub(crate) fn new() -> Self {
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
pub(crate) async fn export(
    State(app): State<Arc<App>>,
    activity: Option<Extension<Arc<Activity>>>,
    body: Received,
) -> Result<Response, ApiError> {
    let (request, held): (CacheRequest, _) = app.parser.parse_held(body).await?;
    let permit = app.prefix_files.begin()?;
    let requests = app.tokenized(request.prompts, held).await?;
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
    let sent = watch::Sender::new(0);
    if let Some(Extension(activity)) = activity {
        let pace = Pace { begun: Instant::now(), pause: app.bodies.time };
        tokio::spawn(end_if_slow(pace, sent.subscribe(), activity));
    }
    let records = prefix.map(move |record| {
        let _held_until_the_end = &permit;
        sent.send_modify(|sent| *sent += record.len());
        Ok::<_, Infallible>(record)
    });
    Ok((headers, Body::from_stream(stream::iter(records))).into_response())
}

/// The speed at which a file must be sent or received.
struct Pace {
    begun: Instant,
    /// Maximum time without any progress.
    pause: Duration,
}

impl Pace {
    /// The time by which more than these bytes must have been sent or received.
    fn until(&self, bytes: usize) -> Instant {
        self.begun + self.pause + Duration::from_secs_f64(bytes as f64 / MIN_RATE)
    }
}

/// Closes the connection if a reply is received too slowly, until its sender is dropped.
async fn end_if_slow(pace: Pace, mut sent: watch::Receiver<usize>, activity: Arc<Activity>) {
    loop {
        let until = pace.until(*sent.borrow_and_update());
        match tokio::time::timeout_at(until, sent.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => return activity.end(),
        }
    }
}

/// `POST /v1/cache/import`: verifies an exported prefix and adds it to the cache.
pub(crate) async fn import(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Imported>, ApiError> {
    let activity = request.extensions().get::<Arc<Activity>>().cloned();
    let begun = begin_import(&app, request.headers()).await;
    let mut body = request.into_body();
    let received = match begun {
        Ok((mut import, permit)) => {
            receive(&app, &mut body, &mut import).await.map(|()| (import, permit))
        }
        Err(error) => Err(error),
    };
    if received.is_err() {
        linger(body);
    }
    if let Some(activity) = activity {
        activity.busy();
    }
    let (import, _permit) = received?;
    Ok(Json(Imported { tokens: import.finish().await? }))
}

async fn begin_import(
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
    Ok((app.engine.cache().import().await?, app.prefix_files.begin()?))
}

/// Receives a file. Each piece must arrive within the time limit of a whole body. The import limits
/// the size, because it knows the pool.
async fn receive(app: &App, body: &mut Body, import: &mut PrefixImport) -> Result<(), ApiError> {
    let pace = Pace { begun: Instant::now(), pause: app.bodies.time };
    let mut received = 0;
    loop {
        let until = pace.until(received).min(Instant::now() + pace.pause);
        let frame = tokio::time::timeout_at(until, body.frame()).await.map_err(|_| {
            let message = format!(
                "the body arrives too slowly: expected {} KiB/s and no pause of {:?}",
                MIN_RATE / 1024.0,
                pace.pause
            );
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
        })?;
        let Some(frame) = frame else { return Ok(()) };
        let frame = frame
            .map_err(|error| ApiError::invalid(None, format!("the body was cut off: {error}")))?;
        if let Some(data) = frame.data_ref() {
            received += data.len();
            import.push(data)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a reply is cut off if its bytes are not taken at the minimum rate, and not before.
    #[tokio::test(start_paused = true)]
    async fn slow_exports_end() {
        let second = Duration::from_secs(1);
        let (activity, sent) = (Activity::new(), watch::Sender::new(0));
        let begun = Instant::now();
        let pace = Pace { begun, pause: 10 * second };
        let watching = tokio::spawn(end_if_slow(pace, sent.subscribe(), Arc::clone(&activity)));
        for _ in 0..100 {
            tokio::time::sleep(second).await;
            sent.send_modify(|sent| *sent += MIN_RATE as usize);
        }
        assert!(tokio::time::timeout(9 * second, activity.ended()).await.is_err());
        activity.ended().await;
        assert_eq!(begun.elapsed().as_secs(), 110);
        watching.await.expect("ended");
        let pace = Pace { begun, pause: 1000 * second };
        let watching = tokio::spawn(end_if_slow(pace, sent.subscribe(), activity));
        drop(sent);
        watching.await.expect("ended with its sender");
    }
}
