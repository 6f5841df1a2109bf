//! A root path: every route below a path, and without it.

use serde_json::json;

use crate::support::{Server, TINY, api_key};

const BOTH: [&str; 2] = ["", "/llm"];

/// A server that is reached below this path, too.
fn below(root_path: &str) -> Server {
    Server::with(TINY, |engine, options| {
        options.root_path = root_path.parse().expect("a path");
        engine
    })
}

/// Goal: all routes are answered below the root path and without it, and nothing is answered below
/// any other path. Errors are the same.
#[tokio::test]
async fn routes_are_answered_below_the_root_path_and_without_it() {
    let server = below("/llm/");
    let body = json!({"prompt": "x", "max_tokens": 2, "temperature": 0});
    let plain = server.ok("/v1/completions", body.clone()).await;
    let below = server.ok("/llm/v1/completions", body.clone()).await;
    assert_eq!(plain["choices"], below["choices"]);
    let streamed = server.events("/llm/v1/completions", body.clone()).await;
    assert!(!streamed.is_empty());
    for path in ["/health", "/v1/models", "/v1/models/random:tiny", "/version", "/v1/cache/pins"] {
        let (plain, below) = (server.get(path).await, server.get(&format!("/llm{path}")).await);
        assert_eq!(plain.0, 200, "{path}: {plain:?}");
        assert_eq!(plain, below, "{path}");
    }
    for path in ["/v1/nothing", "/v1/completions?x=/llm"] {
        let (plain, below) = (server.get(path).await, server.get(&format!("/llm{path}")).await);
        assert!(plain.0 >= 400, "{path}: {plain:?}");
        assert_eq!(plain, below, "{path}");
    }
    for path in ["/llm/llm/v1/models", "/llmv1/models", "/LLM/v1/models"] {
        let (status, reply) = server.get(path).await;
        assert_eq!((status, &reply["error"]["type"]), (404, &json!("not_found_error")), "{path}");
    }
}

/// Goal: keys, the operator's rules, hosts and allowed origins hold below the root path as they do
/// without it.
#[tokio::test]
async fn rules_of_access_hold_below_the_root_path() {
    let origin = "https://app.example";
    let server = Server::with(TINY, |engine, options| {
        options.root_path = "/llm".parse().expect("a path");
        options.access.api_keys = api_key("k");
        options.allowed_origins = vec![origin.parse().expect("an origin")];
        options.body_limit = Some(1 << 10);
        engine
    });
    let client = reqwest::Client::new();
    let status = async |request: reqwest::RequestBuilder| {
        request.send().await.expect("a reply").status().as_u16()
    };
    for root in BOTH {
        let url = |path: &str| server.url(&format!("{root}{path}"));
        assert_eq!(status(client.get(url("/v1/models"))).await, 401, "{root}");
        assert_eq!(status(client.get(url("/v1/models")).bearer_auth("k")).await, 200, "{root}");
        let stats = || client.get(url("/v1/cache/stats"));
        assert_eq!(status(stats()).await, 200, "{root}");
        assert_eq!(status(stats().header("host", "rebound.example")).await, 403, "{root}");
        assert_eq!(status(stats().header("x-forwarded-for", "203.0.113.9")).await, 403, "{root}");
        let large = client.post(url("/v1/completions")).bearer_auth("k");
        let large = large.json(&json!({"prompt": "x".repeat(2_000)}));
        assert_eq!(status(large).await, 413, "{root}");
        let preflight = client.request(reqwest::Method::OPTIONS, url("/v1/completions"));
        let preflight = preflight
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .send()
            .await
            .expect("a reply");
        assert_eq!(preflight.headers()["access-control-allow-origin"], origin, "{root}");
    }
}

/// Goal: the page, the reference and all files that they name are found below the root path, to
/// which its address without a slash leads.
#[tokio::test]
async fn pages_work_below_the_root_path() {
    let server = below("/a/llm");
    let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build();
    let redirect = client.expect("a client").get(server.url("/a/llm")).send().await;
    let redirect = redirect.expect("a reply");
    assert_eq!(
        (redirect.status().as_u16(), &redirect.headers()["location"]),
        (307, &reqwest::header::HeaderValue::from_static("/a/llm/"))
    );
    assert!(redirect.headers().contains_key("x-request-id"));
    for page in ["/a/llm/", "/a/llm/docs"] {
        let base = reqwest::Url::parse(&server.url(page)).expect("an address");
        let html = reqwest::get(base.clone()).await.expect("a reply").text().await.expect("text");
        let links = ["src=\"", "href=\""].map(|name| html.split(name).skip(1));
        let links = links.into_iter().flatten().filter_map(|rest| rest.split('"').next());
        let mut files = 0;
        for link in links.filter(|link| !link.starts_with('#')) {
            let url = base.join(link).expect("an address");
            assert!(url.path().starts_with("/a/llm/"), "{page}: {link}");
            assert_eq!(reqwest::get(url).await.expect("a reply").status(), 200, "{page}: {link}");
            files += 1;
        }
        assert!(files >= 2, "{html}");
    }
    let (status, description) = server.get("/a/llm/openapi.json").await;
    assert_eq!((status, &description["servers"]), (200, &json!([{"url": "/a/llm"}])));
}
