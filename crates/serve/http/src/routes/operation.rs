//! Routes for running a server: health, metrics, and the description of the API.

use serde_json::{Map, Value};

use super::Role::{Everybody, Operator};
use super::{ErrorForm, Group, Reply, get};
use crate::api::admin::{Audit, Health, Stats, Version};
use crate::handlers::app::RouterOptions;
use crate::handlers::{admin, metrics};
use crate::routes::openapi;

/// The rows.
pub(super) fn group(options: &RouterOptions) -> Group {
    let reader = if options.public_metrics { Everybody } else { Operator };
    let routes = vec![
        get("/health", Everybody, admin::health)
            .described("health", "Whether requests are answered; nothing is generated")
            .replies::<Health>()
            .fails(&[503])
            .fails_as(ErrorForm::Health),
        get("/ready", Everybody, admin::health)
            .described("ready", "As /health")
            .replies::<Health>()
            .fails(&[503])
            .fails_as(ErrorForm::Health),
        get("/version", Everybody, admin::version)
            .described("version", "The server's version")
            .replies::<Version>(),
        get("/metrics", reader, metrics::metrics)
            .described("metrics", "Counters and distributions for Prometheus")
            .replies_as(Reply::Text("application/openmetrics-text")),
        get("/admin/stats", Operator, admin::stats)
            .described("stats", "The model and the engine's counters")
            .replies::<Stats>(),
        get("/admin/audit", Operator, admin::audit)
            .described("audit", "As /v1/cache/audit")
            .replies::<Audit>(),
        get("/openapi.json", Everybody, openapi::json)
            .described("description", "This description")
            .replies::<Map<String, Value>>(),
        get("/docs", Everybody, openapi::docs),
        get("/docs/search.js", Everybody, openapi::search),
    ];
    Group { name: "Operation", description: "Health, metrics and this description.", routes }
}
