//! `GET /v1/models` and `GET /v1/models/{id}`.

use schemars::JsonSchema;
use serde::Serialize;

/// The names under which the model is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The model's id first, then the names given with `--served-name`.
    pub data: Vec<Model>,
}

/// The model under one of its names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Model {
    /// The name to use as `model` in requests.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// When the server started: seconds since 1970-01-01 UTC.
    pub created: u64,
    /// Always `stolon`.
    pub owned_by: &'static str,
    /// Context length in tokens: prompt and generated tokens together.
    pub max_model_len: usize,
    /// Number of values of an embedding; left out if the model is not meant for embeddings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_size: Option<usize>,
}
