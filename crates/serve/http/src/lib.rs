//! The HTTP API of a Stolon engine: OpenAI's, Anthropic's, Ollama's, and routes for operators.
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
//! * `otel`: traces.
//!
//! # Layers
//!
//! The folders are layers, lowest first: `api` (the types of requests and replies), `wire` (from
//! bytes to a request, from an answer to bytes), `guard` (who may call), `handlers` (what is done
//! for a request) and `routes` (the table of paths). A file imports from its own layer and from
//! those below it (`tests/it/boundaries.rs` of the facade), and only [`router`] knows all of them.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::response::Response;
use axum::{Router, middleware};
use stolon::{Engine, ModelSet};
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::trace::{DefaultOnResponse, OnResponse, TraceLayer};
use tracing::{Level, Span};

use crate::handlers::admin;
use crate::handlers::app::App;
use crate::handlers::responses::ResponseStore;
use crate::handlers::several::Front;
use crate::routes::other_paths::{self, OtherPaths};
use crate::wire::{advice, error, request_id};

pub use guard::access::{Access, Tenants};
pub use guard::cors::Origins;
pub use guard::hosts::AllowedHost;
#[cfg(feature = "image-urls")]
pub use guard::image_hosts::{ImageHost, ImageHosts};
pub use guard::keys::{
    ApiKey, ApiKeys, KeyFileError, KeyLimits, Secret, check as check_key, read as read_keys,
};
pub use handlers::app::RouterOptions;
pub use handlers::metrics::{CounterSource, CounterValue, EngineMetrics};
pub use handlers::parsing::{
    parse_chat, parse_completion, parse_embeddings, parse_infill, parse_messages,
    parse_ollama_chat, parse_responses,
};
pub use handlers::priority::PriorityOrder;
pub use handlers::warm_up::WarmUp;
pub use stolon::FormatChoice;
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

/// The HTTP API of an engine: `/v1/completions`, `/v1/chat/completions`, `/v1/responses`,
/// `/v1/embeddings` and `/v1/models` as in OpenAI's API, `/v1/messages` as in Anthropic's, `/api`
/// as in Ollama's, `/completion` and `/infill` as in llama.cpp, `/tokenize`, `/detokenize` and
/// `/v1/load_lora_adapter` as in vLLM, `/v1/sessions`, and `/health`, `/ready`, `/version`,
/// `/metrics`, `/v1/cache` and `/admin` for operators. The API is described at `/openapi.json`, and
/// for people at `/docs`.
///
/// Without an administrator's key, `/v1/cache`, `/admin` and `/metrics` are refused unless the
/// connection comes from this machine, which is known from
/// [`ConnectInfo`](axum::extract::ConnectInfo): serve the router with
/// [`Router::into_make_service_with_connect_info`] and a [`SocketAddr`](std::net::SocketAddr).
pub fn router(engine: Engine, options: RouterOptions) -> Router {
    let app = Arc::new(App::new(engine, options.clone()));
    let routes = routes::router(&app, &options);
    layered(routes, app, &options)
}

/// The HTTP API of several models: the routes of [`router`], each passed to the model that its
/// request names (`model` in the body, or `?model=NAME` in the query), which is loaded if it is not
/// loaded. A request that names no model is for the first one.
///
/// `/v1/models`, `/health`, `/metrics`, `/api/tags` and `/api/ps` are about all models, and
/// `/models/load` and `/models/unload` are for the operator. Routes that only look at a model for
/// the operator, such as `GET /v1/cache`, do not load it. The options apply to each model, except
/// that [`served_names`](RouterOptions::served_names), [`alias`](RouterOptions::alias) and
/// [`counters`](RouterOptions::counters) have no effect.
pub fn models_router(models: ModelSet, options: RouterOptions) -> Router {
    several(Front::new(models, options.clone(), of_model), &options)
}

fn several(front: Front, options: &RouterOptions) -> Router {
    let front = Arc::new(front);
    let routes = routes::several::router(&front, options);
    layered(routes, front, options)
}

/// The router of one of several models, behind the checks and the middleware of all.
fn of_model(engine: Engine, options: RouterOptions, responses: ResponseStore) -> Router {
    let options = RouterOptions { alias: None, counters: Vec::new(), ..options };
    let app = App { responses, ..App::new(engine, options.clone()) };
    routes::several::of_model(&options).with_state(Arc::new(app))
}

/// Adds the middleware of all requests to the routes, and their other paths.
fn layered<S>(routes: Router<S>, state: S, options: &RouterOptions) -> Router
where
    S: Clone + Send + Sync + 'static,
{
    let root = options.root_path.clone();
    let known = routes
        .clone()
        .fallback(other_paths::not_found)
        .method_not_allowed_fallback(admin::method_not_allowed);
    let (others, elsewhere) = (known.with_state(state.clone()), OtherPaths::of(options));
    let router = root
        .add_redirect(routes)
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
        .layer(middleware::from_fn_with_state(options.unknown_parameters, advice::middleware))
        .layer(middleware::from_fn(request_id::middleware))
        .with_state(state);
    #[cfg(feature = "gzip")]
    let router = router.layer(wire::gzip::layer());
    root.mount(router)
}

#[cfg(test)]
mod tests;
