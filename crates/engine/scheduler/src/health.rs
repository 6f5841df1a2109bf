//! Whether a running engine can answer requests now.

use serde::Serialize;

/// What an engine is doing, apart from individual requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EngineHealth {
    /// It accepts requests.
    Running,
    /// A part of it failed. It starts again in a moment, with an empty cache.
    Restarting,
    /// A step has taken longer than the configured `step_timeout`. Requests are refused until the
    /// backend returns, which may never happen.
    Hung,
    /// It completes the requests that it has and refuses new ones, because it is about to stop.
    Draining,
    /// It was shut down, its runtime has ended, or its backend was lost. It does not start again.
    Stopped,
}

impl EngineHealth {
    /// Whether new requests are accepted.
    pub fn is_ready(self) -> bool {
        self == EngineHealth::Running
    }
}

impl std::fmt::Display for EngineHealth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            EngineHealth::Running => "running",
            EngineHealth::Restarting => "restarting",
            EngineHealth::Hung => "hung",
            EngineHealth::Draining => "draining",
            EngineHealth::Stopped => "stopped",
        })
    }
}
