//! `GET /v1/models` and `GET /v1/models/{id}`: the members of OpenAI's and of Anthropic's form in
//! one object, so that the clients of both find the members that they read.

use axum::http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::fields::UnknownFields;

/// The names under which the model is served, and its LoRA adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The names given with `--served-model-name` or, if there are none, the model's id, and then
    /// the names of the adapters.
    pub data: Vec<Model>,
    /// Always false: the list is complete. As Anthropic's.
    pub has_more: bool,
    /// The id of the first model.
    pub first_id: Option<String>,
    /// The id of the last model.
    pub last_id: Option<String>,
    /// Only for the Codex CLI, which asks with `?client_version=`: its own form of the list, which is
    /// empty. Each entry would need instructions for the model, in place of those of Codex.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
}

impl ModelList {
    /// The reply with these models to a request for the list.
    pub(crate) fn new(data: Vec<Model>, request: &Uri) -> Self {
        let id = |model: Option<&Model>| model.map(|model| model.id.clone());
        let (first_id, last_id) = (id(data.first()), id(data.last()));
        let mut query = request.query().unwrap_or_default().split('&');
        let is_codex = query.any(|pair| pair.starts_with("client_version="));
        let models = is_codex.then(Vec::new);
        Self { object: "list", data, has_more: false, first_id, last_id, models }
    }
}

/// The model under one of its names, or an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Model {
    /// The name to use as `model` in requests.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// Always `model`: Anthropic's name of `object`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The same as `id`.
    pub display_name: String,
    /// When the server started: seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The same time as text (RFC 3339).
    pub created_at: String,
    /// Always `stolon`.
    pub owned_by: &'static str,
    /// The model's id; of an adapter, the directory or file that it was loaded from.
    pub root: String,
    /// Of an adapter, the name of the model that it changes; otherwise `null`.
    pub parent: Option<String>,
    /// Context length in tokens: prompt and generated tokens together. Left out for a model that was
    /// not loaded yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// The kinds of content that prompts may have: `text`, and `image` if the model takes images.
    pub input_modalities: &'static [&'static str],
    /// Number of values of an embedding; left out if the model is not meant for embeddings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_size: Option<usize>,
    /// Whether the model is loaded; left out by a server that has one model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<LoadStatus>,
}

/// Whether a model is loaded, in llama.cpp's form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LoadStatus {
    /// `sleeping` (the next request loads it), `loading`, `loaded` or `unloading`.
    pub value: &'static str,
    /// Seconds since its load began; left out unless it is loading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loading_seconds: Option<u64>,
    /// The memory that it counts for in `--models-memory`, in bytes; left out without that limit, and
    /// for a model that is sleeping or waits until others have left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Whether its last load has failed; left out if not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// The body of `POST /models/load` and `POST /models/unload`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `model`")]
pub struct NamedModel {
    /// The name of the model.
    pub model: String,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply of `POST /models/load` and `POST /models/unload`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Succeeded {
    /// Always true.
    pub success: bool,
}
