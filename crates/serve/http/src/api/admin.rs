//! Health and version, and the operator's statistics and audit.

use std::collections::BTreeMap;

use crate::api::models::LoadStatus;
use schemars::JsonSchema;
use serde::Serialize;
use stolon::{AuditReport, EngineStats, ModelInfo};

/// `GET /health` and `GET /ready`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Health {
    /// What the server is doing. Any other status than `ok` comes with HTTP status 503.
    pub status: Status,
    /// Why the server cannot answer requests; left out if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether each model is loaded, by its name; left out by a server that has one model.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, LoadStatus>,
}

impl Health {
    /// Requests are answered.
    pub(crate) fn ok() -> Self {
        Self { status: Status::Ok, reason: None, models: BTreeMap::new() }
    }

    /// Requests are not answered.
    pub(crate) fn not_ready(status: Status, reason: String) -> Self {
        Self { status, reason: Some(reason), models: BTreeMap::new() }
    }
}

/// What the server is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It answers requests.
    Ok,
    /// It loads the model.
    Loading,
    /// A part of the engine failed, and the engine starts again.
    Restarting,
    /// The engine does not answer, because its backend hangs.
    Hung,
    /// It finishes running requests and accepts no new ones.
    Stopping,
}

/// `GET /version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Version {
    /// Version of the server, such as `0.1.0`.
    pub version: &'static str,
}

/// `GET /admin/stats`: the model and the engine's counters.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Stats {
    /// The model and the size of its KV cache.
    #[schemars(schema_with = "super::schemas::object")]
    pub model: ModelInfo,
    /// Counters since the engine started, and gauges of this moment.
    #[schemars(schema_with = "super::schemas::counters::<EngineStats>")]
    pub stats: EngineStats,
    /// Fraction of prompt tokens that were read from the prefix cache, 0 to 1.
    pub token_hit_rate: f64,
    /// Fraction of requests that found a part of their prompt cached, 0 to 1.
    pub request_hit_rate: f64,
}

/// `GET /admin/audit`: the engine's accounting was verified. A failed check is an error reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Audit {
    /// Always true.
    pub ok: bool,
    /// The numbers that were verified.
    #[schemars(schema_with = "super::schemas::counters::<AuditReport>")]
    pub audit: AuditReport,
}
