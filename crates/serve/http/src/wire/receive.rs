//! Receives the body of a request, within limits on its type, size, time and memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::wire::activity::Activity;
use crate::wire::advice::Ignored;
use crate::wire::error::{ApiError, cut};
use crate::wire::peer::ClientName;
use crate::wire::segments::Segments;

/// Bytes of each body that do not count toward the memory of all bodies, so that ordinary requests
/// are accepted while large ones use all of it. The number of connections bounds their sum.
const FREE_BYTES: usize = 64 << 10;

/// Bytes of a refused body that are still read, the time for it, and the time in which nothing may
/// arrive. When one of the limits is reached, the connection is closed.
const LINGER_BYTES: usize = 256 << 20;
const LINGER_TIME: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(2);

/// Limits of the bodies of a router's requests.
#[derive(Clone, Debug)]
pub(crate) struct BodyLimits {
    /// Maximum size of one body, in bytes.
    pub(crate) size: usize,
    /// Maximum time from the end of the headers to the end of the body.
    pub(crate) time: Duration,
    /// One permit for each byte that all bodies may hold together until their prompts have been
    /// tokenized and their images decoded.
    pub(crate) memory: Arc<Semaphore>,
}

/// The whole body of a request of type JSON.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Segments,
    /// The parameters of the request that are ignored.
    pub(crate) ignored: Ignored,
    /// The engine's name for the client, if it is known.
    pub(crate) client: Option<Arc<str>>,
    pub(crate) memory: Held,
}

/// A body that was received before the request was passed to the router that answers it, as an
/// extension of the request. It can be taken once.
#[derive(Clone, Debug)]
pub(crate) struct Already(Arc<Mutex<Option<Received>>>);

impl Already {
    pub(crate) fn new(received: Received) -> Self {
        Self(Arc::new(Mutex::new(Some(received))))
    }

    fn take(&self) -> Option<Received> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The part of [`BodyLimits::memory`] that a body holds.
pub(crate) type Held = Option<OwnedSemaphorePermit>;

#[cfg(test)]
impl From<String> for Received {
    fn from(text: String) -> Self {
        let bytes = text.into_bytes().into();
        Self { bytes, ignored: Ignored::default(), client: None, memory: None }
    }
}

impl<S: Send + Sync> FromRequest<S> for Received
where
    BodyLimits: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        if let Some(received) = request.extensions().get().and_then(Already::take) {
            BodyLimits::from_ref(state).check_size(received.bytes.len())?;
            return Ok(received);
        }
        let checked = check_content_type(request.headers())
            .and_then(|()| check_content_encoding(request.headers()));
        let activity = request.extensions().get::<Arc<Activity>>().cloned();
        let ignored = request.extensions().get::<Ignored>().cloned().unwrap_or_default();
        let client = request.extensions().get().map(|ClientName(name)| Arc::clone(name));
        let limits = BodyLimits::from_ref(state);
        let mut body = request.into_body();
        let received = match checked {
            Ok(()) => limits.receive_in_time(&mut body).await,
            Err(error) => Err(error),
        };
        if received.is_err() {
            linger(body);
        }
        let mut received = received?;
        if let Some(activity) = activity {
            activity.busy();
        }
        received.ignored = ignored;
        received.client = client;
        Ok(received)
    }
}

/// Reads the rest of a refused body and forgets it, while the request is answered. A client that
/// reads the reply only after it has sent everything would otherwise find a closed connection.
pub(crate) fn linger(mut body: Body) {
    if body.is_end_stream() {
        return;
    }
    tokio::spawn(tokio::time::timeout(LINGER_TIME, async move {
        let mut left = LINGER_BYTES;
        while let Ok(Some(Ok(frame))) = tokio::time::timeout(LINGER_PAUSE, body.frame()).await
            && let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, |data| data.len()))
        {
            left = rest;
        }
    }));
}

/// Refuses any type but JSON. A web page can send a form or plain text to any server without a
/// preflight request, but not JSON.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers
        .get(header::CONTENT_TYPE)
        .map_or("none", |value| value.to_str().unwrap_or("an unreadable one"));
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("expected the header Content-Type: application/json, got {given}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// Refuses a compressed body, whose size could be bounded only after it was decompressed.
pub(crate) fn check_content_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    for given in headers.get_all(header::CONTENT_ENCODING) {
        if !given.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity") {
            let message = format!(
                "expected a body that is not compressed (no header Content-Encoding, or identity), \
                 got Content-Encoding: {}",
                cut(String::from_utf8_lossy(given.as_bytes()).into_owned(), 80)
            );
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
    }
    Ok(())
}

impl BodyLimits {
    async fn receive_in_time(&self, body: &mut Body) -> Result<Received, ApiError> {
        let received = tokio::time::timeout(self.time, self.receive(body));
        received.await.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {:?}", self.time);
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        })
    }

    async fn receive(&self, body: &mut Body) -> Result<Received, ApiError> {
        let announced = HttpBody::size_hint(body).lower();
        self.check_size(usize::try_from(announced).unwrap_or(usize::MAX))?;
        let mut bytes = Segments::default();
        let mut memory: Held = None;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                ApiError::invalid(None, format!("the body was cut off: {error}"))
            })?;
            let Ok(data) = frame.into_data() else { continue }; // Trailers are ignored.
            self.check_size(bytes.len() + data.len())?;
            let held = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let needed = (bytes.len() + data.len()).saturating_sub(FREE_BYTES + held);
            if needed > 0 {
                let more = self.reserve(needed)?;
                match &mut memory {
                    Some(memory) => memory.merge(more),
                    None => memory = Some(more),
                }
            }
            bytes.extend(&data);
        }
        Ok(Received { bytes, ignored: Ignored::default(), client: None, memory })
    }

    fn check_size(&self, size: usize) -> Result<(), ApiError> {
        if size <= self.size {
            return Ok(());
        }
        let message = format!("the body is too large: expected at most {} bytes", self.size);
        Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
    }

    /// Reserves memory for bytes that have arrived. It does not wait: bodies that wait for each
    /// other's memory would wait forever.
    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        Arc::clone(&self.memory).try_acquire_many_owned(permits).map_err(|_| {
            let message = "too many large requests are being received: try again";
            ApiError::unavailable(message, Duration::from_secs(1))
        })
    }
}
