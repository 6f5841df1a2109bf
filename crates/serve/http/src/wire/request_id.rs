//! The id of an HTTP request, by which a client and an operator find it in the log.
//!
//! A client or a proxy may choose it with the header `x-request-id`. It is returned in the reply's
//! header of the same name and is a field of the request's span.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Span;

use crate::wire::{traces, unix_seconds};

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The name of the reply's header that Anthropic's clients read.
const ANTHROPIC_HEADER: HeaderName = HeaderName::from_static("request-id");

/// Maximum length of an id that a client chose, in bytes.
const MAX_BYTES: usize = 128;

/// The id of a request, as a request extension. It is printable ASCII without spaces.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// The id that the client chose. A fresh one if the client chose none, or if its id is too long
    /// or has characters that are not allowed in the log.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(HEADER).filter(|id| is_valid(id.as_bytes())).cloned();
        Self(given.unwrap_or_else(|| {
            fresh().parse().expect("hexadecimal digits are a valid header value")
        }))
    }

    /// Sets the header of a reply.
    pub(crate) fn add_to(self, response: &mut Response) {
        response.headers_mut().insert(ANTHROPIC_HEADER, self.0.clone());
        response.headers_mut().insert(HEADER, self.0);
    }

    /// The id.
    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

fn is_valid(id: &[u8]) -> bool {
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    (1..=MAX_BYTES).contains(&id.len()) && id.iter().all(is_allowed)
}

/// A new id, of hexadecimal digits. The counter makes it unique in this process, the time and the
/// process id make it unique between processes.
pub(crate) fn fresh() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{:x}{:08x}{count:08x}", unix_seconds(), std::process::id())
}

/// Middleware of all routes: determines the id of a request and returns it with the reply.
pub(crate) async fn middleware(mut request: Request, next: Next) -> Response {
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    id.add_to(&mut response);
    response
}

/// The span of a request. The engine's spans of the answers are inside it.
pub(crate) fn span(request: &Request) -> Span {
    let id = request.extensions().get::<RequestId>().map_or("", RequestId::as_str);
    let span = tracing::info_span!(
        "http_request",
        method = %request.method(),
        path = request.uri().path(),
        request_id = id,
    );
    traces::begin(&span, request, id);
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a short id of harmless characters is kept, anything else is replaced by a fresh one.
    #[test]
    fn ids_of_clients_are_kept_if_they_are_harmless() {
        let of = |id: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, HeaderValue::from_bytes(id).expect("a header value"));
            RequestId::of(&headers).as_str().to_owned()
        };
        let long = "x".repeat(MAX_BYTES);
        for id in ["a", "5b0f6ae2-8f0c-4c31-9a87-2d1f3c2b1a00", "svc/7:1+2=@b_.", &long] {
            assert_eq!(of(id.as_bytes()), id);
        }
        let longer = "x".repeat(MAX_BYTES + 1);
        for id in ["", "a b", "a\tb", "\"", "{}", "%0a", "\u{e9}", &longer] {
            let fresh = of(id.as_bytes());
            assert_ne!(fresh, id);
            assert!(is_valid(fresh.as_bytes()), "{fresh}");
        }
        assert_ne!(fresh(), fresh());
    }
}
