//! Requests with images, on random models of the structures of SmolVLM and of Moondream 2 and 3.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use stolon::{Engine, EngineBuilder};
use tokio::sync::Semaphore;
use tower::ServiceExt;

use super::json;
use crate::{RouterOptions, router};

#[path = "../../../../../tests/it/support/pictures.rs"]
mod pictures;

const LOCAL: ([u8; 4], u16) = ([127, 0, 0, 1], 1);
const SMOLVLM: &str = "random:smolvlm-tiny";
const MOONDREAM: &str = "random:moondream2-tiny";

fn builder(model: &str) -> EngineBuilder {
    Engine::builder().model(model).num_blocks(2048).pin_budget(1024).threads(1)
}

async fn reply(router: &Router, path: &str, body: String) -> Response {
    let request = Request::post(path).header("content-type", "application/json");
    let request =
        request.header("host", "localhost").extension(ConnectInfo(SocketAddr::from(LOCAL)));
    let request = request.body(Body::from(body)).expect("a request");
    router.clone().oneshot(request).await.expect("a reply")
}

async fn post(router: &Router, path: &str, body: String) -> (StatusCode, Value) {
    json(reply(router, path, body).await).await
}

/// The data of the events of a streamed reply.
async fn events(router: &Router, path: &str, body: String) -> Vec<Value> {
    let reply = reply(router, path, body).await;
    assert_eq!(reply.status(), StatusCode::OK);
    let bytes = axum::body::to_bytes(reply.into_body(), usize::MAX).await.expect("a body");
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).expect("JSON")).collect()
}

fn data_url() -> String {
    format!("data:image/bmp;base64,{}", STANDARD.encode(pictures::picture(40, 30, 1)))
}

/// A request with the image of this URL, for each route whose requests may have images, and the
/// model that answers it.
fn requests(url: &str) -> Vec<(&'static str, &'static str, Value)> {
    let parts = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let messages = json!([{"role": "user", "content": parts}]);
    let items = json!([{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]);
    let source = json!({"type": "url", "url": url});
    let blocks = json!([{"role": "user", "content": [{"type": "image", "source": source}]}]);
    let settings = json!({"max_tokens": 1});
    vec![
        (SMOLVLM, "/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})),
        (SMOLVLM, "/v1/responses", json!({"input": items, "max_output_tokens": 1})),
        (SMOLVLM, "/v1/messages", json!({"messages": blocks, "max_tokens": 1})),
        (SMOLVLM, "/v1/messages/count_tokens", json!({"messages": blocks})),
        (SMOLVLM, "/tokenize", json!({"messages": messages})),
        (MOONDREAM, "/v1/query", json!({"question": "?", "image_url": url, "settings": settings})),
        (MOONDREAM, "/v1/caption", json!({"image_url": url, "settings": settings})),
        (MOONDREAM, "/v1/point", json!({"object": "x", "image_url": url, "settings": settings})),
        (MOONDREAM, "/v1/detect", json!({"object": "x", "image_url": url})),
    ]
}

/// Goal: a large body counts as memory of bodies until its images have been decoded, on every route
/// that takes images. Another one is refused meanwhile, and accepted afterward.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_hold_memory_until_images_are_decoded() {
    let (host, waiting) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    for model in [SMOLVLM, MOONDREAM] {
        let (file, gate, count) = (pictures::picture(40, 30, 1), host.clone(), waiting.clone());
        let engine = builder(model).image_urls(move |_| {
            let (file, gate, count) = (file.to_vec(), gate.clone(), count.clone());
            async move {
                count.fetch_add(1, Ordering::Relaxed);
                gate.acquire().await.map_err(|error| error.to_string())?.forget();
                Ok(file)
            }
        });
        let engine = engine.build().await.expect("an engine");
        let options = RouterOptions { body_memory: 300_000, ..RouterOptions::default() };
        let router = router(engine, options);
        let requests = requests("https://a.test").into_iter();
        for (_, path, body) in requests.filter(|request| request.0 == model) {
            let body = body.to_string() + &" ".repeat(300_000);
            let before = waiting.load(Ordering::Relaxed);
            let (of_first, first_body) = (router.clone(), body.clone());
            let first = tokio::spawn(async move { post(&of_first, path, first_body).await });
            while waiting.load(Ordering::Relaxed) == before {
                assert!(!first.is_finished(), "{path}: {:?}", first.await);
                tokio::task::yield_now().await;
            }
            let (status, reply) = post(&router, path, body.clone()).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}: {reply}");
            host.add_permits(2);
            for (status, reply) in [first.await.expect("a reply"), post(&router, path, body).await]
            {
                assert_eq!(status, StatusCode::OK, "{path}: {reply}");
            }
        }
    }
}

/// Goal: images of Ollama's API, which are files in base64 without a type, are shown to the model
/// before the text, in a conversation and in a question; other ones are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_without_a_type_are_shown() {
    let engine = builder(SMOLVLM).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let file = STANDARD.encode(pictures::picture(40, 30, 1));
    let ask = |images: Value| {
        let message = json!({"role": "user", "content": "x", "images": images});
        let common = json!({"stream": false, "options": {"num_predict": 1}});
        let chat = json!({"messages": [message]});
        let generate = json!({"prompt": "x", "images": images});
        [("/api/chat", chat), ("/api/generate", generate)].map(|(path, mut body)| {
            body.as_object_mut()
                .expect("an object")
                .extend(common.as_object().cloned().expect("one"));
            (path, body.to_string())
        })
    };
    let parts = json!([{"type": "image_url", "image_url": {"url": data_url()}},
                       {"type": "text", "text": "x"}]);
    let messages = json!([{"role": "user", "content": parts}]);
    let (_, expected) =
        post(&router, "/tokenize", json!({ "messages": messages }).to_string()).await;
    for images in [json!([file]), json!([data_url()])] {
        for (path, body) in ask(images) {
            let (status, reply) = post(&router, path, body).await;
            assert_eq!(status, StatusCode::OK, "{path}: {reply}");
            assert_eq!(reply["prompt_eval_count"], expected["count"], "{path}");
        }
    }
    for (path, body) in ask(json!(["https://a.test/x.png"])) {
        let (status, reply) = post(&router, path, body).await;
        assert_eq!(
            (status, reply["error"].is_string()),
            (StatusCode::BAD_REQUEST, true),
            "{reply}"
        );
    }
}

/// Goal: every API tells in its usage how many prompt tokens are positions of images, the same
/// number with a warm cache, and leaves the number out if there are none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_has_the_tokens_of_images() {
    let engine = builder(SMOLVLM).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let url = data_url();
    let requests = requests(&url);
    let body = |path| &requests.iter().find(|request| request.1 == path).expect("a request").2;
    let places = [
        ("/v1/chat/completions", "/usage/prompt_tokens_details"),
        ("/v1/responses", "/usage/input_tokens_details"),
        ("/v1/messages", "/usage"),
    ];
    let mut tokens = Vec::new();
    for (path, place) in [places, places].concat() {
        let (status, reply) = post(&router, path, body(path).to_string()).await;
        assert_eq!(status, StatusCode::OK, "{path}: {reply}");
        let details = reply.pointer(place).expect("the details");
        tokens.push(details["image_tokens"].as_u64().expect("a number"));
        let mut text = body(path).clone();
        let conversation = if path == "/v1/responses" { "input" } else { "messages" };
        text[conversation] = json!([{"role": "user", "content": "x"}]);
        let (status, reply) = post(&router, path, text.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{path}: {reply}");
        assert!(!reply["usage"].to_string().contains("image_tokens"), "{path}: {reply}");
    }
    assert!(tokens[0] > 0 && tokens.iter().all(|count| *count == tokens[0]), "{tokens:?}");
}

/// Goal: the routes of the cache take a question about an image, as Moondream's API does. A warmed
/// prompt is found in the cache, and its image also for another question; a pin keeps both; an
/// image without a question is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cache_knows_questions_about_images() {
    let engine = builder(MOONDREAM).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let ask = async |path: &str, question: Option<&str>, rest: Value| {
        let mut body = rest;
        body["image_url"] = json!(data_url());
        body["question"] = json!(question);
        post(&router, path, body.to_string()).await
    };
    let result = async |path: &str, question: &str| {
        let (status, reply) = ask(path, Some(question), json!({})).await;
        assert_eq!(status, StatusCode::OK, "{path}: {reply}");
        let number = |name: &str| reply["results"][0][name].as_u64().expect("a number");
        (number("cached_tokens"), number("prompt_tokens"))
    };
    let (cached, tokens) = result("/v1/cache/query", "What is this?").await;
    assert!(cached == 0 && tokens > 26, "{cached} of {tokens}");
    assert_eq!(result("/v1/cache/warm", "What is this?").await, (tokens, tokens));
    let (of_other, _) = result("/v1/cache/query", "Where?").await;
    assert!((26..tokens).contains(&of_other), "the image: {of_other}");
    let settings = json!({"settings": {"max_tokens": 1}});
    let (_, reply) = ask("/v1/query", Some("What is this?"), settings).await;
    let details = &reply["usage"]["prompt_tokens_details"];
    assert!(details["cached_tokens"].as_u64() >= Some(tokens - 1), "{reply}");
    let (status, pin) = ask("/v1/cache/pin", Some("What is this?"), json!({})).await;
    assert_eq!((status, &pin["tokens"]), (StatusCode::OK, &json!(tokens)), "{pin}");
    let (_, evicted) = ask("/v1/cache/evict", Some("What is this?"), json!({})).await;
    assert_eq!(evicted["blocks"], 0, "pinned");
    for (question, rest, param) in [
        (None, json!({"prompt": "x"}), "image_url"),
        (Some("?"), json!({"prompt": "x"}), "question"),
    ] {
        let (status, reply) = ask("/v1/cache/query", question, rest).await;
        assert_eq!((status, &reply["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(param)));
    }
}

/// Goal: with reasoning, a reply has it next to the answer. A stream has it as a whole before the
/// pieces of the answer, with the same content and the same usage. A model that does not reason
/// refuses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reasoning_is_next_to_the_answer() {
    let start = async |model: &str| {
        let engine = builder(model).build().await.expect("an engine");
        router(engine, RouterOptions::default())
    };
    let router = start("random:moondream3-tiny").await;
    let settings = json!({"temperature": 0, "max_tokens": 300});
    let ask = json!({"question": "Where?", "reasoning": true, "settings": settings});
    for image in [json!(null), json!(data_url())] {
        let mut body = ask.clone();
        body["image_url"] = image;
        let (status, reply) = post(&router, "/v1/query", body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        assert!(reply["reasoning"]["grounding"].is_array() && reply["answer"].is_string());
        assert_ne!(reply["reasoning"]["text"], "", "{reply}");
        body["stream"] = json!(true);
        let events = events(&router, "/v1/query", body.to_string()).await;
        assert_eq!(events[0]["reasoning"], reply["reasoning"]);
        let (last, pieces) = events[1..].split_last().expect("an event");
        let pieces = pieces.iter().map(|event| event["chunk"].as_str().expect("a piece"));
        assert_eq!(pieces.collect::<String>(), reply["answer"].as_str().expect("a text"));
        let tokens = &reply["usage"]["completion_tokens"];
        assert_eq!(last["usage"]["completion_tokens"], *tokens);
        body["reasoning"] = json!(false);
        body["stream"] = json!(false);
        let (_, without) = post(&router, "/v1/query", body.to_string()).await;
        assert!(without["reasoning"].is_null() && without["answer"].is_string(), "{without}");
    }
    let (status, reply) = post(&start(MOONDREAM).await, "/v1/query", ask.to_string()).await;
    assert_eq!((status, &reply["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("reasoning")));
}

/// Goal: the tree, its outline, prefixes and pins show an image as one span, with its number of
/// positions, between the text before and after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_are_shown_as_spans() {
    let engine = builder(SMOLVLM).build().await.expect("an engine");
    let router = router(engine, RouterOptions::default());
    let parts = json!([
        {"type": "text", "text": "Before"},
        {"type": "image_url", "image_url": {"url": data_url()}},
        {"type": "text", "text": "after"},
    ]);
    let pinned = json!({"messages": [{"role": "user", "content": parts}]});
    let (status, reply) = post(&router, "/v1/cache/pin", pinned.to_string()).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let get = async |path: &str| {
        let request = Request::get(path).header("host", "localhost");
        let request = request
            .extension(ConnectInfo(SocketAddr::from(LOCAL)))
            .body(Body::empty())
            .expect("a request");
        let (status, reply) = json(router.clone().oneshot(request).await.expect("a reply")).await;
        assert_eq!(status, StatusCode::OK, "{path}: {reply}");
        reply
    };
    let spans = |text: &Value| {
        let text = text.as_str().expect("a text").to_owned();
        let spans = text.matches("[image, ").count();
        assert!(text.contains(" positions]") && spans > 0, "{text}");
        (text, spans)
    };
    let pins = get("/v1/cache/pins?tokens=true").await;
    let (text, _) = spans(&pins["pins"][0]["text"]);
    assert!(text.contains("Before") && text.contains("after"), "{text}");
    let outline = get("/v1/cache/outline?tokens=true").await;
    let id = outline["nodes"][0]["id"].as_str().expect("an id").to_owned();
    let prefix = get(&format!("/v1/cache/prefix/{id}?tokens=true")).await;
    assert_eq!(spans(&prefix["text"]).0, text);
    let ids = prefix["token_ids"].as_array().expect("a list");
    assert!(ids.iter().any(|id| id.as_u64() >= Some(1 << 31)));
    // The image at the start of a node, after another conversation that ends before it.
    let content = json!([{"type": "text", "text": "Before"}]);
    let messages = json!([{"role": "user", "content": content}]);
    let before = json!({"messages": messages, "add_generation_prompt": false});
    let (status, _) = post(&router, "/v1/cache/warm", before.to_string()).await;
    assert_eq!(status, StatusCode::OK);
    let tree = get("/v1/cache/tree?tokens=true").await;
    let nodes = tree["nodes"].as_array().expect("nodes").iter();
    let first: Vec<_> =
        nodes.flat_map(|node| node["first_tokens"].as_array().expect("a list")).collect();
    let span = first.iter().find(|token| token.is_object()).expect("a span");
    assert!(span["positions"].as_u64() > Some(1), "{span}");
    spans(&span["span"]);
    let outline = get("/v1/cache/outline?tokens=true").await;
    let nodes = outline["nodes"].as_array().expect("nodes").iter();
    assert!(nodes.filter(|node| node["text"].to_string().contains("[image, ")).count() == 1);
}

/// Goal: where the ids of a prompt are reported, the positions of an image have the id of the
/// model's token for images, and no number that only this process knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_prompts_have_the_token_of_images() {
    let engine = builder(SMOLVLM).build().await.expect("an engine");
    let info = engine.model_info();
    let (image, limit) = (info.image_token_id.expect("an image token"), info.vocab_size);
    let router = router(engine, RouterOptions::default());
    let url = data_url();
    let messages = json!([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"},
    ]}]);
    let chat = json!({"messages": messages, "max_tokens": 1, "return_token_ids": true});
    let tokenize = json!({"messages": messages});
    let mut lists = Vec::new();
    for (path, body, key) in
        [("/v1/chat/completions", chat, "prompt_token_ids"), ("/tokenize", tokenize, "tokens")]
    {
        let (status, reply) = post(&router, path, body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{reply}");
        let ids: Vec<u64> = serde_json::from_value(reply[key].clone()).expect("ids");
        assert!(ids.iter().all(|&id| id < limit as u64), "{path}: {ids:?}");
        assert!(ids.iter().filter(|&&id| id == u64::from(image)).count() > 10, "{path}: {ids:?}");
        lists.push(ids);
    }
    assert_eq!(lists[0], lists[1]);
}
