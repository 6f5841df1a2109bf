//! Web pages of other origins: refused by default, allowed by `allowed_origins`.

use reqwest::Method;
use serde_json::json;
use stolon_http::Origins;

use crate::support::{Server, TINY, api_key};

/// The preflight request that a browser sends before a page may send a request with JSON and a key.
async fn preflight(server: &Server, path: &str, origin: &str) -> reqwest::Response {
    let request = reqwest::Client::new().request(Method::OPTIONS, server.url(path));
    let request = request
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");
    request.send().await.expect("a reply")
}

fn origins(text: &str) -> Vec<reqwest::header::HeaderValue> {
    text.parse::<Origins>().expect("origins").list().collect()
}

fn header<'a>(reply: &'a reqwest::Response, name: &str) -> &'a str {
    reply.headers().get(name).map_or("", |value| value.to_str().expect("ASCII"))
}

/// Goal: without the option, no reply allows another origin.
#[tokio::test]
async fn other_origins_are_not_allowed_by_default() {
    let server = Server::tiny();
    let reply = preflight(&server, "/v1/completions", "https://app.example").await;
    assert_eq!(header(&reply, "access-control-allow-origin"), "");
    let request = reqwest::Client::new().get(server.url("/v1/models"));
    let reply = request.header("origin", "https://app.example").send().await.expect("a reply");
    assert_eq!(header(&reply, "access-control-allow-origin"), "");
}

/// Goal: a listed origin may send JSON and a key and read the reply and its errors; another one may
/// not, and neither may use the operator's routes.
#[tokio::test]
async fn listed_origins_are_allowed() {
    let listed = "[\"https://app.example\", \"http://localhost:3000\"]";
    let server = Server::with(TINY, |engine, options| {
        options.allowed_origins = origins(listed);
        options.access.api_keys = api_key("k");
        engine
    });
    for origin in ["https://app.example", "http://localhost:3000"] {
        let reply = preflight(&server, "/v1/completions", origin).await;
        assert!(reply.status().is_success(), "a preflight has no key: {reply:?}");
        assert_eq!(header(&reply, "access-control-allow-origin"), origin);
        assert!(header(&reply, "access-control-allow-headers").contains("authorization"));
        assert!(header(&reply, "access-control-allow-methods").contains("POST"));
        let post = reqwest::Client::new().post(server.url("/v1/completions"));
        let post = post.header("origin", origin).json(&json!({"prompt": "x", "max_tokens": 1}));
        let refused = post.try_clone().expect("a copy").send().await.expect("a reply");
        assert_eq!(refused.status(), 401);
        assert_eq!(header(&refused, "access-control-allow-origin"), origin, "errors can be read");
        let reply = post.bearer_auth("k").send().await.expect("a reply");
        assert_eq!(reply.status(), 200);
        assert_eq!(header(&reply, "access-control-allow-origin"), origin);
        assert!(header(&reply, "access-control-expose-headers").contains("x-request-id"));
    }
    let reply = preflight(&server, "/v1/completions", "https://evil.example").await;
    assert_eq!(header(&reply, "access-control-allow-origin"), "");
    for path in ["/v1/cache/flush", "/admin/pins"] {
        let reply = preflight(&server, path, "https://app.example").await;
        assert_eq!(header(&reply, "access-control-allow-origin"), "", "{path}");
    }
}

/// Goal: `*` allows every origin; a value that is not an origin is refused.
#[tokio::test]
async fn all_origins_can_be_allowed() {
    let server = Server::with(TINY, |engine, options| {
        options.allowed_origins = origins("*");
        engine
    });
    let reply = preflight(&server, "/v1/messages", "https://any.example").await;
    assert_eq!(header(&reply, "access-control-allow-origin"), "*");
    for bad in ["app.example", "https://app.example/path", "[1]", "https://a b"] {
        let error = bad.parse::<Origins>().expect_err(bad);
        assert!(error.contains("expected") && error.contains("https://"), "{bad}: {error}");
    }
}
