//! The router on an engine whose backend can be made to hang.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderName, Request, StatusCode};
use futures::stream::FuturesUnordered;
use futures::{StreamExt, poll};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use stolon::{Engine, TextModel, TextSource, TokenizerSource};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use tower::ServiceExt;

use crate::{Access, RouterOptions, Tenants, router};

mod images;
mod several;

pub(crate) async fn json(response: axum::response::Response) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (status, serde_json::from_slice(&body).expect("JSON"))
}

pub(crate) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).expect("a request")
}

/// Goal: health tells that the backend hangs, and that it has returned, without generating.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_tells_that_the_backend_hangs() {
    let backend = FakeBackend::new(FakeOptions::default());
    let fake = backend.handle();
    let engine = Engine::builder().backend("fake", Box::new(backend));
    let engine = engine.step_timeout(Duration::from_millis(50)).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let ask = async |path| json(router.clone().oneshot(get(path)).await.expect("a reply")).await;
    let hold = fake.hold();
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1}).to_string();
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    let request = request.body(Body::from(body)).expect("a request");
    let (status, reply) = json(router.clone().oneshot(request).await.expect("a reply")).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{reply}");
    for path in ["/health", "/ready"] {
        let (status, reply) = ask(path).await;
        assert_eq!((status, &reply["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("hung")));
    }
    drop(hold);
    while ask("/ready").await.0 != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Goal: routes for operators are refused if the router is not told where a connection comes from.
#[tokio::test]
async fn admin_routes_need_a_known_peer() {
    let backend = Box::new(FakeBackend::new(FakeOptions::default()));
    let engine = Engine::builder().backend("fake", backend).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let (status, reply) = json(router.oneshot(get("/admin/tree")).await.expect("a reply")).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(reply["error"]["type"], "permission_error");
}

/// Goal: the router can be nested in another application, next to its own routes and its own answer
/// for paths that do not exist.
#[tokio::test]
async fn the_router_can_be_mounted() {
    let backend = Box::new(FakeBackend::new(FakeOptions::default()));
    let engine = Engine::builder().backend("fake", backend).build().await.expect("an engine");
    let app = axum::Router::new()
        .route("/", axum::routing::get(async || Json("home")))
        .nest("/llm", router(engine, RouterOptions::default()))
        .fallback(async || (StatusCode::IM_A_TEAPOT, Json("nothing here")));
    let ask = async |request| json(app.clone().oneshot(request).await.expect("a reply")).await;
    assert_eq!(ask(get("/")).await, (StatusCode::OK, json!("home")));
    assert_eq!(ask(get("/other")).await, (StatusCode::IM_A_TEAPOT, json!("nothing here")));
    assert_eq!(ask(get("/llm/health")).await, (StatusCode::OK, json!({"status": "ok"})));
    let (status, reply) = ask(get("/llm/other")).await;
    assert_eq!(
        (status, &reply["error"]["type"]),
        (StatusCode::NOT_FOUND, &json!("not_found_error"))
    );
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2}).to_string();
    let request = Request::post("/llm/v1/completions").header("content-type", "application/json");
    let (status, reply) = ask(request.body(Body::from(body)).expect("a request")).await;
    assert_eq!((status, &reply["usage"]["completion_tokens"]), (StatusCode::OK, &json!(2)));
    let (status, description) = ask(get("/llm/openapi.json")).await;
    assert_eq!((status, &description["servers"][0]["url"]), (StatusCode::OK, &json!("./")));
}

/// Goal: rendering and tokenizing a prompt is work of its client in every API, also before there is
/// a request to the engine: it waits for the client's other work, and for no other client's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_are_work_of_their_client() {
    let source = TextSource {
        named_templates: Vec::new(),
        tokenizer: TokenizerSource::Bytes { vocab_size: 256 },
        tokenizer_config: None,
        // So much work that it is not done at once. The tag means that the template has reasoning.
        chat_template: Some(
            "{% for i in range(100) %}{% for j in range(1000) %}{% endfor %}{% endfor %}\
             {{ messages[0].content }}</think>"
                .to_owned(),
        ),
    };
    let text = TextModel::new(&source, &[]).expect("a byte tokenizer needs no file");
    let backend = Box::new(FakeBackend::new(FakeOptions::default()));
    let engine = Engine::builder().backend("fake", backend).text_model(text);
    let engine = engine.build().await.expect("an engine");
    let tenants = Tenants::ByHeader(HeaderName::from_static("x-client"));
    let access = Access { tenants, ..Access::default() };
    let options = RouterOptions { access, ..RouterOptions::default() };
    let router = router(engine.clone(), options);
    let ask = async |client: &'static str, path: &'static str| {
        let message = json!({"role": "user", "content": "Hello"});
        let body = json!({"model": "fake", "messages": [message], "max_tokens": 1}).to_string();
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.header("x-client", client).body(Body::from(body));
        json(router.clone().oneshot(request.expect("a request")).await.expect("a reply")).await
    };
    // The client takes all slots that it can get.
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let ended = Arc::new(Mutex::new(ended));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut busy: FuturesUnordered<_> = (0..cores)
        .map(|_| {
            let ended = Arc::clone(&ended);
            let wait = move || ended.lock().expect("no panic").recv().is_ok();
            engine.long_work(Some("busy".into()), wait)
        })
        .collect();
    assert!(poll!(busy.next()).is_pending());
    for path in ["/v1/chat/completions", "/v1/messages/count_tokens"] {
        let mut waiting = Box::pin(ask("busy", path));
        assert!(poll!(&mut waiting).is_pending(), "{path}");
        for _ in 0..3 {
            let (status, reply) = ask("other", path).await;
            assert_eq!(status, StatusCode::OK, "{reply}");
            assert!(poll!(&mut waiting).is_pending(), "{path}");
        }
    }
    drop(end);
    while let Some(ended) = busy.next().await {
        assert!(!ended.expect("it is done"));
    }
    assert_eq!(ask("busy", "/v1/chat/completions").await.0, StatusCode::OK);
}

/// Goal: with `ignore_eos` an end-of-sequence token is a token of the answer like any other, and has
/// a log-probability in every API that reports them, whole and streamed. Without it, the token ends
/// the answer and has none.
#[tokio::test]
async fn end_tokens_have_logprobs_if_they_are_ignored() {
    const END: u32 = 65;
    let source = TextSource {
        named_templates: Vec::new(),
        tokenizer: TokenizerSource::Bytes { vocab_size: 256 },
        tokenizer_config: None,
        chat_template: Some("{{ messages[0].content }}".to_owned()),
    };
    let text = TextModel::new(&source, &[END]).expect("a byte tokenizer needs no file");
    let backend = Box::new(FakeBackend::new(FakeOptions::default()));
    let engine = Engine::builder().backend("fake", backend).text_model(text);
    let engine = engine.build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let message = json!({"role": "user", "content": "Hello"});
    for (path, mut body) in [
        ("/v1/completions", json!({"prompt": "Hello", "logprobs": 1})),
        ("/v1/chat/completions", json!({"messages": [message], "logprobs": true})),
    ] {
        body["logit_bias"] = json!({END.to_string(): 100});
        (body["max_tokens"], body["temperature"]) = (json!(4), json!(0));
        for (ignores, count) in [(true, 4), (false, 0)] {
            body["ignore_eos"] = json!(ignores);
            for stream in [false, true] {
                body["stream"] = json!(stream);
                let request = Request::post(path).header("content-type", "application/json");
                let request = request.body(Body::from(body.to_string())).expect("a request");
                let reply = router.clone().oneshot(request).await.expect("a reply");
                let bytes = reply.into_body().collect().await.expect("a body").to_bytes();
                let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
                let replies = text.lines().map(|line| line.trim_start_matches("data: "));
                let replies = replies.filter_map(|data| serde_json::from_str::<Value>(data).ok());
                let entries = replies.map(|reply| {
                    let logprobs = &reply["choices"][0]["logprobs"];
                    let entries = [&logprobs["tokens"], &logprobs["content"]];
                    entries.map(|list| list.as_array().map_or(0, Vec::len)).iter().sum::<usize>()
                });
                assert_eq!(entries.sum::<usize>(), count, "{path} {body}: {text}");
            }
        }
    }
}

/// Goal: a build without grammars refuses structured output, with the parameter at fault, and
/// answers other requests.
#[cfg(all(feature = "demo-model", not(feature = "grammar")))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn structured_output_is_refused_without_its_feature() {
    let engine = Engine::builder().model("demo").build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let ask = async |path, body: Value| {
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).expect("a request");
        json(router.clone().oneshot(request).await.expect("a reply")).await
    };
    let prompt = json!({"prompt": "The keeper", "max_tokens": 2});
    assert_eq!(ask("/v1/completions", prompt.clone()).await.0, StatusCode::OK);
    let mut guided = prompt;
    guided["response_format"] = json!({"type": "json_object"});
    let (status, reply) = ask("/v1/completions", guided).await;
    assert_eq!(
        (status, &reply["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("response_format"))
    );
    assert!(reply.to_string().contains("without the feature `grammar`"), "{reply}");
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"a\""});
    let tool = json!({"type": "custom", "name": "patch", "format": grammar});
    let (status, reply) = ask("/v1/responses", json!({"input": "x", "tools": [tool]})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{reply}");
    assert!(reply.to_string().contains("without the feature `grammar`"), "{reply}");
}
