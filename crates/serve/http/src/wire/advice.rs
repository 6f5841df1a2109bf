//! Parameters that are accepted and ignored, and how they are reported to the client.
//!
//! A parameter that is only advice (how long to think, how much to write, which hosted tools to
//! offer) does not make an answer wrong if it is ignored. Clients send such parameters by default,
//! so that refusing them would refuse the client. They are named in the header `x-stolon-ignored`
//! of the reply, and logged once per name.
//!
//! [`middleware`] adds an [`Ignored`] to each request; the parser of bodies and the handlers note
//! the parameters that they ignore.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-stolon-ignored");

/// The name of the model that answers, in replies to requests with a name that is not listed.
pub(crate) const MODEL_HEADER: HeaderName = HeaderName::from_static("x-stolon-model");

/// Maximum number of names in one header.
const MAX_NAMES: usize = 32;
/// Maximum number of names that are logged in the life of the process.
const MAX_LOGGED: usize = 256;
/// Maximum length of a name, in bytes.
const MAX_NAME_BYTES: usize = 100;

/// How unknown parameters are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownParameters {
    /// The request is refused with status 400, which names the parameter.
    #[default]
    Refuse,
    /// They are ignored, logged once, and named in the header `x-stolon-ignored`.
    Warn,
}

impl FromStr for UnknownParameters {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "refuse" => Ok(Self::Refuse),
            "warn" => Ok(Self::Warn),
            _ => Err(format!("expected refuse or warn, got `{text}`")),
        }
    }
}

/// The parameters of one request that were ignored, as a request extension. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ignored {
    pub(crate) unknown: UnknownParameters,
    paths: Arc<Mutex<BTreeSet<String>>>,
    /// The name of the model that answers, if the request has another one.
    model: Arc<OnceLock<HeaderValue>>,
}

impl Ignored {
    /// Notes that the parameter at this path is ignored.
    pub(crate) fn note(&self, path: &str) {
        let name = printable(path);
        log_once(&name);
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        if paths.len() < MAX_NAMES {
            paths.insert(name);
        }
    }

    /// Notes that the model with this name answers a request with another name.
    pub(crate) fn answered_by(&self, model: &str) {
        if let Ok(name) = HeaderValue::from_str(model) {
            let _ = self.model.set(name); // It is the same each time.
        }
    }

    /// The names as the value of a header; `None` if nothing was ignored.
    fn header(&self) -> Option<HeaderValue> {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<&str> = paths.iter().map(String::as_str).collect();
        (!names.is_empty()).then(|| names.join(", ").parse().ok())?
    }
}

/// A path as it may be logged and sent in a header: a client may have chosen it.
fn printable(path: &str) -> String {
    let safe = |char: char| if char.is_ascii_graphic() && char != ',' { char } else { '?' };
    path.chars().take(MAX_NAME_BYTES).map(safe).collect()
}

fn log_once(name: &str) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.len() < MAX_LOGGED && logged.insert(name.to_owned()) {
        tracing::warn!("the parameter `{name}` of requests is ignored; this is logged once");
    }
}

/// Middleware of all routes: names the ignored parameters in the reply, and the model if the
/// request's name of it was ignored.
pub(crate) async fn middleware(
    State(unknown): State<UnknownParameters>,
    mut request: Request,
    next: Next,
) -> Response {
    let ignored = Ignored { unknown, ..Ignored::default() };
    request.extensions_mut().insert(ignored.clone());
    let mut response = next.run(request).await;
    if let Some(names) = ignored.header() {
        response.headers_mut().insert(HEADER, names);
    }
    if let Some(model) = ignored.model.get() {
        response.headers_mut().insert(MODEL_HEADER, model.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names are listed once each and in order, and nothing that a client chose breaks the
    /// header or makes it long.
    #[test]
    fn names_are_safe_in_a_header() {
        let ignored = Ignored::default();
        assert_eq!(ignored.header(), None);
        for path in ["verbosity", "store", "verbosity", "a,b\r\nc\u{e9}"] {
            ignored.note(path);
        }
        assert_eq!(ignored.header().expect("names"), "a?b??c?, store, verbosity");
        for number in 0..10_000 {
            ignored.note(&format!("{number}{}", "x".repeat(1_000)));
        }
        let header = ignored.header().expect("names");
        assert!(header.len() <= MAX_NAMES * (MAX_NAME_BYTES + 2), "{}", header.len());
    }
}
