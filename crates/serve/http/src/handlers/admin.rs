//! Handlers of the small endpoints: the model list, health, statistics and the audit, and the
//! reply for a method that a path does not have.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, Uri};
use futures::FutureExt;
use stolon::{AdapterInfo, EngineHealth};

use crate::api::admin::{Audit, Health, Stats, Status, Version};
use crate::api::models::{Model, ModelList, NamedModel, Succeeded};
use crate::handlers::app::App;
use crate::wire::advice::Ignored;
use crate::wire::error::ApiError;
use crate::wire::parts::PathId;
use crate::wire::receive::{Received, linger};

/// `GET /v1/models`.
pub(crate) async fn models(State(app): State<Arc<App>>, uri: Uri) -> Json<ModelList> {
    let mut data: Vec<Model> = app.names().map(|name| app.model_entry(name)).collect();
    let adapters = app.engine.adapters();
    data.extend(adapters.iter().map(|adapter| app.adapter_entry(adapter)));
    Json(ModelList::new(data, &uri))
}

/// `GET /v1/models/{id}`; an id may contain slashes.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    PathId(id): PathId<String>,
) -> Result<Json<Model>, ApiError> {
    let adapter = app.listed(&id)?.and_then(|name| app.engine.adapter(name));
    Ok(Json(match adapter {
        Some(adapter) => app.adapter_entry(&adapter),
        None => app.model_entry(&id),
    }))
}

/// `GET /health` and `GET /ready`: whether the engine accepts requests. The engine computes nothing
/// for it.
pub(crate) async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Health>) {
    health_reply(health_of(app.engine.health()))
}

/// The health of a server whose engine has this health.
pub(super) fn health_of(engine: EngineHealth) -> Health {
    let status = match engine {
        EngineHealth::Running => return Health::ok(),
        EngineHealth::Hung => Status::Hung,
        EngineHealth::Restarting => Status::Restarting,
        _ => Status::Stopping,
    };
    Health::not_ready(status, format!("the engine is {engine}"))
}

pub(super) fn health_reply(health: Health) -> (StatusCode, Json<Health>) {
    let status = match health.status {
        Status::Ok => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(health))
}

/// `POST /models/load`: the one model of the server is loaded.
pub(crate) async fn load_model(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<Succeeded>, ApiError> {
    let request: NamedModel = app.parser.parse(body).await?;
    app.listed(&request.model)?;
    Ok(Json(Succeeded { success: true }))
}

/// `POST /models/unload`: the one model of the server stays loaded.
pub(crate) async fn unload_model(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<Succeeded>, ApiError> {
    let request: NamedModel = app.parser.parse(body).await?;
    app.listed(&request.model)?;
    let message = "this server has one model, which stays loaded: only a server of several models \
                   (--model NAME=SOURCE) unloads them";
    Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message))
}

/// `GET /version`.
pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// `GET /admin/stats`: the model and the engine's counters.
pub(crate) async fn stats(State(app): State<Arc<App>>) -> Json<Stats> {
    let stats = app.engine.stats();
    Json(Stats {
        model: app.engine.model_info().clone(),
        stats,
        token_hit_rate: stats.token_hit_rate(),
        request_hit_rate: stats.request_hit_rate(),
    })
}

/// `GET /admin/audit`: verifies the engine's block accounting.
pub(crate) async fn audit(State(app): State<Arc<App>>) -> Result<Json<Audit>, ApiError> {
    let engine = app.engine.clone();
    let audit = app.audits.run(|| async move { Ok(engine.audit().await?) }.boxed()).await?;
    Ok(Json(Audit { ok: true, audit }))
}

/// A path that exists, but not with this method.
pub(crate) async fn method_not_allowed(method: Method, uri: Uri, request: Request) -> ApiError {
    linger(request.into_body());
    let message = format!("{method} is not allowed on {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// A time in seconds since 1970-01-01 UTC as a string, such as `2026-01-31T12:00:00Z`.
pub(crate) fn rfc3339(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or_default();
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

impl App {
    /// The names that are listed: those given to the router or, if there are none, the model's id.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.served_names.iter().map(String::as_str)
    }

    /// The name of the model in replies to requests that name none.
    pub(crate) fn model_name(&self) -> &str {
        self.names().next().unwrap_or_default()
    }

    /// Whether this is a name of the model.
    pub(crate) fn serves(&self, name: &str) -> bool {
        self.names().any(|served| served == name) || self.alias.as_deref() == Some(name)
    }

    /// Refuses a model that is not served here.
    pub(crate) fn check_model(&self, name: &str, ignored: &Ignored) -> Result<(), ApiError> {
        self.adapter_of(name, ignored).map(drop)
    }

    fn model_entry(&self, name: &str) -> Model {
        Model {
            id: name.to_owned(),
            object: "model",
            kind: "model",
            display_name: name.to_owned(),
            created: self.started,
            created_at: rfc3339(self.started),
            owned_by: "stolon",
            root: self.engine.model_info().id.clone(),
            parent: None,
            max_model_len: Some(self.engine.model_info().max_positions),
            input_modalities: match self.engine.model_info().takes_images {
                true => &["text", "image"],
                false => &["text"],
            },
            embedding_size: self.engine.embedding_size(None).ok(),
            status: None,
        }
    }

    fn adapter_entry(&self, adapter: &AdapterInfo) -> Model {
        Model {
            root: adapter.path.display().to_string(),
            parent: Some(self.model_name().to_owned()),
            ..self.model_entry(&adapter.name)
        }
    }
}
