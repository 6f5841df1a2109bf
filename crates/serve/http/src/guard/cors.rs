//! CORS: the web origins whose pages may use the routes for clients.

use std::str::FromStr;
use std::time::Duration;

use axum::http::uri::Uri;
use axum::http::{HeaderName, HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::api::cache::MISS_HEADER;
use crate::wire::{advice, request_id};

/// Time for which a browser may cache the reply to a preflight request.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Origins, as one argument of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origins(Vec<HeaderValue>);

impl Origins {
    /// The origins.
    pub fn list(&self) -> impl Iterator<Item = HeaderValue> {
        self.0.iter().cloned()
    }
}

impl FromStr for Origins {
    type Err = String;

    /// Parses an origin, `*`, or a JSON list of them.
    fn from_str(text: &str) -> Result<Self, String> {
        let refused =
            || format!("expected an origin such as https://app.example, or *, got `{text}`");
        let texts = match text.starts_with('[') {
            true => serde_json::from_str::<Vec<String>>(text).map_err(|_| refused())?,
            false => vec![text.to_owned()],
        };
        let origins = texts.iter().map(|text| origin(text).ok_or_else(refused));
        origins.collect::<Result<_, _>>().map(Self)
    }
}

/// A scheme and an authority, as browsers send them: without a path.
fn origin(text: &str) -> Option<HeaderValue> {
    let uri: Option<Uri> = text.parse().ok();
    let is_origin = uri.is_some_and(|uri| match (uri.scheme_str(), uri.authority()) {
        (Some(scheme), Some(authority)) => format!("{scheme}://{authority}") == text,
        _ => false,
    });
    (is_origin || text == "*").then(|| text.parse().ok())?
}

/// The layer that answers browsers; `None` if no origin is allowed.
pub(crate) fn layer(origins: &[HeaderValue]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().cloned()),
    };
    let exposed: [HeaderName; 5] = [
        request_id::HEADER,
        header::RETRY_AFTER,
        advice::HEADER,
        advice::MODEL_HEADER,
        MISS_HEADER,
    ];
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // For browsers, `*` does not include Authorization.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(exposed)
        .max_age(MAX_AGE);
    Some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: origins are parsed alone and as a list; addresses with more than an origin are
    /// refused.
    #[test]
    fn origins_are_parsed() {
        let list = |text: &str| text.parse().map(|Origins(list)| list.len());
        assert_eq!(list("https://app.example:8443"), Ok(1));
        assert_eq!(list("*"), Ok(1));
        assert_eq!(list("[\"http://localhost:3000\", \"*\"]"), Ok(2));
        for bad in ["", "app.example", "https://app.example/", "https://app.example/x", "[7]"] {
            assert!(list(bad).is_err_and(|message| message.contains("expected")), "{bad}");
        }
    }
}
