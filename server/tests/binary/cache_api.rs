//! `/admin/tree` and `/admin/pins`.

use serde_json::json;

use crate::support::{Server, TINY, fail, prompt};

/// Goal: the prefix tree is shown as JSON and as a graph, with the blocks of an answered prompt.
#[tokio::test]
async fn the_prefix_tree_is_shown_as_json_and_graphviz() {
    let server = Server::tiny();
    let (status, empty) = server.get("/admin/tree").await;
    assert_eq!((status, &empty["nodes"]), (200, &json!([])));
    let body = json!({"prompt": prompt(40, 1), "max_tokens": 1, "cache_salt": "tenant"});
    server.complete(body).await;
    // The reply is sent before the request releases its lock on the tree.
    server.settled_audit().await;
    let (_, tree) = server.get("/admin/tree").await;
    let node = &tree["nodes"][0];
    assert_eq!(
        (&node["blocks"], &node["tokens"], &node["locks"]),
        (&json!(3), &json!(48), &json!(0))
    );
    assert!(node["first_tokens"].is_null(), "prompts are not shown unasked: {tree}");
    let (_, with_tokens) = server.get("/admin/tree?tokens=true").await;
    assert_eq!(with_tokens["nodes"][0]["first_tokens"], json!(prompt(40, 1)[..8]));
    let namespace = node["namespace"].as_str().expect("a namespace");
    assert!(namespace.starts_with("Namespace(") && !namespace.contains("tenant"), "{namespace}");
    assert_eq!((&tree["stats"]["blocks"], &tree["stats"]["namespaces"]), (&json!(3), &json!(1)));
    let drawing = reqwest::get(server.url("/admin/tree?format=dot")).await.expect("a response");
    assert_eq!(drawing.headers()["content-type"], "text/vnd.graphviz; charset=utf-8");
    let drawing = drawing.text().await.expect("text");
    assert!(drawing.starts_with("digraph") && drawing.contains("3 blocks"), "{drawing}");
    let first = prompt(40, 1)[..3].iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    assert!(!drawing.contains(&first), "{drawing}");
    let drawing = reqwest::get(server.url("/admin/tree?format=dot&tokens=true")).await;
    assert!(drawing.expect("a response").text().await.expect("text").contains(&first));
}

/// Goal: pins are created, listed and deleted; a prompt that cannot be pinned is refused with the
/// reason.
#[tokio::test]
async fn pins_are_created_listed_and_deleted() {
    let server = Server::start(TINY, &["--pin-budget", "3", "--eviction-policy", "slru"]);
    let pin = json!({"prompt": prompt(40, 1), "ttl_seconds": 3600});
    let (status, refused) = server.post("/admin/pins", pin.clone()).await;
    assert_eq!(status, 409, "nothing of it is cached: {refused}");
    server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    let id = server.ok("/admin/pins", pin.clone()).await["id"].clone();
    let (status, refused) = server.post("/admin/pins", pin).await;
    assert_eq!(status, 409);
    assert!(refused["error"]["message"].as_str().is_some_and(|m| m.contains("at most 3")));
    let (_, listed) = server.get("/admin/pins").await;
    let listed = &listed["pins"][0];
    assert_eq!((&listed["id"], &listed["tokens"], &listed["blocks"]), (&id, &json!(48), &json!(3)));
    assert!(listed["ends_in_seconds"].as_f64().is_some_and(|left| left > 3500.0));
    let delete = async || {
        let url = server.url(&format!("/admin/pins/{id}"));
        reqwest::Client::new().delete(url).send().await.expect("a response").status().as_u16()
    };
    assert_eq!((delete().await, delete().await), (200, 404));
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": "x", "ttl_seconds": 0}), "ttl_seconds"),
        (json!({"prompt": "x", "forever": true}), "forever"),
    ] {
        let (status, refused) = server.post("/admin/pins", body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)));
    }
    let message = fail(&["serve", "--model", TINY, "--eviction-policy", "newest"]);
    assert!(message.contains("newest") && message.contains("cost-aware"), "{message}");
}
