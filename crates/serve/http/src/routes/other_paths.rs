//! Paths that clients use for a route that has another one: without `/v1`, with `/v1` twice, or
//! with a slash too many. They are answered as the route is. The reply for a path that only another
//! server has names the route here that does the same.
//!
//! Routes for operators have their own paths only, because a reverse proxy may refuse these by name.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::uri::PathAndQuery;
use axum::http::{Method, StatusCode, Uri};

use crate::handlers::app::RouterOptions;
use crate::routes::{self, Role};
use crate::wire::error::ApiError;
use crate::wire::receive::linger;

/// The beginning of the paths of OpenAI's and Anthropic's APIs.
const API: &str = "/v1";

/// Prefixes that other servers put before it.
const PREFIXES: [&str; 2] = ["/api", "/openai"];

/// Paths of other servers, and the routes to use instead.
const HINTS: &[(&str, &str)] = &[
    ("/embedding", "of llama.cpp: use POST /v1/embeddings"),
    ("/slots", "of llama.cpp: use GET /metrics"),
    ("/generate", "of SGLang and TGI: use POST /v1/completions"),
    ("/generate_stream", "of TGI: use POST /v1/completions with `stream`"),
    ("/get_model_info", "of SGLang: use GET /v1/models"),
    ("/info", "of TGI: use GET /v1/models"),
];

/// The paths of the routes that have other paths, too.
#[derive(Clone, Debug)]
pub(crate) struct OtherPaths {
    known: Arc<[&'static str]>,
}

impl OtherPaths {
    /// The other paths of the routes of a router with these options.
    pub(crate) fn of(options: &RouterOptions) -> Self {
        let groups = routes::groups(options).into_iter();
        let routes = groups.flat_map(|group| group.routes);
        let known = routes.filter(|route| route.role != Role::Operator).map(|route| route.path);
        Self { known: known.collect() }
    }

    /// The request with the path of its route, if its path is another path of a route.
    pub(crate) fn settled(&self, mut request: Request) -> Request {
        if let Some(uri) = self.settled_uri(request.uri()) {
            *request.uri_mut() = uri;
        }
        request
    }

    fn settled_uri(&self, uri: &Uri) -> Option<Uri> {
        let mut path = self.route_of(uri.path())?;
        if let Some(query) = uri.query() {
            path = format!("{path}?{query}");
        }
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::try_from(path).ok()?);
        Uri::from_parts(parts).ok()
    }

    /// The path of the route that is meant by a path that is not a route.
    fn route_of(&self, path: &str) -> Option<String> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let path = format!("/{}", parts.join("/"));
        let mut rest = path.as_str();
        for prefix in PREFIXES {
            let inner = rest.strip_prefix(prefix);
            rest = inner.filter(|inner| inner.starts_with("/v1/")).unwrap_or(rest);
        }
        let without = rest.strip_prefix(API).filter(|inner| inner.starts_with('/'));
        let candidates =
            [Some(rest.to_owned()), Some(format!("{API}{rest}")), without.map(str::to_owned)];
        candidates.into_iter().flatten().find(|path| self.is_known(path))
    }

    fn is_known(&self, path: &str) -> bool {
        self.known.iter().any(|route| matches(route, path))
    }
}

/// Whether a path matches a route in axum's syntax.
fn matches(route: &str, path: &str) -> bool {
    let (mut route, mut path) = (route.split('/'), path.split('/'));
    loop {
        match (route.next(), path.next()) {
            (None, None) => return true,
            (Some(wanted), Some(part)) => match wanted {
                wanted if wanted.starts_with("{*") => return !part.is_empty(),
                wanted if wanted.starts_with('{') && !part.is_empty() => {}
                wanted if wanted == part => {}
                _ => return false,
            },
            _ => return false,
        }
    }
}

/// Any path that does not exist.
pub(crate) async fn not_found(method: Method, uri: Uri, request: Request) -> ApiError {
    linger(request.into_body());
    let hint = hint(uri.path());
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no {method} {}{hint}", uri.path()))
}

/// What a client may do instead of asking for this path, which does not exist.
fn hint(path: &str) -> String {
    let path = path.trim_end_matches('/');
    match HINTS.iter().find(|(other, _)| *other == path) {
        Some((_, hint)) => format!(", a path {hint}"),
        None => ": GET /docs shows all routes".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: paths of routes are found without `/v1`, with it twice, with slashes too many and
    /// behind the prefixes of others; paths of operators and of other servers are not.
    #[test]
    fn paths_of_routes_are_found() {
        let paths = OtherPaths::of(&RouterOptions::default());
        for (path, route) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/chat/completions/", Some("/v1/chat/completions")),
            ("/v1/chat/completions/", Some("/v1/chat/completions")),
            ("//v1//models", Some("/v1/models")),
            ("/models", Some("/v1/models")),
            ("/models/org/name", Some("/v1/models/org/name")),
            ("/v1/v1/messages", Some("/v1/messages")),
            ("/messages/count_tokens", Some("/v1/messages/count_tokens")),
            ("/v1/tokenize", Some("/tokenize")),
            ("/health/", Some("/health")),
            ("/v1/health", Some("/health")),
            ("/api/v1/chat/completions", Some("/v1/chat/completions")),
            ("/openai/v1/responses", Some("/v1/responses")),
            ("/sessions/7", Some("/v1/sessions/7")),
            ("/cache/stats", None),
            ("/v1/cache/stats/", None),
            ("/v1/admin/audit", None),
            ("/v1/metrics", None),
            ("//admin/audit", None),
            ("/v1", None),
            ("/", None),
            ("/v2/chat/completions", None),
        ] {
            assert_eq!(paths.route_of(path).as_deref(), route, "{path}");
        }
        let uri = Uri::from_static("http://host/models/?x=/a//b");
        let settled = paths.settled_uri(&uri).expect("a route");
        assert_eq!(settled, Uri::from_static("http://host/v1/models?x=/a//b"));
    }

    /// Goal: the reply for a path of another server names a route that exists here.
    #[test]
    fn hints_name_routes() {
        let groups = routes::groups(&RouterOptions::default());
        let routes: Vec<&str> =
            groups.iter().flat_map(|group| &group.routes).map(|route| route.path).collect();
        for (path, hint) in HINTS {
            assert!(super::hint(&format!("{path}/")).contains(hint));
            let is_route = |word: &str| word.starts_with('/') && routes.contains(&word);
            assert!(hint.split([' ', ',']).any(is_route), "{hint}");
        }
        assert!(hint("/nothing").contains("/docs"));
    }
}
