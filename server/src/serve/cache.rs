//! The prefix cache for those who run the server: a picture of the tree, and pins.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use stolon::{NodeDump, PinId, Request};

use super::App;
use super::api::parse_body;
use super::error::ApiError;
use super::fields::token_ids;

/// How a tree is to be shown.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum TreeFormat {
    /// Numbers and a list of nodes.
    #[default]
    Json,
    /// Graphviz's language.
    Dot,
}

/// What may follow `/admin/tree?`.
#[derive(Debug, Deserialize)]
pub(super) struct TreeQuery {
    #[serde(default)]
    format: TreeFormat,
}

/// `GET /admin/tree`: the prefix tree's nodes and numbers; `?format=dot` draws it.
pub(super) async fn tree(
    State(app): State<Arc<App>>,
    Query(query): Query<TreeQuery>,
) -> Result<Response, ApiError> {
    let dump = app.engine.dump()?;
    if matches!(query.format, TreeFormat::Dot) {
        let kind = [(header::CONTENT_TYPE, "text/vnd.graphviz; charset=utf-8")];
        return Ok((kind, dump.to_graphviz()).into_response());
    }
    let stats = app.engine.cache_stats().await?;
    let nodes: Vec<Value> = dump.nodes.iter().map(node).collect();
    Ok(Json(json!({"version": dump.version, "stats": stats, "nodes": nodes})).into_response())
}

fn node(node: &NodeDump) -> Value {
    json!({
        "parent": node.parent,
        "namespace": format!("{:?}", node.namespace),
        "blocks": node.block_count,
        "tokens": node.position_count,
        "first_tokens": node.first_positions,
        "locks": node.locks,
        "hits": node.hits,
        "last_use": node.last_use,
    })
}

/// `GET /admin/pins`: what stays cached, and for how long.
pub(super) async fn pins(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let pins = app.engine.pins().await?;
    let pins = pins.iter().map(|pin| {
        json!({
            "id": pin.id.0,
            "tokens": pin.tokens,
            "blocks": pin.blocks,
            "ends_in_seconds": pin.ends_in.map(|left| left.as_secs_f64()),
        })
    });
    Ok(Json(json!({"pins": pins.collect::<Vec<Value>>()})))
}

/// `POST /admin/pins`: keeps what is cached of `prompt` (a text or token ids, under `cache_salt`)
/// for `ttl_seconds`, or until it is deleted.
pub(super) async fn pin(
    State(app): State<Arc<App>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, ApiError> {
    let mut fields = parse_body(body)?;
    let prompt = fields.take("prompt").unwrap_or_default();
    let mut request = match (&prompt, token_ids(&prompt)) {
        (Value::String(text), _) => Request::text(text.clone()),
        (_, Some(ids)) => Request::tokens(ids),
        _ => return Err(ApiError::expected("prompt", "a text or a list of token ids", &prompt)),
    };
    if let Some(salt) = fields.take_string("cache_salt")? {
        request = request.cache_salt(salt);
    }
    let seconds = fields.take_count("ttl_seconds", 1, u32::MAX as usize)?;
    fields.finish()?;
    let ttl = seconds.map(|seconds| Duration::from_secs(seconds as u64));
    let id = app.engine.pin(&request, ttl).await?;
    Ok(Json(json!({"id": id.0})))
}

/// `DELETE /admin/pins/{id}`: lets it go.
pub(super) async fn unpin(
    State(app): State<Arc<App>>,
    Path(id): Path<u64>,
) -> Result<Json<Value>, ApiError> {
    if app.engine.unpin(PinId(id)).await? {
        return Ok(Json(json!({"deleted": true})));
    }
    Err(ApiError::new(StatusCode::NOT_FOUND, format!("there is no pin {id}")))
}
