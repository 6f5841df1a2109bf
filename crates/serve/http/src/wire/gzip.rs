//! Compresses replies by gzip, for clients that accept it.
//!
//! Only texts whose length is known are compressed. A stream of events would wait in the compressor
//! instead of arriving piece by piece, and a file of KV does not become much smaller.

use axum::body::HttpBody;
use axum::http::{Response, header};
use tower_http::CompressionLevel;
use tower_http::compression::{CompressionLayer, Predicate};

/// Minimum size of a body that is compressed, in bytes. Smaller ones fit in a packet or two.
const MIN_BYTES: u64 = 1 << 10;

/// The replies that are compressed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LongTexts;

/// The layer, which is fast rather than thorough, because it runs where tokens are forwarded.
pub(crate) fn layer() -> CompressionLayer<LongTexts> {
    CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(LongTexts)
}

impl Predicate for LongTexts {
    fn should_compress<B: HttpBody>(&self, response: &Response<B>) -> bool {
        let is_long = response.body().size_hint().exact().is_some_and(|size| size >= MIN_BYTES);
        let kind = response.headers().get(header::CONTENT_TYPE);
        is_long && kind.and_then(|kind| kind.to_str().ok()).is_some_and(is_text)
    }
}

/// Whether a body of this media type is text, and not a stream.
fn is_text(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    match essence {
        "text/event-stream" => false,
        "application/json" | "application/openmetrics-text" | "image/svg+xml" => true,
        essence => essence.starts_with("text/"),
    }
}
