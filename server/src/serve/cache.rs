//! Handlers of `/admin/tree` and `/admin/pins`: the prefix cache for operators.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use stolon::{PinId, Request, TreeDump};

use super::App;
use super::access::Tenant;
use super::error::ApiError;
use super::receive::Received;
use crate::api::admin::{
    PinCreated, PinDeleted, PinInfo, PinList, PinPrompt, PinRequest, Tree, TreeFormat, TreeNode,
    TreeQuery,
};

/// `GET /admin/tree`: the prefix tree and its statistics, or with `?format=dot` a graph of it.
pub(super) async fn tree(
    State(app): State<Arc<App>>,
    query: Result<Query<TreeQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::invalid(None, error.body_text()))?;
    let engine = app.engine.clone();
    let dump = app.dumps.run(|| async move { Ok(Arc::new(engine.dump()?)) }.boxed()).await?;
    if query.format == TreeFormat::Dot {
        let content_type = [(header::CONTENT_TYPE, "text/vnd.graphviz; charset=utf-8")];
        let mut dump = TreeDump::clone(&dump);
        if !query.tokens {
            dump.nodes.iter_mut().for_each(|node| node.first_positions.clear());
        }
        return Ok((content_type, dump.to_graphviz()).into_response());
    }
    let stats = app.engine.cache_stats().await?;
    let nodes = dump.nodes.iter().map(|node| TreeNode::new(node, query.tokens)).collect();
    Ok(Json(Tree { version: dump.version, stats, nodes }).into_response())
}

/// `GET /admin/pins`: all pins.
pub(super) async fn pins(State(app): State<Arc<App>>) -> Result<Json<PinList>, ApiError> {
    let pins = app.engine.pins().await?;
    Ok(Json(PinList { pins: pins.iter().map(PinInfo::from).collect() }))
}

/// `POST /admin/pins`: pins what is cached of a prompt.
pub(super) async fn pin(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<PinCreated>, ApiError> {
    let pin: PinRequest = app.parser.parse(body).await?;
    let mut request = match pin.prompt {
        PinPrompt::Text(text) => Request::text(text),
        PinPrompt::Tokens(tokens) => Request::tokens(tokens),
    };
    if let Some(salt) = Tenant::named(pin.tenant).salt(pin.cache_salt.as_deref()) {
        request = request.cache_salt(salt);
    }
    let ttl = pin.ttl_seconds.map(|seconds| Duration::from_secs(seconds as u64));
    let id = app.engine.pin(&request, ttl).await?;
    Ok(Json(PinCreated { id: id.0 }))
}

/// `DELETE /admin/pins/{id}`: ends a pin.
pub(super) async fn unpin(
    State(app): State<Arc<App>>,
    id: Result<Path<u64>, PathRejection>,
) -> Result<Json<PinDeleted>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::invalid(Some("id"), error.body_text()))?;
    if app.engine.unpin(PinId(id)).await? {
        return Ok(Json(PinDeleted { deleted: true }));
    }
    Err(ApiError::new(StatusCode::NOT_FOUND, format!("there is no pin {id}")))
}
