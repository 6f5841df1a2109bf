//! Paths that clients use for routes that have other ones.

use serde_json::json;

use crate::support::{Server, TINY, api_key};

/// Goal: a route is found without `/v1`, with it twice, and with slashes too many, also below a root
/// path, and its keys are asked for; routes for operators have their own paths only.
#[tokio::test]
async fn routes_are_found_by_other_paths() {
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_key("sesame");
        options.root_path = "/llm".parse().expect("a path");
        engine
    });
    let body = json!({"prompt": "x", "max_tokens": 1});
    let key = ("authorization", "Bearer sesame");
    for path in [
        "/completions",
        "/v1/completions/",
        "//v1/completions",
        "/v1/v1/completions",
        "/llm/completions/",
    ] {
        assert_eq!(server.post_with(path, key, body.clone()).await.0, 200, "{path}");
        assert_eq!(server.post(path, body.clone()).await.0, 401, "{path}");
        assert_eq!(server.get(path).await.0, 405, "{path}");
    }
    assert_eq!(server.get("/health/").await.0, 200);
    assert_eq!(server.get("/v1/health").await.0, 200);
    for path in ["/cache/stats", "/v1/admin/audit", "//admin/audit", "/v1/metrics"] {
        assert_eq!(server.get(path).await.0, 404, "{path}");
    }
}

/// Goal: the reply for a path of another server's API names the route to use instead.
#[tokio::test]
async fn paths_of_other_servers_get_a_hint() {
    let server = Server::tiny();
    let (status, reply) = server.post("/generate", json!({})).await;
    let message = reply["error"]["message"].as_str().expect("a message");
    assert_eq!(status, 404);
    assert!(message.contains("SGLang") && message.contains("/v1/completions"), "{message}");
}
