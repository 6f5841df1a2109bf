//! The files of the page at `/`, the routes of its picture, and the rights of other web pages.

use serde_json::{Value, json};

use crate::support::{Server, TINY, prompt};

async fn get(server: &Server, path: &str) -> reqwest::Response {
    reqwest::get(server.url(path)).await.expect("a response")
}

/// Goal: the page and all files that it names are served, under a policy that allows nothing from
/// elsewhere and no inline script or style, and none of them contains either.
#[tokio::test]
async fn the_page_is_served_with_a_strict_policy() {
    let server = Server::tiny();
    let mut pending = vec!["/".to_owned()];
    let mut seen = Vec::new();
    while let Some(path) = pending.pop() {
        if seen.contains(&path) {
            continue;
        }
        let reply = get(&server, &path).await;
        assert_eq!(reply.status(), 200, "{path}");
        let policy = reply.headers()["content-security-policy"].to_str().expect("text").to_owned();
        let strict =
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ";
        assert!(policy.starts_with(strict) && !policy.contains('*'), "{policy}");
        assert_eq!(reply.headers()["x-content-type-options"], "nosniff");
        let text = reply.text().await.expect("text");
        for forbidden in ["innerHTML", "insertAdjacentHTML", "eval(", "style=\"", "onclick=\""] {
            // The library of formulas can write markup, too. The page asks it for elements.
            let is_unused = path == "/page/temml.js" && forbidden == "style=\"";
            assert!(is_unused || !text.contains(forbidden), "{path}: {forbidden}");
        }
        let named = text.split('"').filter_map(|part| match part.strip_prefix("./") {
            Some(module) => Some(format!("/page/{module}")),
            None => part.starts_with("page/").then(|| format!("/{part}")),
        });
        pending.extend(named.filter(|name| !name.ends_with(".json")));
        seen.push(path);
    }
    assert!(seen.len() > 10, "{seen:?}");
    for path in ["/page/handbook.json", "/page/picture.json"] {
        let expected = if cfg!(feature = "demo-model") { 200 } else { 404 };
        assert_eq!(get(&server, path).await.status(), expected, "{path}");
    }
    for path in ["/page/", "/page/none.js", "/page/../src/serve.rs", "/page/%2e%2e%2fCargo.toml"] {
        assert_eq!(get(&server, path).await.status(), 404, "{path}");
    }
    for path in ["/page/none.js", "/page/%ff", "/page/main.js%ff"] {
        let (status, reply) = server.get(path).await;
        assert_eq!((status, &reply["error"]["type"]), (404, &json!("not_found_error")), "{path}");
    }
}

/// Goal: a browser that has the current version of a file gets no second copy.
#[tokio::test]
async fn unchanged_files_are_not_sent_again() {
    let server = Server::tiny();
    let client = reqwest::Client::new();
    let handbook = cfg!(feature = "demo-model").then_some("/page/handbook.json");
    for path in ["/", "/page/main.js"].into_iter().chain(handbook) {
        let tag = get(&server, path).await.headers()["etag"].clone();
        let tag = tag.to_str().expect("text");
        let ask = async |known: String| {
            let request = client.get(server.url(path)).header("if-none-match", known);
            let reply = request.send().await.expect("a response");
            (reply.status().as_u16(), reply.text().await.expect("text").is_empty())
        };
        assert_eq!(ask(tag.to_owned()).await, (304, true), "{path}");
        assert_eq!(ask(format!("\"other\", W/{tag}")).await, (304, true), "{path}");
        assert_eq!(ask("\"other\"".to_owned()).await, (200, false), "{path}");
    }
}

/// Goal: an operator can do without the page.
#[tokio::test]
async fn the_page_can_be_switched_off() {
    let server = Server::with(TINY, |engine, options| {
        options.page = false;
        engine
    });
    for path in ["/", "/page/main.js", "/page/handbook.json"] {
        assert_eq!(server.get(path).await.0, 404, "{path}");
    }
}

/// Goal: a page of another site, or of a name that was rebound to this machine, can neither use the
/// model nor change the cache; the server's own page can.
#[tokio::test]
async fn other_pages_can_use_neither_the_model_nor_the_cache() {
    let server = Server::tiny();
    let client = reqwest::Client::new();
    let address = server.address().to_owned();
    let own = format!("http://{address}");
    let send = async |path: &str, host: &str, origin: &str, kind: &str| {
        let request = client.post(server.url(path)).header("host", host).header("origin", origin);
        let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
        let reply = request.header("content-type", kind).body(body).send().await;
        reply.expect("a response").status().as_u16()
    };
    let json = "application/json";
    assert_eq!(send("/v1/completions", &address, &own, json).await, 200);
    let rebound = "rebound.example:8080";
    assert_eq!(send("/v1/completions", rebound, "http://rebound.example:8080", json).await, 403);
    // Such a page can claim to be a proxy.
    let models = client.get(server.url("/v1/models")).header("x-forwarded-for", "1");
    let models = models.header("host", rebound).send().await.expect("a response");
    assert_eq!(models.status(), 403);
    assert!(models.text().await.expect("a text").contains("--allowed-hosts"));
    // A page of another site may send such forms without asking first.
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
        assert_eq!(send("/v1/completions", &address, "https://evil.example", kind).await, 415);
    }
    for path in ["/v1/cache/warm", "/v1/cache/pin", "/v1/cache/evict", "/v1/cache/flush"] {
        for kind in [json, "text/plain"] {
            assert_eq!(send(path, &address, "https://evil.example", kind).await, 403, "{path}");
            assert_eq!(send(path, &address, "null", kind).await, 403, "{path}");
            let origin = format!("http://{rebound}");
            assert_eq!(send(path, rebound, &origin, kind).await, 403, "{path}");
        }
    }
    assert_eq!(server.get("/admin/stats").await.1["stats"]["requests"], 1);
}

/// Goal: an outline shows the tree with its pins, counts the nodes beyond its limit as hidden, can
/// be about a part of the tree, and leads to the prefix of each node. Texts are shown only if asked
/// for.
#[tokio::test]
async fn an_outline_leads_to_prefixes() {
    let server = Server::with(TINY, |engine, _| engine.pin_budget(8));
    let (first, second) = (prompt(40, 1), prompt(40, 2));
    let warm = json!({"prompt": [first, second]});
    server.ok("/v1/cache/warm", warm).await;
    server.settled_audit().await;
    let pin = server.ok("/v1/cache/pin", json!({"prompt": first})).await["id"].clone();
    let (status, outline) = server.get("/v1/cache/outline?tokens=true").await;
    assert_eq!(
        (status, &outline["total_nodes"], &outline["total_tokens"]),
        (200, &json!(3), &json!(64))
    );
    let nodes = outline["nodes"].as_array().expect("nodes").clone();
    let shared = &nodes[0];
    assert_eq!((&shared["tokens"], &shared["subtree_tokens"]), (&json!(32), &json!(64)));
    assert_eq!((&shared["pinned"], &shared["pins"]), (&json!(1), &json!([])));
    assert_eq!(shared["namespace"], Value::Null);
    let text: String = first[..8].iter().map(|&byte| char::from(byte as u8)).collect();
    assert_eq!(shared["text"], json!(text));
    let pinned = nodes.iter().find(|node| node["pins"] == json!([pin])).expect("a pinned node");
    let id = pinned["id"].as_str().expect("an id");
    let (_, prefix) = server.get(&format!("/v1/cache/prefix/{id}?tokens=true&from=46")).await;
    let end: String = first[46..].iter().map(|&byte| char::from(byte as u8)).collect();
    assert_eq!((&prefix["token_ids"], &prefix["text"]), (&json!(first), &json!(end)));
    let (_, quiet) = server.get(&format!("/v1/cache/prefix/{id}")).await;
    assert_eq!(quiet, json!({"id": id, "namespace": null, "tokens": 48}));
    let (_, part) = server.get(&format!("/v1/cache/outline?under={id}")).await;
    assert_eq!((&part["tokens_before"], &part["nodes"][0]["id"]), (&json!(32), &json!(id)));
    assert!(part["nodes"][0]["text"].is_null(), "{part}");
    let (_, one) = server.get("/v1/cache/outline?nodes=1").await;
    assert_eq!(
        (&one["nodes"][0]["hidden_nodes"], &one["nodes"][0]["hidden_tokens"]),
        (&json!(2), &json!(32))
    );
    for (path, expected) in [
        ("/v1/cache/outline?nodes=0", 400),
        ("/v1/cache/outline?nodes=2001", 400),
        ("/v1/cache/outline?depth=1", 400),
        ("/v1/cache/outline?under=x", 400),
        ("/v1/cache/outline?under=0123456789abcdef", 404),
        ("/v1/cache/prefix/0123456789abcdef", 404),
        ("/v1/cache/prefix/-", 400),
    ] {
        let (status, reply) = server.get(path).await;
        assert_eq!(status, expected, "{path}: {reply}");
        assert!(reply["error"]["message"].is_string(), "{reply}");
    }
    let closed = Server::with(TINY, |engine, options| {
        options.access.admin_key = Some("sesame".to_owned().into());
        engine
    });
    for path in ["/v1/cache/outline", "/v1/cache/prefix/0123456789abcdef"] {
        assert_eq!(closed.get(path).await.0, 401, "{path}");
    }
}
