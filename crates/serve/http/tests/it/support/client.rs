//! A client of one server, and the requests and replies of tests.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A tiny model with random weights. Its tokens 0 to 255 are bytes.
pub(crate) const TINY: &str = "random:tiny";

/// The directory of the model that recites the script whose name ends the prompt.
pub(crate) const SCRIPTED: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/tests/fixtures/scripted");

/// A model for embeddings, with the embeddings that sentence-transformers computes.
pub(crate) const EMBEDDING: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/checkpoint/tests/fixtures/embedding");

/// Sends requests to the server at `base`.
pub(crate) struct Client {
    base: String,
    http: reqwest::Client,
}

impl Client {
    /// A client of the server at this address, such as `http://127.0.0.1:8080`.
    pub(crate) fn new(base: String) -> Self {
        Self { base, http: reqwest::Client::new() }
    }

    /// Address and port of the server.
    pub(crate) fn address(&self) -> &str {
        self.base.trim_start_matches("https://").trim_start_matches("http://")
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Posts a body unchanged.
    pub(crate) async fn send(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
    ) -> reqwest::Response {
        let request = self.http.post(self.url(path)).header("content-type", "application/json");
        request.body(body).send().await.expect("a response")
    }

    /// Posts JSON and returns the status and the JSON of the reply.
    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.send(path, body.to_string()).await;
        (response.status().as_u16(), response.json().await.expect("JSON"))
    }

    /// Posts JSON and expects it to succeed.
    pub(crate) async fn ok(&self, path: &str, body: Value) -> Value {
        let shown = body.to_string();
        let (status, reply) = self.post(path, body).await;
        assert_eq!(status, 200, "{shown}: {reply}");
        reply
    }

    /// Posts to the completions endpoint, greedy unless the body says otherwise.
    pub(crate) async fn complete(&self, body: Value) -> Value {
        self.ok("/v1/completions", greedy(body)).await
    }

    /// Posts with `stream` and returns the events. Checks that `[DONE]` is the last and leaves it
    /// out.
    pub(crate) async fn events(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = json!(true);
        let response = self.send(path, greedy(body).to_string()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = response.text().await.expect("a body");
        let mut payloads: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(payloads.pop(), Some("[DONE]"));
        payloads.iter().map(|payload| serde_json::from_str(payload).expect("JSON")).collect()
    }

    /// Posts with `stream` and returns the names and the contents of the events.
    pub(crate) async fn named_events(&self, path: &str, mut body: Value) -> Vec<(String, Value)> {
        body["stream"] = json!(true);
        let response = self.send(path, body.to_string()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = response.text().await.expect("a body");
        let event = |text: &str| {
            let (name, data) = text.split_once('\n').expect("two lines");
            let name = name.strip_prefix("event: ").expect("a name").to_owned();
            let data = data.strip_prefix("data: ").expect("data");
            (name, serde_json::from_str(data).expect("JSON"))
        };
        text.split("\n\n").filter(|event| !event.is_empty()).map(event).collect()
    }

    /// Posts JSON with a header.
    pub(crate) async fn post_with(
        &self,
        path: &str,
        header: (&str, &str),
        body: Value,
    ) -> (u16, Value) {
        let request = self.http.post(self.url(path)).header(header.0, header.1).json(&body);
        let response = request.send().await.expect("a response");
        (response.status().as_u16(), response.json().await.expect("JSON"))
    }

    pub(crate) async fn delete(&self, path: &str) -> (u16, Value) {
        let request = reqwest::Client::new().delete(self.url(path));
        let reply = request.send().await.expect("a response");
        (reply.status().as_u16(), reply.json().await.expect("JSON"))
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        let response = self.http.get(self.url(path)).send().await.expect("a response");
        (response.status().as_u16(), response.json().await.expect("JSON"))
    }

    /// Waits until no request runs or waits, then checks that every block is free or cached.
    pub(crate) async fn settled_audit(&self) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (status, reply) = self.get("/admin/audit").await;
            assert_eq!(status, 200, "{reply}");
            let audit = &reply["audit"];
            let busy = ["running", "waiting", "blocks_reserved"].map(|name| audit[name].as_u64());
            if busy == [Some(0); 3] {
                let count = |name: &str| audit[name].as_u64().expect("a count");
                assert_eq!(
                    count("blocks_free") + count("blocks_partial") + count("blocks_committed"),
                    count("blocks_total"),
                    "{audit}"
                );
                return audit.clone();
            }
            assert!(Instant::now() < deadline, "requests still hold blocks: {audit}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The body with temperature 0 unless it has one.
fn greedy(mut body: Value) -> Value {
    if body["temperature"].is_null() {
        body["temperature"] = json!(0);
    }
    body
}

/// The texts of a reply's choices, in order.
pub(crate) fn texts(reply: &Value) -> Vec<&str> {
    let choices = reply["choices"].as_array().expect("choices");
    choices.iter().map(|choice| choice["text"].as_str().expect("a text")).collect()
}

/// Token ids of a prompt: `shared` tokens that are the same for all seeds, then 8 that depend on
/// the seed.
pub(crate) fn prompt(shared: usize, seed: u32) -> Vec<u32> {
    let own = (0..8).map(|i| 32 + (seed * 7 + i * 3) % 90);
    (0..shared as u32).map(|i| 32 + (i * 31) % 90).chain(own).collect()
}

/// Longer than anything may take on a connection. It ends a test that hangs.
pub(crate) const GUARD: Duration = Duration::from_secs(60);

/// Opens a connection and sends nothing.
pub(crate) fn connect(server: &Client) -> TcpStream {
    let stream = TcpStream::connect(server.address()).expect("a connection");
    stream.set_read_timeout(Some(GUARD)).expect("set");
    stream
}

/// Sends a part of a request and nothing more.
pub(crate) fn begin(server: &Client, part: &str) -> TcpStream {
    let mut stream = connect(server);
    stream.write_all(part.as_bytes()).expect("sent");
    stream
}

/// The head of a completion request with a body of `length` bytes.
pub(crate) fn head(length: usize) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

/// The status of the reply to a request. An error must say its reason.
pub(crate) async fn status(request: reqwest::RequestBuilder) -> u16 {
    let reply = request.send().await.expect("a reply");
    let status = reply.status().as_u16();
    if status >= 400 {
        let reply: Value = reply.json().await.expect("JSON");
        assert!(reply["error"]["message"].is_string(), "{reply}");
    }
    status
}
