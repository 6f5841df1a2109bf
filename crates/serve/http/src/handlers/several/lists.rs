//! What a server of several models says about all of them, and the routes that load and unload them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::Response;
use stolon::{EngineHealth, ModelInfo, ModelSetError, ModelState, ModelStatus};

use super::Front;
use crate::api::admin::Health;
use crate::api::models::{LoadStatus, Model, ModelList, NamedModel, Succeeded};
use crate::api::ollama::{ModelEntry, Running, RunningEntry, Tags};
use crate::handlers::admin::{health_of, health_reply, rfc3339};
use crate::handlers::metrics::{EngineMetrics, merged, reply};
use crate::handlers::ollama::{NEVER, details, digest, entry};
use crate::wire::body::parse;
use crate::wire::error::ApiError;
use crate::wire::parts::PathId;
use crate::wire::receive::Received;

/// Maximum number of JSON values in the name of a model to load or unload.
const VALUES_MAX: usize = 64;

/// `GET /v1/models`.
pub(crate) async fn list(State(front): State<Arc<Front>>, uri: Uri) -> Json<ModelList> {
    Json(ModelList::new(front.entries(), &uri))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn one(
    State(front): State<Arc<Front>>,
    PathId(id): PathId<String>,
) -> Result<Json<Model>, ApiError> {
    let found = front.entries().into_iter().find(|model| model.id == id);
    let known = || front.models.names().map(str::to_owned).collect();
    found.map(Json).ok_or_else(|| ModelSetError::Unknown { known: known(), name: id }.into())
}

/// `GET /health` and `GET /ready`: whether requests are answered. A model that is not loaded is
/// loaded for its request, so only engines that fail make a server unhealthy.
pub(crate) async fn health(State(front): State<Arc<Front>>) -> (StatusCode, Json<Health>) {
    let mut health = Health::ok();
    for name in front.models.names() {
        if let Ok(Some(lease)) = front.models.peek(name) {
            let engine = lease.health();
            if engine != EngineHealth::Running {
                health = health_of(engine);
                health.reason = health.reason.map(|reason| format!("the model `{name}`: {reason}"));
            }
        }
    }
    let models = front.models.list().into_iter();
    health.models = models.map(|model| (model.name.clone(), status(&model))).collect();
    health_reply(health)
}

/// `GET /metrics`: those of all loaded models.
pub(crate) async fn metrics(
    State(front): State<Arc<Front>>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let mut texts = Vec::new();
    for name in front.models.names() {
        if let Some(lease) = front.models.peek(name)? {
            let metrics = EngineMetrics::new(lease.clone(), name.to_owned());
            texts.push(metrics.open_metrics_text().map_err(|_| ApiError::internal())?);
        }
    }
    Ok(reply(&headers, merged(&texts)))
}

/// `GET /api/tags`.
pub(crate) async fn tags(State(front): State<Arc<Front>>) -> Json<Tags> {
    Json(Tags { models: front.models.list().iter().map(|model| front.ollama(model)).collect() })
}

/// `GET /api/ps`: the models in memory.
pub(crate) async fn ps(State(front): State<Arc<Front>>) -> Json<Running> {
    let models = front.models.list().into_iter();
    let loaded = models.filter(|model| model.state == ModelState::Loaded);
    let running = |model: ModelStatus| RunningEntry {
        model: front.ollama(&model),
        expires_at: model.unloads_in.map_or_else(|| NEVER.to_owned(), after),
        size_vram: 0,
        context_length: model.info.map_or(0, |info| info.max_positions),
    };
    Json(Running { models: loaded.map(running).collect() })
}

/// `POST /models/load`: replies when the model is loaded.
pub(crate) async fn load(
    State(front): State<Arc<Front>>,
    body: Received,
) -> Result<Json<Succeeded>, ApiError> {
    let name = named(body)?;
    front.models.get(&name).await.map_err(|error| match error {
        // The operator may know the whole reason.
        ModelSetError::Load { .. } => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
                .code("model_load_failed")
        }
        error => error.into(),
    })?;
    Ok(Json(Succeeded { success: true }))
}

/// `POST /models/unload`: replies when the model has left the memory, after its last request.
pub(crate) async fn unload(
    State(front): State<Arc<Front>>,
    body: Received,
) -> Result<Json<Succeeded>, ApiError> {
    front.models.unload(&named(body)?).await?;
    Ok(Json(Succeeded { success: true }))
}

fn named(body: Received) -> Result<String, ApiError> {
    let Received { bytes, ignored, .. } = body;
    Ok(parse::<NamedModel>(&bytes.join(), VALUES_MAX, &ignored)?.model)
}

/// The time after a duration that begins now, as a string (RFC 3339).
fn after(duration: Duration) -> String {
    let at = SystemTime::now().checked_add(duration);
    let at = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    at.map_or_else(|| NEVER.to_owned(), |at| rfc3339(at.as_secs()))
}

fn status(model: &ModelStatus) -> LoadStatus {
    let value = match model.state {
        ModelState::Sleeping => "sleeping",
        ModelState::Loading => "loading",
        ModelState::Loaded => "loaded",
        ModelState::Unloading => "unloading",
    };
    let loading_seconds = model.loading_for.map(|time| time.as_secs());
    let memory_bytes = Some(model.memory).filter(|bytes| *bytes > 0);
    LoadStatus { value, loading_seconds, memory_bytes, failed: model.error.is_some() }
}

impl Front {
    /// All models, each followed by its adapters.
    fn entries(&self) -> Vec<Model> {
        let entry = |id: &str, parent: Option<&str>, model: &ModelStatus| {
            let info = model.info.as_deref();
            Model {
                id: id.to_owned(),
                object: "model",
                kind: "model",
                display_name: id.to_owned(),
                created: self.started,
                created_at: rfc3339(self.started),
                owned_by: "stolon",
                root: info.map_or_else(|| model.name.clone(), |info| info.id.clone()),
                parent: parent.map(str::to_owned),
                max_model_len: info.map(|info| info.max_positions),
                input_modalities: match info.is_some_and(|info| info.takes_images) {
                    true => &["text", "image"],
                    false => &["text"],
                },
                embedding_size: info.and_then(embedding_size),
                status: Some(status(model)),
            }
        };
        let mut data = Vec::new();
        for model in self.models.list() {
            data.push(entry(&model.name, None, &model));
            let adapters = model.adapters.iter();
            data.extend(adapters.map(|adapter| entry(adapter, Some(&model.name), &model)));
        }
        data
    }

    fn ollama(&self, model: &ModelStatus) -> ModelEntry {
        entry(&model.name, digest(&model.name), self.started, details(""))
    }
}

/// Number of values of an embedding, if the model makes any.
fn embedding_size(info: &ModelInfo) -> Option<usize> {
    info.embedding.as_ref().map(|embedding| embedding.size)
}
