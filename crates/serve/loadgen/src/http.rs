//! A server with an OpenAI-compatible API as a target of the load generator.
//!
//! Answers are always streamed. Servers are not trusted: the time of a request, the size of an
//! event and the size of an answer are bounded, and anything that a server sends instead of an
//! answer becomes a [`Failure`] that is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use http_body_util::BodyExt;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use rustls::ClientConfig;
use serde_json::{Map, Value, json};

use super::drive::{Clock, Failure, Target};
use super::metrics::RequestRecord;
use super::workload::Turn;
use event_data::EventData;
use request::{HttpClient, chain, client, failed, first_model, refusal, send, url};

mod answer;
mod event_data;
mod request;
mod words;

pub use answer::{Answer, TokenCounts, TokenLogprob};
pub use request::certificate_hint;
pub use words::WORD_COUNT;

/// Maximum number of bytes that are read of a streamed answer.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Time in which a server has to end a reply after `[DONE]`, so that its connection is used again.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The API that requests are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Api {
    /// `/v1/completions`
    #[value(name = "openai", alias = "vllm", alias = "completions")]
    Completions,
    /// `/v1/chat/completions`
    #[value(name = "openai-chat", alias = "chat")]
    Chat,
}

/// How requests are made. The fields are the flags of `stolon bench serve`.
#[derive(Debug)]
pub struct HttpOptions {
    /// Scheme, host and port, possibly with a path that precedes the endpoint's. It may end with the
    /// version of the API, such as `/v1`, which is the default.
    pub base_url: String,
    /// Path of the API; `None` for the usual one.
    pub endpoint: Option<String>,
    /// The API.
    pub api: Api,
    /// Name of the model; `None` for the first one that the server lists.
    pub model: Option<String>,
    /// Key that is sent as `Authorization: Bearer KEY`.
    pub api_key: Option<String>,
    /// Further headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Fields that are added to each request, or that replace those of the same name.
    pub extra_body: Map<String, Value>,
    /// Whether prompts are sent as token ids instead of words.
    pub token_ids: bool,
    /// Time after which a request counts as failed.
    pub timeout: Duration,
    /// The settings of TLS, with the authorities to trust instead of the public ones.
    pub tls: Option<ClientConfig>,
}

/// A server. Clones share its connections.
#[derive(Clone, Debug)]
pub struct HttpTarget(Arc<Server>);

#[derive(Debug)]
struct Server {
    client: HttpClient,
    url: Uri,
    headers: HeaderMap,
    api: Api,
    /// The fields that all requests have.
    body: Map<String, Value>,
    token_ids: bool,
    timeout: Duration,
    /// Whether any answer reported its number of tokens, and of cached tokens.
    reports_usage: AtomicBool,
    reports_cached: AtomicBool,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Who has written it: `user` or `assistant`.
    pub role: &'static str,
    /// What it says.
    pub text: String,
}

/// The turns and answers of a conversation.
#[derive(Debug, Default)]
pub struct History {
    /// The turns and answers.
    messages: Vec<Message>,
    /// Token ids of the prompt, if prompts are sent as token ids.
    ids: Vec<u32>,
}

/// A request that has not been sent yet.
#[derive(Debug)]
pub struct Unsent {
    max_tokens: usize,
    priority: i32,
}

impl HttpTarget {
    /// Prepares requests to a server, and asks for its models if none was named.
    ///
    /// # Errors
    /// If the address is not an HTTP URL, if the file of authorities cannot be used, or if the
    /// server has to be asked and does not answer.
    pub async fn new(options: HttpOptions) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::from_iter(options.headers);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &options.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            let mut value =
                value.context("the API key has characters that a header cannot have")?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let base = options.base_url.trim_end_matches('/');
        // The name of a host follows two slashes.
        let (base, version) = match base.rsplit_once('/') {
            Some((path, version @ ("v1" | "v2" | "v3" | "v4"))) if !path.ends_with('/') => {
                (path, version)
            }
            _ => (base, "v1"),
        };
        let usual = match options.api {
            Api::Completions => format!("/{version}/completions"),
            Api::Chat => format!("/{version}/chat/completions"),
        };
        let address = url(base, &options.endpoint.unwrap_or(usual))?;
        let client = client(options.tls);
        let model = match options.model {
            Some(model) => model,
            None => {
                let models = url(base, &format!("/{version}/models"))?;
                let asked = first_model(&client, &models, &headers, options.timeout).await;
                asked.with_context(|| format!("{models}: cannot ask for the model's name"))?
            }
        };
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(model));
        body.insert("temperature".to_owned(), json!(0));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({"include_usage": true}));
        body.extend(options.extra_body);
        Ok(Self(Arc::new(Server {
            client,
            url: address,
            headers,
            api: options.api,
            body,
            token_ids: options.token_ids,
            timeout: options.timeout,
            reports_usage: AtomicBool::new(false),
            reports_cached: AtomicBool::new(false),
        })))
    }

    /// The address that requests are sent to.
    #[must_use]
    pub fn url(&self) -> &Uri {
        &self.0.url
    }

    /// The model's name in requests.
    #[must_use]
    pub fn model(&self) -> &str {
        self.0.body["model"].as_str().unwrap_or_default()
    }

    /// Sends a conversation and reads its answer. For completions, the prompt has an empty line
    /// after each message. Dropping the future cancels the request.
    ///
    /// # Errors
    /// [`Failure::Overloaded`] for status 429, and a [`Failure::Counted`] for everything else that
    /// is not a complete answer in time.
    pub async fn ask(&self, messages: &[Message], max_tokens: usize) -> Result<Answer, Failure> {
        let body = match self.0.api {
            Api::Chat => self.0.body(messages, &[], max_tokens),
            Api::Completions => {
                let spaced = |message: &Message| Message {
                    text: format!("{}\n\n", message.text),
                    ..message.clone()
                };
                let messages: Vec<Message> = messages.iter().map(spaced).collect();
                self.0.body(&messages, &[], max_tokens)
            }
        };
        self.0.answer(body, || {}).await
    }

    /// Whether any answer so far reported the number of its tokens.
    #[must_use]
    pub fn reports_usage(&self) -> bool {
        self.0.reports_usage.load(Ordering::Relaxed)
    }

    /// Whether any answer so far reported how many tokens of its prompt were cached.
    #[must_use]
    pub fn reports_cached(&self) -> bool {
        self.0.reports_cached.load(Ordering::Relaxed)
    }
}

impl Target for HttpTarget {
    type History = History;
    type Answer = Unsent;

    async fn submit(
        &self,
        history: &mut History,
        turn: &Turn,
        priority: i32,
    ) -> Result<Unsent, Failure> {
        if self.0.token_ids {
            history.ids.extend_from_slice(&turn.tokens);
        } else {
            history.messages.push(Message { role: "user", text: words::text(&turn.tokens) });
        }
        Ok(Unsent { max_tokens: turn.output_tokens, priority })
    }

    async fn read(
        &self,
        request: Unsent,
        history: &mut History,
        record: &mut RequestRecord,
        clock: Clock,
    ) -> Result<(), Failure> {
        let server = &*self.0;
        let mut body = server.body(&history.messages, &history.ids, request.max_tokens);
        if request.priority != 0 {
            body.entry("priority").or_insert_with(|| json!(request.priority));
        }
        let answer = server.answer(body, || record.token_times.push(clock.now())).await?;
        if answer.token_events == 0 {
            return Err(failed("empty answer", "the stream had no tokens"));
        }
        record.output_tokens = answer.usage.completion.unwrap_or(answer.token_events);
        record.prompt_tokens = answer.usage.prompt.unwrap_or(0);
        record.cached_tokens = answer.usage.cached.unwrap_or(0);
        if answer.usage.completion.is_some() {
            server.reports_usage.store(true, Ordering::Relaxed);
        }
        if answer.usage.cached.is_some() {
            server.reports_cached.store(true, Ordering::Relaxed);
        }
        history.messages.push(Message { role: "assistant", text: answer.text });
        Ok(())
    }
}

impl Server {
    /// The fields of a request for an answer to `messages`, or to the token ids `ids` if prompts are
    /// sent as token ids.
    fn body(&self, messages: &[Message], ids: &[u32], max_tokens: usize) -> Map<String, Value> {
        let mut body = self.body.clone();
        match self.api {
            Api::Chat => {
                let message = |m: &Message| json!({"role": m.role, "content": m.text});
                body.insert("messages".to_owned(), messages.iter().map(message).collect());
            }
            Api::Completions if self.token_ids => {
                body.insert("prompt".to_owned(), json!(ids));
            }
            Api::Completions => {
                let prompt: String = messages.iter().map(|message| message.text.as_str()).collect();
                body.insert("prompt".to_owned(), json!(prompt));
            }
        }
        body.entry("max_tokens").or_insert_with(|| json!(max_tokens));
        body
    }

    /// Sends a request and reads its answer within the time limit. `on_token` is called for each
    /// event with tokens.
    async fn answer(
        &self,
        body: Map<String, Value>,
        on_token: impl FnMut(),
    ) -> Result<Answer, Failure> {
        let exchange = self.exchange(Value::Object(body).to_string().into_bytes(), on_token);
        tokio::time::timeout(self.timeout, exchange).await.unwrap_or_else(|_| {
            let seconds = self.timeout.as_secs_f64();
            Err(failed("timeout", format!("there was no complete answer within {seconds} s")))
        })
    }

    async fn exchange(&self, body: Vec<u8>, mut on_token: impl FnMut()) -> Result<Answer, Failure> {
        let response = send(&self.client, Method::POST, &self.url, &self.headers, body).await?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        let kind = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
            let kind = kind.unwrap_or("none").to_owned();
            let message = format!("expected the content type text/event-stream, got {kind}");
            return Err(failed("no event stream", message));
        }
        let mut answer = Answer::default();
        let mut events = EventData::default();
        let mut body = response.into_body();
        let mut bytes_read = 0;
        while !answer.done {
            let Some(frame) = body.frame().await else { break };
            let frame = frame.map_err(|error| failed("connection lost", chain(&error)))?;
            let Some(bytes) = frame.data_ref() else { continue };
            bytes_read += bytes.len();
            if bytes_read > MAX_ANSWER_BYTES {
                let message = format!("expected at most {MAX_ANSWER_BYTES} bytes");
                return Err(failed("endless answer", message));
            }
            events.push(bytes, |data| {
                if answer.on_event(data)? {
                    answer.token_events += 1;
                    on_token();
                }
                Ok(())
            })?;
        }
        answer.check_complete()?;
        // The connection can be used again if the reply is read to its end.
        let _ = tokio::time::timeout(END_TIMEOUT, async {
            while body.frame().await.is_some_and(|frame| frame.is_ok()) {}
        })
        .await;
        Ok(answer)
    }
}
