//! The HTTP API of a Stolon engine: OpenAI's, Anthropic's, and routes for operators.
//!
//! [`router`] can be mounted in any axum application; [`api`] has the types of its requests and
//! replies. It holds only a clone of the engine. When a client disconnects, axum drops its handler
//! and with it the token streams, which cancels the client's requests.
//!
//! ```no_run
//! use std::net::SocketAddr;
//!
//! use axum::Router;
//! use axum::routing::get;
//! use stolon::Engine;
//! use stolon_http::{RouterOptions, router};
//! use tokio::net::TcpListener;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let engine = Engine::builder().model("path/to/model").build().await?;
//!     let app = Router::new()
//!         .route("/", get(|| async { "an application" }))
//!         .nest("/llm", router(engine.clone(), RouterOptions::default()));
//!     let listener = TcpListener::bind("127.0.0.1:8080").await?;
//!     // The routes for operators need to know where a connection comes from.
//!     let service = app.into_make_service_with_connect_info::<SocketAddr>();
//!     axum::serve(listener, service).await?;
//!     engine.shutdown().await;
//!     Ok(())
//! }
//! ```
//!
//! The limits of connections (their number, slow headers, clients that read nothing) belong to
//! `listen`, which accepts them for `stolon serve`; those of requests and their bodies are the
//! router's.
//!
//! A program that mounts the router needs none of the features, most of which are on by default:
//!
//! * `grammar`: structured output. Without it, requests for it are refused with status 400;
//! * `gzip`: replies compressed by gzip. Without it, no reply is compressed;
//! * `image-urls` (off by default): `ImageHosts`, which fetches images that requests name by URL;
//! * `listen`: `listen` itself, and TLS;
//! * `openapi`: `/openapi.json` and `/docs`. Without it, they are answered with status 404;
//! * `otel`: traces.

#![forbid(unsafe_code)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::response::Response;
use axum::{Router, middleware};
use stolon::{AuditReport, Engine, ReasoningFormat, ToolCallFormat, TreeDump};
use tokio::sync::Semaphore;
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::trace::{DefaultOnResponse, OnResponse, TraceLayer};
use tracing::{Level, Span};

use crate::api::options::MAX_CHOICES;
use crate::handlers::{admin, cache_events, cache_files};
use crate::routes::other_paths::OtherPaths;
use crate::wire::{advice, body, error, flight, receive, reply, request_id};

pub use guard::access::{Access, Tenants};
pub use guard::cors::Origins;
pub use guard::hosts::AllowedHost;
#[cfg(feature = "image-urls")]
pub use guard::image_hosts::{ImageHost, ImageHosts};
pub use guard::keys::{
    ApiKey, ApiKeys, KeyFileError, KeyLimits, Secret, check as check_key, read as read_keys,
};
pub use handlers::dialogue::FormatChoice;
pub use handlers::metrics::{CounterSource, CounterValue, EngineMetrics};
pub use handlers::parsing::{
    parse_chat, parse_completion, parse_embeddings, parse_messages, parse_responses,
};
pub use handlers::priority::PriorityOrder;
pub use wire::advice::UnknownParameters;
#[cfg(feature = "tls")]
pub use wire::certificates;
#[cfg(feature = "listen")]
pub use wire::connection::{ConnectionLimits, listen};
#[cfg(feature = "listen")]
pub use wire::gate::Gate;
#[cfg(feature = "listen")]
pub use wire::listener::Listener;
pub use wire::root_path::RootPath;
#[cfg(all(unix, feature = "listen"))]
pub use wire::socket::SocketFile;
#[cfg(feature = "listen")]
pub use wire::tls::Certificate;
pub use wire::traces;

pub mod api;

mod guard;
mod handlers;
mod routes;
mod wire;

/// Default limit of a body, in bytes per token of the context. A token is a few bytes of text; JSON
/// escapes and batches of prompts take more.
const BODY_BYTES_PER_TOKEN: usize = 256;
/// Smallest and largest default limit of bodies, in bytes. The largest is for models that take
/// images, whose size does not follow from the context.
const BODY_LIMITS: (usize, usize) = (1 << 20, 16 << 20);
/// Maximum number of JSON values in a body: this, and [`VALUES_PER_TOKEN`] per token of the
/// context.
const BASE_VALUES: usize = 1 << 16;
const VALUES_PER_TOKEN: usize = 8;

/// The name of a model that stands for every name.
const ANY_NAME: &str = "*";

/// Settings of a [`router`].
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Names of the model for clients, which replace its id. The first one is that of replies and
    /// metrics. If there are none, clients use the id. A client that sends another name is answered
    /// if there is at most one name and no adapter, or if one of the names is `*`, which is not
    /// listed.
    pub served_names: Vec<String>,
    /// A further name that is accepted but not listed, such as the argument with which the operator
    /// chose the model. It has no effect if there are `served_names`.
    pub alias: Option<String>,
    /// The rules of access.
    pub access: Access,
    /// Maximum size of a request body, in bytes. Default: 256 per token of the context, from 1 MiB
    /// to 16 MiB, and 16 MiB for models that take images.
    pub body_limit: Option<usize>,
    /// Maximum time from the end of a request's headers to the end of its body.
    pub body_timeout: Duration,
    /// Maximum size of all bodies that are being received or parsed, or whose prompts and images
    /// wait to be tokenized and decoded, in bytes. The first 64 KiB of each body do not count, nor
    /// do the second copies of the few bodies that are being parsed at a time.
    pub body_memory: usize,
    /// Maximum time for an answer; `None` for no limit.
    pub request_timeout: Option<Duration>,
    /// Maximum number of tokens of an answer if the request sets none. Default: 16 for completions,
    /// as in OpenAI's API, and for chat as many as the context and the KV pool allow.
    pub default_max_tokens: Option<usize>,
    /// Maximum number of answers of one call, prompts times `n` or `best_of`, at most 128. It
    /// should not exceed the size of the engine's queue, because a call that does not fit in the
    /// queue is never accepted.
    pub max_answers: usize,
    /// How unknown parameters are treated. Default: the request is refused.
    pub unknown_parameters: UnknownParameters,
    /// Whether special tokens that are spelled out in chat messages act as control tokens. By
    /// default they are ordinary text.
    pub special_tokens_in_messages: bool,
    /// The format in which the model calls tools. Default: the one of its chat template.
    pub tool_calls: FormatChoice<ToolCallFormat>,
    /// The tags around the model's reasoning. Default: those of its chat template.
    pub reasoning: FormatChoice<ReasoningFormat>,
    /// Origins whose web pages may use the routes for clients, such as `https://app.example`; `*`
    /// for all. Default: none.
    pub allowed_origins: Vec<HeaderValue>,
    /// Whether everybody may read `/metrics`. If not, the rules of the operator's routes apply.
    pub public_metrics: bool,
    /// Counters that `/metrics` adds to those of the engine. Default: none.
    pub counters: Vec<CounterSource>,
    /// Whether replies leave out the number of prompt tokens that came from the cache.
    pub hide_cached_tokens: bool,
    /// Which values of a request's `priority` come first.
    pub priority: PriorityOrder,
    /// Whether there is a page at `/`, with its files below `/page`.
    pub page: bool,
    /// A path below which all routes can be reached, in addition to their own paths.
    pub root_path: RootPath,
}

impl Default for RouterOptions {
    /// No additional names, no keys and no page; 30 s and 256 MiB for bodies; no time limit for
    /// answers.
    fn default() -> Self {
        Self {
            served_names: Vec::new(),
            alias: None,
            access: Access::default(),
            body_limit: None,
            body_timeout: Duration::from_secs(30),
            body_memory: 256 << 20,
            request_timeout: None,
            default_max_tokens: None,
            max_answers: MAX_CHOICES,
            unknown_parameters: UnknownParameters::default(),
            special_tokens_in_messages: false,
            tool_calls: FormatChoice::Auto,
            reasoning: FormatChoice::Auto,
            allowed_origins: Vec::new(),
            public_metrics: false,
            counters: Vec::new(),
            hide_cached_tokens: false,
            priority: PriorityOrder::default(),
            page: false,
            root_path: RootPath::default(),
        }
    }
}

/// State that the handlers share.
#[derive(Debug)]
struct App {
    engine: Engine,
    /// The names of the model, at least one. The first one is in replies and metrics.
    served_names: Vec<String>,
    /// A further name that is accepted and not listed.
    alias: Option<String>,
    /// Whether every name that is not listed stands for the model, also next to adapters.
    any_name: bool,
    /// Whether there has been an adapter. A name that is not listed may belong to one that was
    /// unloaded.
    had_adapters: AtomicBool,
    /// The version of the server and the model, in replies.
    fingerprint: String,
    access: Access,
    bodies: receive::BodyLimits,
    parser: body::Parser,
    request_timeout: Option<Duration>,
    /// Maximum number of tokens of answers whose requests set none, if the operator chose it.
    configured_max_tokens: Option<usize>,
    max_answers: usize,
    unknown_parameters: UnknownParameters,
    special_tokens_in_messages: bool,
    tool_calls: FormatChoice<ToolCallFormat>,
    reasoning: FormatChoice<ReasoningFormat>,
    hide_cached_tokens: bool,
    priority: PriorityOrder,
    #[cfg_attr(not(feature = "openapi"), allow(dead_code, reason = "read by the description"))]
    root_path: RootPath,
    metrics: EngineMetrics,
    audits: flight::SingleFlight<Result<AuditReport, error::ApiError>>,
    event_streams: cache_events::EventStreams,
    prefix_files: cache_files::PrefixFiles,
    dumps: flight::SingleFlight<Result<Arc<TreeDump>, error::ApiError>>,
    /// When the router was made, in seconds since 1970-01-01 UTC: the model's `created`.
    started: u64,
}

/// The HTTP API of an engine: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`,
/// `/v1/embeddings` and `/v1/models` as in OpenAI's API, `/v1/messages` as in Anthropic's,
/// `/tokenize`, `/detokenize` and `/v1/load_lora_adapter` as in vLLM, `/v1/sessions`, and
/// `/health`, `/ready`, `/version`, `/metrics`, `/v1/cache` and `/admin` for operators. The API is
/// described at `/openapi.json`, and for people at `/docs`.
///
/// Without an administrator's key, `/v1/cache`, `/admin` and `/metrics` are refused unless the
/// connection comes from this machine, which is known from
/// [`ConnectInfo`](axum::extract::ConnectInfo): serve the router with
/// [`Router::into_make_service_with_connect_info`] and a [`SocketAddr`](std::net::SocketAddr).
pub fn router(engine: Engine, options: RouterOptions) -> Router {
    let app = Arc::new(App::new(engine, options.clone()));
    let root = options.root_path.clone();
    let known = || {
        routes::router(&app, &options)
            .fallback(admin::not_found)
            .method_not_allowed_fallback(admin::method_not_allowed)
    };
    let (others, elsewhere) = (known().with_state(Arc::clone(&app)), OtherPaths::of(&options));
    let router = root
        .add_redirect(routes::router(&app, &options))
        .fallback(async move |request: Request| {
            let request = elsewhere.settled(request);
            others.clone().oneshot(request).await
        })
        .method_not_allowed_fallback(admin::method_not_allowed)
        .layer(CatchPanicLayer::custom(error::panicked))
        .layer(TraceLayer::new_for_http().make_span_with(request_id::span).on_response(
            |response: &Response, latency: Duration, span: &Span| {
                let error = response.extensions().get().map(error::ApiError::label);
                traces::replied(span, response, error);
                DefaultOnResponse::new().level(Level::INFO).on_response(response, latency, span);
            },
        ))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), advice::middleware))
        .layer(middleware::from_fn(request_id::middleware))
        .with_state(app);
    #[cfg(feature = "gzip")]
    let router = router.layer(wire::gzip::layer());
    root.mount(router)
}

impl App {
    fn new(engine: Engine, options: RouterOptions) -> Self {
        let context = engine.model_info().max_positions;
        let (least, most) = BODY_LIMITS;
        let by_context = match engine.model_info().takes_images {
            true => most,
            false => context.saturating_mul(BODY_BYTES_PER_TOKEN).clamp(least, most),
        };
        let values = context.saturating_mul(VALUES_PER_TOKEN).saturating_add(BASE_VALUES);
        let mut names = options.served_names;
        let any_name = names.iter().any(|name| name == ANY_NAME);
        names.retain(|name| name != ANY_NAME);
        let (served_names, alias) = match names {
            names if names.is_empty() => (vec![engine.model_info().id.clone()], options.alias),
            names => (names, None),
        };
        Self {
            metrics: EngineMetrics::with_counters(
                engine.clone(),
                served_names[0].clone(),
                options.counters,
            ),
            parser: body::Parser::new(values, engine.clone()),
            fingerprint: fingerprint(&engine),
            had_adapters: AtomicBool::new(!engine.adapters().is_empty()),
            engine,
            served_names,
            alias,
            any_name,
            access: options.access,
            bodies: receive::BodyLimits {
                size: options.body_limit.unwrap_or(by_context),
                time: options.body_timeout,
                memory: Arc::new(Semaphore::new(options.body_memory.min(Semaphore::MAX_PERMITS))),
            },
            request_timeout: options.request_timeout,
            configured_max_tokens: options.default_max_tokens,
            max_answers: options.max_answers.clamp(1, MAX_CHOICES),
            unknown_parameters: options.unknown_parameters,
            special_tokens_in_messages: options.special_tokens_in_messages,
            tool_calls: options.tool_calls,
            reasoning: options.reasoning,
            hide_cached_tokens: options.hide_cached_tokens,
            priority: options.priority,
            root_path: options.root_path,
            event_streams: cache_events::EventStreams::new(),
            prefix_files: cache_files::PrefixFiles::new(),
            audits: flight::SingleFlight::new(),
            dumps: flight::SingleFlight::new(),
            started: unix_seconds(),
        }
    }

    /// Maximum number of tokens of an answer to a chat request that sets none.
    fn default_max_tokens(&self) -> usize {
        // The engine ends an answer where the context or the KV pool ends.
        self.configured_max_tokens.unwrap_or(self.engine.model_info().max_positions)
    }

    /// Refuses a call for more answers than can ever be accepted.
    fn check_answers(&self, param: &str, answers: usize) -> Result<(), error::ApiError> {
        if answers <= self.max_answers {
            return Ok(());
        }
        let message = format!(
            "expected at most {} answers (prompts x `n`, or x `best_of`), got {answers}",
            self.max_answers
        );
        Err(error::ApiError::invalid(Some(param), message))
    }

    /// An empty sum of usages.
    fn usage_sum(&self, choices_per_prompt: usize) -> reply::UsageSum {
        reply::UsageSum::new(choices_per_prompt, self.hide_cached_tokens)
    }
}

/// Identifies the version of the server and the model that it runs.
fn fingerprint(engine: &Engine) -> String {
    let info = engine.model_info();
    let mut hasher = DefaultHasher::new();
    (&info.id, info.vocab_size, info.max_positions, &info.eos_token_ids).hash(&mut hasher);
    format!("stolon-{}-{:08x}", env!("CARGO_PKG_VERSION"), hasher.finish() as u32)
}

/// Seconds since 1970-01-01 UTC.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests;
