//! Moondream's API: `POST /v1/query`, `/v1/caption`, `/v1/point` and `/v1/detect`, with random
//! models of the structures of Moondream 2 and 3. `tests/moondream_client.py` tests it with
//! Moondream's own client.

#[path = "../../../../../tests/it/support/pictures.rs"]
mod pictures;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::json_schema::violation;
use crate::support::{Server, TINY};

const MODEL: &str = "random:moondream2-tiny";

/// A data URL of a picture whose pixels follow from `seed`.
pub(crate) fn picture(width: u32, height: u32, seed: u32) -> String {
    format!("data:image/bmp;base64,{}", STANDARD.encode(pictures::picture(width, height, seed)))
}

/// The schema of a reply with this media type.
fn schema<'a>(description: &'a Value, path: &str, status: &str, kind: &str) -> &'a Value {
    &description["paths"][path]["post"]["responses"][status]["content"][kind]["schema"]
}

/// The events of a streamed reply. The last one says that it is the last.
async fn events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let request = reqwest::Client::new().post(server.url(path)).body(body.to_string());
    let reply = request.header("content-type", "application/json").send().await.expect("a reply");
    assert_eq!(reply.status(), 200);
    assert_eq!(reply.headers()["content-type"], "text/event-stream");
    let text = reply.text().await.expect("a body");
    let payloads = text.lines().filter_map(|line| line.strip_prefix("data: "));
    payloads.map(|payload| serde_json::from_str(payload).expect("JSON")).collect()
}

/// Goal: answers and descriptions have Moondream's form, whole and in pieces, with the same text
/// and the same usage, and the second question about an image finds it in the cache.
#[tokio::test]
async fn answers_have_moondreams_form() {
    let server = Server::start(MODEL);
    let (_, description) = server.get("/openapi.json").await;
    let settings = json!({"temperature": 0, "top_p": 1.0, "max_tokens": 7});
    let image = picture(100, 70, 1);
    let places = json!([[0.1, 0.2], [0, 0.25, 0.5, 1]]);
    let of_places = json!({"question": "Why?", "image_url": image, "spatial_refs": places});
    for (path, field, body) in [
        ("/v1/query", "answer", json!({"question": "What is this?", "image_url": image})),
        ("/v1/query", "answer", json!({"question": "What is that?", "image_url": image})),
        ("/v1/caption", "caption", json!({"image_url": image, "length": "short"})),
        ("/v1/caption", "caption", json!({"image_url": image, "model": MODEL})),
        ("/v1/query", "answer", json!({"question": "What?", "spatial_refs": [], "stream": false})),
        ("/v1/query", "answer", of_places),
    ] {
        let mut body = body;
        body["settings"] = settings.clone();
        let reply = server.ok(path, body.clone()).await;
        let json = "application/json";
        assert_eq!(violation(&description, schema(&description, path, "200", json), &reply), None);
        let text = reply[field].as_str().expect("a text");
        assert_eq!(reply["usage"]["completion_tokens"], 7, "{reply}");
        assert_eq!(reply["finish_reason"], "length", "{reply}");
        let details = &reply["usage"]["prompt_tokens_details"];
        if body["image_url"].is_string() {
            assert_eq!(details["image_tokens"], 26, "{reply}");
        }
        body["stream"] = json!(true);
        let events = events(&server, path, &body).await;
        let events_schema = schema(&description, path, "200", "text/event-stream");
        for event in &events {
            assert_eq!(violation(&description, events_schema, event), None, "{event}");
        }
        let (last, pieces) = events.split_last().expect("an event");
        let pieces: String =
            pieces.iter().map(|event| event["chunk"].as_str().expect("a piece")).collect();
        assert_eq!(pieces, text, "{path}");
        assert!(pieces.is_empty() || last["chunk"].is_null());
        assert_eq!((&last["completed"], &last["finish_reason"]), (&json!(true), &json!("length")));
        let cached = &last["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64() > details["cached_tokens"].as_u64() || cached.as_u64() > Some(20));
    }
    server.settled_audit().await;
}

/// Goal: with reasoning, a reply has it next to the answer, in Moondream's form. A stream has it as
/// a whole before the pieces of the answer, with the same content and the same usage.
#[tokio::test]
async fn reasoning_has_moondreams_form() {
    let server = Server::start("random:moondream3-tiny");
    let (_, description) = server.get("/openapi.json").await;
    let settings = json!({"temperature": 0, "max_tokens": 300});
    let body = json!({"question": "Where?", "reasoning": true, "settings": settings});
    for image in [Value::Null, json!(picture(100, 70, 1))] {
        let mut body = body.clone();
        body["image_url"] = image;
        let reply = server.ok("/v1/query", body.clone()).await;
        let json = "application/json";
        let schema_of = |kind| schema(&description, "/v1/query", "200", kind);
        assert_eq!(violation(&description, schema_of(json), &reply), None, "{reply}");
        assert!(reply["reasoning"]["grounding"].is_array(), "{reply}");
        let text = reply["reasoning"]["text"].as_str().expect("a text");
        assert!(!text.is_empty() && reply["answer"].is_string(), "{reply}");
        body["stream"] = json!(true);
        let events = events(&server, "/v1/query", &body).await;
        for event in &events {
            let schema = schema_of("text/event-stream");
            assert_eq!(violation(&description, schema, event), None, "{event}");
        }
        assert_eq!(events[0]["reasoning"], reply["reasoning"]);
        let (last, pieces) = events[1..].split_last().expect("an event");
        let pieces = pieces.iter().map(|event| event["chunk"].as_str().expect("a piece"));
        assert_eq!(pieces.collect::<String>(), reply["answer"].as_str().expect("a text"));
        assert_eq!(last["usage"]["completion_tokens"], reply["usage"]["completion_tokens"]);
        body["reasoning"] = json!(false);
        body["stream"] = json!(false);
        let without = server.ok("/v1/query", body).await;
        assert!(without["reasoning"].is_null(), "{without}");
    }
    server.settled_audit().await;
}

/// Goal: points and boxes have Moondream's form, at most as many as were asked for, and the same
/// request finds the image and its own answer in the cache.
#[tokio::test]
async fn points_and_boxes_have_moondreams_form() {
    let server = Server::start(MODEL);
    let (_, description) = server.get("/openapi.json").await;
    let image = picture(100, 70, 1);
    for (path, field, tokens) in [("/v1/point", "points", 2), ("/v1/detect", "objects", 3)] {
        for (settings, most) in [(json!({"max_objects": 4}), 4), (json!({"temperature": 0}), 384)] {
            let body = json!({"image_url": image, "object": "cat", "settings": settings});
            let reply = server.ok(path, body.clone()).await;
            let schema = schema(&description, path, "200", "application/json");
            assert_eq!(violation(&description, schema, &reply), None, "{reply}");
            let found = reply[field].as_array().expect("a list");
            assert!(!found.is_empty() && found.len() <= most, "{reply}");
            let generated = reply["usage"]["completion_tokens"].as_u64().expect("a number");
            assert!((1..=2).contains(&(generated - tokens * found.len() as u64 + 1)), "{reply}");
            for entry in found {
                for (_, value) in entry.as_object().expect("an object") {
                    let value = value.as_f64().expect("a number");
                    assert!((0.0..=1.0).contains(&value), "{entry}");
                }
            }
            let again = server.ok(path, body).await;
            assert_eq!(again[field], reply[field]);
            assert_eq!(again["usage"]["prompt_tokens_details"]["image_tokens"], 26, "{again}");
            let cached = &again["usage"]["prompt_tokens_details"]["cached_tokens"];
            assert!(cached.as_u64() >= Some(30), "{again}");
        }
    }
    server.settled_audit().await;
}

/// Goal: unsupported requests are refused with the parameter and the expected value.
#[tokio::test]
async fn other_requests_are_refused() {
    let server = Server::start(MODEL);
    let image = picture(10, 10, 1);
    let query = |key: &str, value: Value| ("/v1/query", json!({"question": "a", key: value}));
    let object = json!({"image_url": image, "object": "x"});
    let with = |path: &'static str, key: &str, value: Value| {
        let mut body = object.clone();
        body[key] = value;
        (path, body)
    };
    let detect = |key: &str, value: Value| with("/v1/detect", key, value);
    let point = |key: &str, value: Value| with("/v1/point", key, value);
    let broken = json!("data:image/png;base64,AAAA");
    for ((path, body), param, part) in [
        (("/v1/query", json!({"image_url": image})), "question", "required"),
        (query("question", json!(" ")), "question", "an empty text"),
        (query("reasoning", json!(true)), "reasoning", "a model that reasons before it answers"),
        (query("spatial_refs", json!([[0.1, 0.2]])), "spatial_refs", "none without an image"),
        (
            query("spatial_refs", json!([[0.1, 0.2, 0.3]])),
            "spatial_refs[0]",
            "a point [x, y] or a box",
        ),
        (query("spatial_refs", json!([{"x": 0.1}])), "spatial_refs[0]", "a point [x, y] or a box"),
        (query("spatial_refs", json!("here")), "spatial_refs", "a list"),
        (query("spatial_refs", json!(vec![[0, 1]; 1025])), "spatial_refs", "at most 1024 elements"),
        (point("spatial_refs", json!([[0.1, 1.2]])), "spatial_refs", "from 0 to 1"),
        (point("spatial_refs", json!([[1, 0, 0, 1]])), "spatial_refs", "from 0 to 1"),
        (detect("spatial_refs", json!([[0, 1]])), "spatial_refs", "none"),
        (query("settings", json!({"temperature": "x"})), "settings.temperature", "a finite number"),
        (query("settings", json!({"heat": 1})), "settings.heat", "expected one of `temperature`"),
        (query("image_url", json!("http://a/b.png")), "", "a data URL in base64"),
        (query("image_url", broken), "", "unknown format"),
        (query("temprature", json!("b")), "temprature", ""),
        (("/v1/caption", json!({"length": "short"})), "image_url", "required"),
        (("/v1/caption", json!({"image_url": image, "length": "tiny"})), "length", "short"),
        (("/v1/point", json!({"image_url": image})), "object", "required"),
        (("/v1/point", json!({"image_url": image, "object": ""})), "object", "an empty text"),
        (("/v1/detect", json!({"object": "x"})), "image_url", "required"),
        (detect("stream", json!(true)), "stream", "false"),
        (detect("settings", json!({"temperature": 1})), "settings.temperature", "expected 0"),
        (detect("settings", json!({"max_objects": 0})), "settings.max_objects", "1 to 4096"),
    ] {
        let (status, reply) = server.post(path, body.clone()).await;
        let message = reply["error"]["message"].as_str().expect("a message");
        assert_eq!(status, 400, "{body}: {reply}");
        if !param.is_empty() {
            assert_eq!(reply["error"]["param"], param, "{body}: {reply}");
        }
        assert!(message.contains(part), "{body}: {message}");
    }
}

/// Goal: a host that the operator has named is asked only if its address is public, and other hosts
/// are not asked at all, whichever API names the image.
#[cfg(feature = "image-urls")]
#[tokio::test]
async fn images_are_fetched_from_public_addresses_of_named_hosts_only() {
    let server = Server::with(MODEL, |engine, _| {
        let hosts = ["localhost", "*.invalid"].map(|host| host.parse().expect("a host"));
        let hosts = stolon_http::ImageHosts::new(hosts.to_vec());
        engine.image_urls(move |url| hosts.fetch(url))
    });
    let own = server.url("/health").replace("127.0.0.1", "localhost");
    for (url, expected) in [
        (own.as_str(), "a URL of a host that this server fetches images from"),
        ("http://localhost/a.png", "localhost: expected a public address, got a private one"),
        ("http://127.0.0.1/a.png", "a URL of a host that this server fetches images from"),
        ("https://a.invalid/a.png", "a.invalid: expected an answer, got none"),
        ("file:///etc/hostname", "an http or https URL without a user and with a port from 1"),
    ] {
        for (path, body) in [
            ("/v1/query", json!({"question": "a", "image_url": url})),
            ("/v1/caption", json!({"image_url": url})),
        ] {
            let (status, reply) = server.post(path, body).await;
            assert_eq!(status, 400, "{url}: {reply}");
            let message = reply["error"]["message"].as_str().expect("a message");
            assert!(message.starts_with("image 1: ") && message.contains(expected), "{message}");
        }
    }
    server.settled_audit().await;
}

/// Goal: every request to a model without skills is refused, and one to another model.
#[tokio::test]
async fn other_models_are_refused() {
    let image = picture(10, 10, 1);
    let server = Server::with(MODEL, |engine, options| {
        options.served_names = ["one", "two"].map(String::from).to_vec();
        engine
    });
    let (status, reply) = server.post("/v1/query", json!({"question": "a", "model": "b"})).await;
    assert_eq!(status, 404, "{reply}");
    let other = Server::start(TINY);
    for (path, body) in [
        ("/v1/query", json!({"question": "a"})),
        ("/v1/caption", json!({"image_url": image})),
        ("/v1/point", json!({"image_url": image, "object": "x"})),
        ("/v1/detect", json!({"image_url": image, "object": "x"})),
    ] {
        let (status, reply) = other.post(path, body).await;
        assert_eq!(status, 400, "{reply}");
    }
}
