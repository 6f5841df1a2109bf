//! Clients that wait for a load.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use stolon::backend::BackendError;
use stolon::{Engine, ModelRecipe, ModelSet};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use tower::ServiceExt;

use super::{get, json};
use crate::handlers::several::Front;
use crate::{RouterOptions, of_model, several};

/// Time that a load takes.
const LOAD: Duration = Duration::from_millis(400);

/// A router of a model that loads slowly and of one that cannot be loaded.
fn router() -> Router {
    let slow = ModelRecipe::new("slow", || {
        Ok(Engine::builder().backend_with("slow", || {
            std::thread::sleep(LOAD);
            Ok::<_, BackendError>(FakeBackend::new(FakeOptions::default()))
        }))
    });
    let broken = ModelRecipe::new("broken", || {
        Ok(Engine::builder().backend_with("broken", || {
            std::thread::sleep(LOAD);
            Err::<FakeBackend, _>("a device is missing")
        }))
    });
    let models = ModelSet::builder().model(slow).model(broken).build().expect("a set");
    let options = RouterOptions::default();
    let front = Front::new(models, options.clone(), of_model);
    several(front.with_patience(Duration::from_millis(20)), &options)
}

fn post(path: &str, body: &serde_json::Value) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body.to_string())).expect("a request")
}

/// The status and the whole body.
async fn text(router: &Router, request: Request<Body>) -> (StatusCode, String) {
    let reply = router.clone().oneshot(request).await.expect("a reply");
    let (status, body) = (reply.status(), reply.into_body());
    let body = body.collect().await.expect("a body").to_bytes();
    (status, String::from_utf8(body.to_vec()).expect("UTF-8"))
}

/// Goal: a client that wants its reply in pieces gets a comment while its model is being loaded, and
/// then the reply of a loaded model; one that wants it whole waits, and health tells of the load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_told_of_a_load() {
    let router = router();
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 3, "stream": true, "ignore_eos": true});
    let asked = tokio::spawn({
        let (router, request) = (router.clone(), post("/v1/completions", &body));
        async move { text(&router, request).await }
    });
    let loading = async {
        loop {
            let reply = router.clone().oneshot(get("/health")).await.expect("a reply");
            let (status, health) = json(reply).await;
            assert_eq!(status, StatusCode::OK, "{health}");
            if health["models"]["slow"]["value"] == "loading" {
                return health;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let health = tokio::time::timeout(LOAD, loading).await.expect("it is loading");
    assert_eq!(health["models"]["slow"]["loading_seconds"], 0);
    assert_eq!(health["models"]["broken"]["value"], "sleeping");
    let (status, first) = asked.await.expect("no panic");
    assert_eq!(status, StatusCode::OK);
    let answer = first.strip_prefix(": loading slow\n\n").expect("a comment");
    assert!(answer.starts_with("data: ") && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    // Now that it is loaded.
    let (_, second) = text(&router, post("/v1/completions", &body)).await;
    assert_eq!(second.matches("data: ").count(), answer.matches("data: ").count());
    assert!(!second.contains("loading"), "{second}");
}

/// Goal: the time that a client gives its request includes the load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_counts_toward_the_deadline() {
    let mut request = post("/v1/completions", &json!({"prompt": [1], "max_tokens": 1}));
    request.headers_mut().insert("x-request-timeout", "0.05".parse().expect("a value"));
    let (status, reply) = text(&router(), request).await;
    assert!(status == StatusCode::GATEWAY_TIMEOUT && reply.contains("`slow`"), "{status} {reply}");
}

/// Goal: a load that fails after a client was told of it is an event in the form of the API; one that
/// fails for a client that waits for a whole reply has its status.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_fails_late_is_an_event() {
    let router = router();
    let mut body = json!({"prompt": [1], "max_tokens": 1, "model": "broken",
                          "messages": [{"role": "user", "content": "x"}]});
    let (status, reply) = text(&router, post("/v1/completions", &body)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{reply}");
    body["stream"] = json!(true);
    for (path, begin) in [
        ("/v1/completions", ": loading broken\n\ndata: {\"error\":{"),
        ("/v1/messages", ": loading broken\n\nevent: error\ndata: {"),
    ] {
        let (status, reply) = text(&router, post(path, &body)).await;
        assert_eq!(status, StatusCode::OK);
        assert!(reply.starts_with(begin) && reply.contains("`broken`"), "{path}: {reply}");
    }
}
