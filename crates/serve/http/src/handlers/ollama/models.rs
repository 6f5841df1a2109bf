//! The handlers that describe the served model in Ollama's form, and those of routes that manage
//! models in Ollama.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use serde_json::{Map, json};
use stolon::{ChatOptions, FormatChoice, ReasoningFormat};

use super::LATEST;
use crate::api::ollama::{
    Details, ModelEntry, OllamaModel, Running, RunningEntry, Shown, Status, Tags, Version,
};
use crate::handlers::admin::rfc3339;
use crate::handlers::app::App;
use crate::handlers::context::{Incoming, RequestContext};
use crate::wire::error::ApiError;
use crate::wire::receive::linger;

/// The version of Ollama whose API this is. Clients refuse to talk to much older ones.
const VERSION: &str = "0.13.0";

/// The architecture in names of metadata. The engine knows no family of models.
const FAMILY: &str = "stolon";

/// When a model leaves the memory: never.
pub(crate) const NEVER: &str = "2318-04-11T00:00:00Z";

/// A comment at the end of the template of a model that fills gaps. Continue looks for this name of
/// a variable of Ollama's templates before it sends a `suffix`.
const SUFFIX: &str = "{# .Suffix #}";

/// What to do instead of the routes that manage models.
const HINT: &str = "this server has one model, which is chosen when it starts (`stolon serve \
                    --model NAME` downloads it from the hub); GET /api/tags names it";

/// `GET /api/version`.
pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: VERSION })
}

/// `GET /api/tags`.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Json<Tags> {
    Json(Tags { models: app.entries() })
}

/// `GET /api/ps`.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Json<Running> {
    let context_length = app.engine.model_info().max_positions;
    let running =
        |model| RunningEntry { model, expires_at: NEVER.to_owned(), size_vram: 0, context_length };
    Json(Running { models: app.entries().into_iter().take(1).map(running).collect() })
}

/// `POST /api/show`.
pub(crate) async fn show(
    Incoming { body: request, context }: Incoming<OllamaModel>,
) -> Result<Json<Shown>, ApiError> {
    let app = context.app;
    let adapter = app.listed(&app.listed_name(request.model))?;
    let model = app.engine.model_info();
    let mut template = app.template().unwrap_or_default();
    let capabilities = app.capabilities(&template);
    if app.engine.supports_infill() {
        template.push_str(SUFFIX);
    }
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), json!(FAMILY));
    info.insert("general.basename".to_owned(), json!(model.id));
    info.insert(format!("{FAMILY}.context_length"), json!(model.max_positions));
    if let Ok(size) = app.engine.embedding_size(None) {
        info.insert(format!("{FAMILY}.embedding_length"), json!(size));
    }
    Ok(Json(Shown {
        modelfile: format!("# served by Stolon\nFROM {}\n", model.id),
        // Continue takes the length of the context from here.
        parameters: format!("num_ctx {}", model.max_positions),
        capabilities,
        template,
        details: app.details(adapter.is_some()),
        model_info: info,
        modified_at: rfc3339(app.started),
    }))
}

/// `POST /api/pull`: nothing is to do for a model that is served, and others cannot be loaded.
pub(crate) async fn pull(
    Incoming { body: request, context }: Incoming<OllamaModel>,
) -> Result<Json<Status>, ApiError> {
    let RequestContext { app, .. } = context;
    match app.listed(&app.listed_name(request.model)) {
        Ok(_) => Ok(Json(Status { status: "success" })),
        Err(error) => Err(error.with_hint(&format!(": {HINT}"))),
    }
}

/// The routes that make, copy, send and delete models.
pub(crate) async fn unavailable(uri: Uri, request: Request) -> ApiError {
    linger(request.into_body());
    let message = format!("{} is not available: {HINT}", uri.path());
    ApiError::new(StatusCode::NOT_IMPLEMENTED, message)
}

impl App {
    /// The names under which the model is served, then its adapters.
    fn entries(&self) -> Vec<ModelEntry> {
        let capabilities = self.capabilities(&self.template().unwrap_or_default());
        let entry = |name: &str, adapter: Option<&str>| {
            let digest = digest((&self.fingerprint, adapter, &capabilities));
            entry(name, digest, self.started, self.details(adapter.is_some()))
        };
        let names = self.served_names.iter().map(|name| entry(name, None));
        let adapters = self.engine.adapters();
        names.chain(adapters.iter().map(|it| entry(&it.name, Some(&it.name)))).collect()
    }

    fn details(&self, is_adapter: bool) -> Details {
        details(if is_adapter { self.model_name() } else { "" })
    }

    /// The chat template.
    fn template(&self) -> Option<String> {
        let template = self.engine.chat_template().ok()?;
        Some(template.source(&ChatOptions::default()).ok()?.to_owned())
    }

    /// What the model can do.
    fn capabilities(&self, template: &str) -> Vec<&'static str> {
        let model = self.engine.model_info();
        let chats = model.generates && model.has_chat_template;
        let thinks = || self.reasoning.or_else(|| ReasoningFormat::of_template(template)).is_some();
        let all = [
            ("completion", model.generates),
            // Tools are described to models whose template does not know them.
            ("tools", chats && self.tool_calls != FormatChoice::Off),
            ("vision", model.takes_images),
            ("thinking", chats && thinks()),
            ("insert", self.engine.supports_infill()),
            ("embedding", self.engine.embedding_size(None).is_ok()),
        ];
        all.into_iter().filter(|(_, can)| *can).map(|(name, _)| name).collect()
    }
}

/// A model that is listed. `started` is the time of its last change in seconds since 1970.
pub(crate) fn entry(name: &str, digest: String, started: u64, details: Details) -> ModelEntry {
    // Clients expect a tag.
    let tag = if name.contains(':') { "" } else { LATEST };
    let name = format!("{name}{tag}");
    let modified_at = rfc3339(started);
    ModelEntry { digest, model: name.clone(), name, modified_at, size: 0, details }
}

/// The description of a model. `parent` is the model that an adapter changes; otherwise empty.
pub(crate) fn details(parent: &str) -> Details {
    let parent_model = parent.to_owned();
    Details { parent_model, family: FAMILY, families: [FAMILY], ..Details::default() }
}

/// 64 hexadecimal digits that identify a value.
pub(crate) fn digest(value: impl Hash) -> String {
    let part = |number: u8| {
        let mut hasher = DefaultHasher::new();
        (&value, number).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    };
    (0..4).map(part).collect()
}
