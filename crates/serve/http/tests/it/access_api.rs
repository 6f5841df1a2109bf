//! The administrator's key, and the rights of web pages and other tenants.

use serde_json::{Value, json};
use stolon_http::Tenants;

use crate::support::{Server, TINY, api_keys, prompt, status};

/// Goal: the administrator's routes can be used from this machine, but not by web pages, by clients
/// of a proxy, or by a name that was rebound to this machine; nothing shows prompts unasked.
#[tokio::test]
async fn admin_routes_are_closed_to_web_pages_and_proxies() {
    let server = Server::with(TINY, |engine, _| engine.pin_budget(4));
    let client = reqwest::Client::new();
    let paths = ["/admin/stats", "/admin/audit", "/admin/tree", "/admin/pins"];
    for path in paths {
        let get = || client.get(server.url(path));
        assert_eq!(status(get()).await, 200, "{path}");
        assert_eq!(status(get().header("host", "rebound.example")).await, 403, "{path}");
        assert_eq!(status(get().header("origin", "https://evil.example")).await, 403, "{path}");
        assert_eq!(status(get().header("sec-fetch-site", "cross-site")).await, 403, "{path}");
        assert_eq!(status(get().header("x-forwarded-for", "203.0.113.9")).await, 403, "{path}");
    }
    let form = client.post(server.url("/admin/pins")).header("content-type", "text/plain");
    assert_eq!(status(form.body(r#"{"prompt": "x"}"#)).await, 415);
}

/// Goal: with an administrator's key, its routes need it, from this machine too, and everything
/// else does not.
#[tokio::test]
async fn an_admin_key_is_needed_for_admin_routes_alone() {
    let server = Server::with(TINY, |engine, options| {
        options.access.admin_key = Some("sesame".to_owned().into());
        engine
    });
    let client = reqwest::Client::new();
    let stats = || client.get(server.url("/admin/stats"));
    assert_eq!(status(stats()).await, 401);
    assert_eq!(status(stats().bearer_auth("sesam")).await, 401);
    assert_eq!(status(stats().bearer_auth("sesame")).await, 200);
    server.complete(json!({"prompt": "x", "max_tokens": 1})).await;
    assert_eq!(server.get("/health").await.0, 200);
}

/// Goal: tenants that are told apart by their keys share no cached prefixes, whatever salt they
/// choose; the requests of one tenant do.
#[tokio::test]
async fn tenants_share_no_prefixes() {
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_keys(&[("a", "key-1"), ("a", "key-2"), ("b", "key-3")]);
        options.access.tenants = Tenants::ByKey;
        engine
    });
    let client = reqwest::Client::new();
    let cached = async |key: &str, salt: Option<&str>| {
        let body = json!({"prompt": prompt(40, 1), "max_tokens": 1, "cache_salt": salt});
        let request = client.post(server.url("/v1/completions")).bearer_auth(key).json(&body);
        let reply: Value = request.send().await.expect("a reply").json().await.expect("JSON");
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached("key-1", None).await, 0);
    assert!(cached("key-2", None).await > 0);
    assert_eq!(cached("key-3", None).await, 0);
    assert_eq!(cached("key-3", Some("1:a")).await, 0);
    assert_eq!(cached("key-1", Some("own")).await, 0);
    assert!(cached("key-1", Some("own")).await > 0);

    let server = Server::with(TINY, |engine, options| {
        let header = reqwest::header::HeaderName::from_static("x-tenant");
        options.access.tenants = Tenants::ByHeader(header);
        engine
    });
    let models = client.get(server.url("/v1/models"));
    assert_eq!(status(models.try_clone().expect("a copy")).await, 400);
    assert_eq!(status(models.header("x-tenant", "a")).await, 200);
}

/// Goal: an operator can hide how much of a prompt was cached.
#[tokio::test]
async fn cached_tokens_can_be_hidden() {
    let server = Server::with(TINY, |engine, options| {
        options.hide_cached_tokens = true;
        engine
    });
    let reply = server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    assert_eq!(reply["usage"]["prompt_tokens"], 48);
    assert!(reply["usage"]["prompt_tokens_details"].is_null(), "{reply}");
}
