//! LoRA adapters: how a request chooses one by the name of a model, and the operator's routes that
//! load, unload and list them. Their bodies, statuses and messages are those of vLLM.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use stolon::AdapterError;
use stolon::backend::AdapterLoadError;

use crate::api::adapters::{Adapter, AdapterList, LoadAdapter, UnloadAdapter};
use crate::handlers::app::App;
use crate::wire::advice::Ignored;
use crate::wire::error::ApiError;
use crate::wire::receive::Received;

/// Maximum length of a name that is not listed and stands for the model, in bytes.
const MAX_NAME: usize = 256;

/// `POST /v1/load_lora_adapter`.
pub(crate) async fn load(State(app): State<Arc<App>>, body: Received) -> Result<String, ApiError> {
    let LoadAdapter { lora_name: name, lora_path: path, load_inplace, .. } =
        app.parser.parse(body).await?;
    if app.serves(&name) {
        let message = format!("`lora_name`: `{name}` is a name of the model");
        return Err(ApiError::invalid(Some("lora_name"), message));
    }
    let loaded = match load_inplace.unwrap_or(false) {
        true => app.engine.replace_adapter(&name, &path).await,
        false => app.engine.load_adapter(&name, &path).await,
    };
    match loaded {
        Ok(_) => {
            app.had_adapters.store(true, Relaxed);
            Ok(format!("Success: LoRA adapter '{name}' added successfully."))
        }
        Err(AdapterError::Exists { .. }) => {
            let message = format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the \
                 adapter in place, set 'load_inplace' to True."
            );
            Err(ApiError::invalid(Some("lora_name"), message))
        }
        Err(error) => Err(refused(&error)),
    }
}

/// `POST /v1/unload_lora_adapter`.
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<String, ApiError> {
    let UnloadAdapter { lora_name: name, .. } = app.parser.parse(body).await?;
    match app.engine.unload_adapter(&name) {
        Ok(()) => Ok(format!("Success: LoRA adapter '{name}' removed successfully.")),
        Err(AdapterError::Unknown { .. }) => {
            let message = format!("The lora adapter '{name}' cannot be found.");
            Err(ApiError::new(StatusCode::NOT_FOUND, message))
        }
        Err(error) => Err(refused(&error)),
    }
}

/// `GET /v1/lora_adapters`.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<AdapterList> {
    let data = app.engine.adapters().into_iter().map(Adapter::from).collect();
    Json(AdapterList { object: "list", data })
}

/// The reply to an operator whose adapter cannot be loaded.
fn refused(error: &AdapterError) -> ApiError {
    let message = error.to_string();
    match error {
        AdapterError::Load { reason: AdapterLoadError::NotFound(_), .. } => {
            ApiError::new(StatusCode::NOT_FOUND, message)
        }
        AdapterError::Unsupported => ApiError::new(StatusCode::NOT_IMPLEMENTED, message),
        AdapterError::InvalidName { .. } => ApiError::invalid(Some("lora_name"), message),
        AdapterError::OutOfMemory { .. } => ApiError::unavailable(message, Duration::from_secs(1)),
        _ => ApiError::invalid(Some("lora_path"), message),
    }
}

/// Whether a string can be the name of a model. It is repeated in each piece of a reply and in
/// traces.
fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME && !text.chars().any(char::is_control)
}

impl ApiError {
    /// The reply to a client whose request cannot use its adapter.
    pub(crate) fn from_adapter(error: &AdapterError, message: String) -> Self {
        match error {
            AdapterError::Unknown { .. } => Self::model_not_found(message),
            AdapterError::OutOfMemory { .. } => Self::unavailable(message, Duration::from_secs(1)),
            // The operator has to act. The message has paths of the server.
            _ => {
                tracing::warn!(%error, "a request cannot use its adapter");
                let message = "the adapter's files cannot be read as they were loaded";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            }
        }
    }
}

impl App {
    /// The adapter that is listed under this name of a model; `None` for the model itself.
    ///
    /// # Errors
    /// Status 404 if no model has this name.
    pub(crate) fn listed(&self, model: &str) -> Result<Option<String>, ApiError> {
        if self.serves(model) {
            return Ok(None);
        }
        match self.engine.adapter(model) {
            Some(info) => Ok(Some(info.name)),
            None => Err(ApiError::unknown_model(model, self.model_name())),
        }
    }

    /// The adapter that a request chooses by this name of a model; `None` for the model itself.
    /// Many clients always send a name of their own. So if there is only one model, every name
    /// stands for it, and the reply names the model that has answered.
    ///
    /// # Errors
    /// Status 404 if no model of this name is served here, and the name could mean another model.
    pub(crate) fn adapter_of(
        &self,
        model: &str,
        ignored: &Ignored,
    ) -> Result<Option<String>, ApiError> {
        match self.listed(model) {
            Err(_) if is_name(model) && self.takes_any_name() => {
                ignored.answered_by(self.model_name());
                Ok(None)
            }
            Err(error) => Err(error.with_hint(
                ": only --served-model-name '*' lets every name stand \
                                               for a model with several names or with adapters",
            )),
            listed => listed,
        }
    }

    /// Whether a name that is not listed stands for the model.
    fn takes_any_name(&self) -> bool {
        let has_adapters = || self.had_adapters.load(Relaxed) || !self.engine.adapters().is_empty();
        self.any_name || (self.served_names.len() == 1 && !has_adapters())
    }

    /// The name of the model in the reply to a request with this `model`, and the adapter that it
    /// chooses.
    ///
    /// # Errors
    /// As [`App::adapter_of`].
    pub(crate) fn chosen(
        &self,
        model: Option<String>,
        ignored: &Ignored,
    ) -> Result<(String, Option<String>), ApiError> {
        match model {
            Some(name) => {
                let adapter = self.adapter_of(&name, ignored)?;
                Ok((name, adapter))
            }
            None => Ok((self.model_name().to_owned(), None)),
        }
    }
}
