//! The path below which a server is reached, such as `/llm` behind a reverse proxy.
//!
//! Some proxies remove the path from requests, others do not, so a router with a root path answers
//! both `/llm/v1/models` and `/v1/models`. The root path is removed before anything else looks at
//! the request, so that both have the same rules of access, the same limits, and the same names in
//! logs and traces.

use std::fmt;
use std::str::FromStr;

use axum::Router;
use axum::extract::Request;
use axum::http::Uri;
use axum::http::uri::PathAndQuery;
use axum::response::Redirect;
use axum::routing;
use tower::ServiceExt;

use crate::wire::error::cut;

/// Maximum length of a root path, in bytes.
const MAX_BYTES: usize = 200;

/// The first parts of the paths of the server's own routes.
pub(crate) const OWN_PARTS: [&str; 26] = [
    "admin",
    "api",
    "apply-template",
    "classify",
    "close_session",
    "completion",
    "detokenize",
    "docs",
    "generative_scoring",
    "health",
    "infill",
    "metrics",
    "models",
    "open_session",
    "openapi.json",
    "page",
    "pooling",
    "props",
    "ready",
    "rerank",
    "score",
    "tokenize",
    "tokenizer_info",
    "v1",
    "v2",
    "version",
];

/// The path below which clients reach the server. The default is none.
///
/// Its text is `/` for none, or a path such as `/llm` without a slash at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootPath(String);

impl RootPath {
    /// The path without a slash at its end; empty if there is none.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The part of a path that follows the root path and begins with a slash. A path that is not
    /// below the root path is returned unchanged.
    pub(crate) fn strip<'a>(&self, path: &'a str) -> &'a str {
        path.strip_prefix(&self.0).filter(|rest| rest.starts_with('/')).unwrap_or(path)
    }

    /// Adds the redirect from the root path to the address of the page, whose links are relative.
    pub(crate) fn add_redirect<S>(&self, router: Router<S>) -> Router<S>
    where
        S: Clone + Send + Sync + 'static,
    {
        if self.0.is_empty() {
            return router;
        }
        let target = format!("{}/", self.0);
        router.route(&self.0, routing::get(async move || Redirect::temporary(&target)))
    }

    /// The same router, which answers requests below the root path, too.
    pub(crate) fn mount(self, router: Router) -> Router {
        if self.0.is_empty() {
            return router;
        }
        let stripped = move |mut request: Request| {
            if let Some(uri) = self.stripped(request.uri()) {
                *request.uri_mut() = uri;
            }
            request
        };
        Router::new().fallback_service(router.map_request(stripped))
    }

    /// The address without the root path; `None` if it is not below the root path.
    fn stripped(&self, uri: &Uri) -> Option<Uri> {
        let whole = uri.path_and_query()?.as_str();
        let rest = self.strip(whole);
        if rest.len() == whole.len() {
            return None;
        }
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(PathAndQuery::try_from(rest).ok()?);
        Uri::from_parts(parts).ok()
    }
}

impl fmt::Display for RootPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.0.is_empty() { "/" } else { &self.0 })
    }
}

impl FromStr for RootPath {
    type Err = String;

    /// Parses a path. A slash at its end is ignored.
    fn from_str(text: &str) -> Result<Self, String> {
        let got = || cut(text.to_owned(), MAX_BYTES);
        let path = text.strip_suffix('/').unwrap_or(text);
        if path.is_empty() && text == "/" {
            return Ok(Self::default());
        }
        let is_valid = path.len() <= MAX_BYTES
            && path.strip_prefix('/').is_some_and(|parts| parts.split('/').all(is_part));
        if !is_valid {
            return Err(format!(
                "expected a path such as /llm, of at most {MAX_BYTES} bytes and of ASCII letters, \
                 digits, `-`, `_`, `.` and `~` between slashes, got `{}`",
                got()
            ));
        }
        // Otherwise it would be unclear whether a proxy has removed the path from a request.
        if OWN_PARTS.contains(&first_part(path)) {
            return Err(format!(
                "expected a path whose first part is no path of the server itself, such as /llm, \
                 got `{}`",
                got()
            ));
        }
        Ok(Self(path.to_owned()))
    }
}

/// Whether the text may be between two slashes of a root path.
fn is_part(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    !matches!(text, "" | "." | "..") && text.bytes().all(is_allowed)
}

/// The part of a path between its first two slashes.
pub(crate) fn first_part(path: &str) -> &str {
    path.trim_start_matches('/').split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a path is parsed without the slash at its end, `/` is none, and anything that is not
    /// a plain path, or that is a route of the server, is refused with what was expected.
    #[test]
    fn root_paths_are_parsed() {
        let parsed = |text: &str| text.parse::<RootPath>().map(|path| path.to_string());
        for (text, path) in
            [("/llm", "/llm"), ("/llm/", "/llm"), ("/a/b-c_d.e~1", "/a/b-c_d.e~1"), ("/", "/")]
        {
            assert_eq!(parsed(text).as_deref(), Ok(path), "{text}");
        }
        let long = format!("/{}", "x".repeat(MAX_BYTES));
        for bad in [
            "",
            "llm",
            "//",
            "//llm",
            "/llm//",
            "/a//b",
            "/a/../b",
            "/..",
            "/.",
            "/a?b",
            "/a#b",
            "/{x}",
            "/*",
            "/a b",
            "/%6c",
            "/\u{e9}",
            "http://x/llm",
            "/v1",
            "/v1/x",
            "/page/x",
            "/health",
            "/docs/",
            &long,
        ] {
            let error = parsed(bad).expect_err(bad);
            assert!(error.contains("expected a path") && error.contains("/llm"), "{error}");
        }
        assert_eq!(parsed(&long[..MAX_BYTES]).as_deref(), Ok(&long[..MAX_BYTES]));
    }

    /// Goal: only whole parts of a path are removed, and the query is kept.
    #[test]
    fn root_paths_are_removed_from_addresses() {
        let root: RootPath = "/a/b".parse().expect("a path");
        let stripped = |uri: &'static str| root.stripped(&Uri::from_static(uri));
        for (uri, expected) in [
            ("/a/b/v1/models?x=/a/b", "/v1/models?x=/a/b"),
            ("/a/b/", "/"),
            ("/a/b//x", "//x"),
            ("http://host/a/b/health", "http://host/health"),
        ] {
            assert_eq!(stripped(uri).map(|uri| uri.to_string()).as_deref(), Some(expected));
        }
        for other in ["/a/b", "/a/bc/v1", "/a/v1", "/a/b?x", "/v1/models", "*"] {
            assert_eq!(stripped(other), None, "{other}");
        }
        assert_eq!(RootPath::default().stripped(&Uri::from_static("/v1/models")), None);
    }
}
