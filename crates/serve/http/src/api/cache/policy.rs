//! The policies of eviction and admission.

use serde::{Deserialize, Serialize};

use crate::api::fields::UnknownFields;
use schemars::JsonSchema;

/// `GET /v1/cache/policy`, and the reply to `POST`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Policy {
    /// Order in which cached blocks are evicted; `null` for a custom one.
    pub eviction: Option<String>,
    /// Order in which queued requests are admitted.
    pub admission: String,
}

/// The body of `POST /v1/cache/policy`. A policy that is left out does not change.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct PolicyRequest {
    /// Order in which cached blocks are evicted, such as `lru`.
    pub eviction: Option<String>,
    /// Order in which queued requests are admitted, such as `fcfs`.
    pub admission: Option<String>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
