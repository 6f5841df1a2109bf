//! Handlers of `/v1/cache`: the prefix cache for operators.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use futures::future::try_join_all;
use serde_json::json;
use stolon::{Pin, PinId, PinOptions, Request, TreeDump};

use crate::api::cache::{
    CachePrompt, CacheRequest, CacheResult, CacheResults, CacheStatsReply, Evicted, FlushQuery,
    Flushed, MAX_PIN_TEXT, PinCreated, PinDeleted, PinInfo, PinList, PinRequest, Policy,
    PolicyRequest, TiersReply, TokensQuery, Tree, TreeFormat, TreeNode, TreeQuery, UnpinRequest,
};
use crate::handlers::app::App;
use crate::handlers::outline::shown_text;
use crate::wire::error::{ApiError, cut};
use crate::wire::parts::{PathId, Query};
use crate::wire::receive::{Held, Received};

mod prompts;

/// `GET /v1/cache/stats`.
pub(crate) async fn stats(State(app): State<Arc<App>>) -> Result<Json<CacheStatsReply>, ApiError> {
    let (cache, stats) = (app.engine.cache().stats().await?, app.engine.stats());
    let (token_hit_rate, request_hit_rate) = (stats.token_hit_rate(), stats.request_hit_rate());
    let info = app.engine.model_info();
    let cached_kv_bytes = info.kv_bytes / info.num_blocks.max(1) * cache.blocks;
    let kv_bytes = info.kv_bytes;
    Ok(Json(CacheStatsReply {
        cache,
        stats,
        kv_bytes,
        cached_kv_bytes,
        token_hit_rate,
        request_hit_rate,
    }))
}

/// `GET /v1/cache/tiers`: the KV that is stored outside of the KV pool.
pub(crate) async fn tiers(State(app): State<Arc<App>>) -> Json<TiersReply> {
    let stats = app.engine.stats();
    let saved = match (stats.loaded_tokens, stats.prefill_rate) {
        (tokens, rate) if rate > 0 => tokens as f64 / rate as f64,
        _ => 0.0,
    };
    Json(TiersReply {
        loaded_tokens: stats.loaded_tokens,
        compute_seconds_saved: saved,
        disk: app.engine.tiers().disk_stats(),
        object_store: app.engine.tiers().object_stats(),
    })
}

/// `GET /v1/cache/tree`: the prefix tree and its statistics, or with `?format=dot` a graph of it.
pub(crate) async fn tree(
    State(app): State<Arc<App>>,
    Query(query): Query<TreeQuery>,
) -> Result<Response, ApiError> {
    let engine = app.engine.clone();
    let dump =
        app.dumps.run(|| async move { Ok(Arc::new(engine.cache().dump()?)) }.boxed()).await?;
    if query.format == TreeFormat::Dot {
        let content_type = [(header::CONTENT_TYPE, "text/vnd.graphviz; charset=utf-8")];
        let mut dump = TreeDump::clone(&dump);
        if !query.tokens {
            dump.nodes.iter_mut().for_each(|node| node.first_positions.clear());
        }
        return Ok((content_type, dump.to_graphviz()).into_response());
    }
    let stats = app.engine.cache().stats().await?;
    let nodes = dump.nodes.iter().map(|node| TreeNode::new(node, query.tokens)).collect();
    Ok(Json(Tree { version: dump.version, stats, nodes }).into_response())
}

/// `POST /v1/cache/query`: how much of each prompt is cached. The tree is read without a lock.
pub(crate) async fn query(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<CacheResults>, ApiError> {
    let (request, held): (CacheRequest, _) = app.parser.parse_held(body).await?;
    let requests = app.tokenized(request.prompts, held).await?;
    Ok(Json(app.cached(&requests)?))
}

/// `POST /v1/cache/warm`: computes the part of each prompt that is not cached.
pub(crate) async fn warm(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<CacheResults>, ApiError> {
    let (request, held): (CacheRequest, _) = app.parser.parse_held(body).await?;
    let requests = app.tokenized(request.prompts, held).await?;
    app.compute(&requests).await?;
    Ok(Json(app.cached(&requests)?))
}

/// `GET /v1/cache/pins`: all pins, and the prefixes that they hold.
pub(crate) async fn pins(
    State(app): State<Arc<App>>,
    Query(query): Query<TokensQuery>,
) -> Result<Json<PinList>, ApiError> {
    let pins = app.engine.cache().pins().await?;
    let pins = pins.iter().map(|pin| app.pin_info(pin, query.tokens)).collect();
    Ok(Json(PinList { pins }))
}

/// `POST /v1/cache/pin`: computes the part of a prompt that is not cached, and pins the prompt.
pub(crate) async fn pin(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<PinCreated>, ApiError> {
    let (mut pin, held): (PinRequest, _) = app.parser.parse_held(body).await?;
    let options = pin_options(&mut pin)?;
    let requests = app.tokenized(pin.prompts, held).await?;
    let [request] = &requests[..] else {
        let message = format!("`prompt`: expected one prompt, got {}", requests.len());
        return Err(ApiError::invalid(Some("prompt"), message));
    };
    if pin.compute.unwrap_or(true) {
        app.compute(&requests).await?;
    }
    let pool_blocks = app.engine.model_info().num_blocks;
    let pinned = app.engine.cache().pin_with(request, options).await;
    let id = pinned.map_err(|error| ApiError::of_pin(error, pool_blocks))?;
    let pins = app.engine.cache().pins().await?;
    let tokens = pins.iter().find(|pin| pin.id == id).map_or(0, |pin| pin.tokens);
    Ok(Json(PinCreated { id: id.0, tokens }))
}

/// `POST /v1/cache/unpin`: ends a pin, or all pins of prompts.
pub(crate) async fn unpin(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<PinDeleted>, ApiError> {
    let (request, held) = app.parser.parse_held(body).await?;
    let UnpinRequest { id, prompts, .. } = request;
    if let Some(id) = id {
        if prompts.is_given() {
            let message = "expected either `id` or prompts, got both";
            return Err(ApiError::invalid(Some("id"), message));
        }
        return app.end_pin(id).await;
    }
    let mut pins = 0;
    for request in app.tokenized(prompts, held).await? {
        pins += app.engine.cache().unpin_prompt(&request).await?;
    }
    match pins {
        0 => Err(ApiError::new(StatusCode::NOT_FOUND, "there is no pin of these prompts")),
        pins => Ok(Json(PinDeleted { deleted: true, pins })),
    }
}

/// `DELETE /admin/pins/{id}`: ends a pin.
pub(crate) async fn delete_pin(
    State(app): State<Arc<App>>,
    PathId(id): PathId<u64>,
) -> Result<Json<PinDeleted>, ApiError> {
    app.end_pin(id).await
}

/// `POST /v1/cache/evict`: removes prompts, or all prefixes with a cache salt.
pub(crate) async fn evict(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<Evicted>, ApiError> {
    let (request, held) = app.parser.parse_held(body).await?;
    let CacheRequest { prompts, .. } = request;
    if prompts.is_given() {
        let mut blocks = 0;
        for request in app.tokenized(prompts, held).await? {
            blocks += app.engine.cache().evict_prefix(&request).await?;
        }
        return Ok(Json(Evicted { blocks }));
    }
    let Some(salt) = prompts.salt() else {
        let message = "expected `prompt`, `messages`, `question`, `cache_salt` or `tenant`; \
                       /v1/cache/flush removes everything";
        return Err(ApiError::invalid(Some("prompt"), message));
    };
    Ok(Json(Evicted { blocks: app.engine.cache().evict_salt(Some(&salt)).await? }))
}

/// `POST /v1/cache/flush`: removes everything, with `?disk=true` also from the disk, and ends all
/// pins.
pub(crate) async fn flush(
    State(app): State<Arc<App>>,
    Query(query): Query<FlushQuery>,
) -> Result<Json<Flushed>, ApiError> {
    app.engine.cache().flush().await?;
    if query.disk {
        app.engine.tiers().clear_disk().await?;
    }
    Ok(Json(Flushed { flushed: true }))
}

/// `GET /v1/cache/policy`.
pub(crate) async fn policy(State(app): State<Arc<App>>) -> Json<Policy> {
    Json(app.policy())
}

/// `POST /v1/cache/policy`: changes the order of eviction, of admission, or both.
pub(crate) async fn set_policy(
    State(app): State<Arc<App>>,
    body: Received,
) -> Result<Json<Policy>, ApiError> {
    let request: PolicyRequest = app.parser.parse(body).await?;
    let eviction = parse_policy("eviction", request.eviction.as_deref())?;
    let admission = parse_policy("admission", request.admission.as_deref())?;
    if let Some(policy) = eviction {
        app.engine.cache().set_eviction_policy(policy)?;
    }
    if let Some(policy) = admission {
        app.engine.set_admission(policy);
    }
    Ok(Json(app.policy()))
}

fn parse_policy<P>(param: &str, name: Option<&str>) -> Result<Option<P>, ApiError>
where
    P: std::str::FromStr<Err: std::fmt::Display>,
{
    let parse = |name: &str| {
        name.parse().map_err(|error: P::Err| ApiError::invalid(Some(param), error.to_string()))
    };
    name.map(parse).transpose()
}

/// Takes the options of a pin from its request.
fn pin_options(pin: &mut PinRequest) -> Result<PinOptions, ApiError> {
    let refresh_on_hit = pin.refresh_on_hit.unwrap_or(false);
    if refresh_on_hit && pin.ttl_seconds.is_none() {
        let message = "`refresh_on_hit` is allowed only with `ttl_seconds`";
        return Err(ApiError::invalid(Some("refresh_on_hit"), message));
    }
    for (param, text) in [("reason", &pin.reason), ("description", &pin.description)] {
        if let Some(text) = text.as_ref().filter(|text| text.len() > MAX_PIN_TEXT) {
            let expected = format!("at most {MAX_PIN_TEXT} bytes");
            return Err(ApiError::expected(param, &expected, &json!(text)));
        }
    }
    Ok(PinOptions {
        ttl: pin.ttl_seconds.map(|seconds| Duration::from_secs(seconds as u64)),
        refresh_on_hit,
        reason: pin.reason.take(),
        description: pin.description.take(),
    })
}

impl App {
    /// The engine's requests with their prompts as token ids, and their images decoded. Until then
    /// the memory of the body is held.
    pub(crate) async fn tokenized(
        &self,
        prompts: CachePrompt,
        _held: Held,
    ) -> Result<Vec<Request>, ApiError> {
        let requests = prompts.into_requests(self)?;
        Ok(try_join_all(requests.into_iter().map(|r| self.engine.tokenized(r))).await?)
    }

    /// How much of each prompt is cached, and in which tier.
    fn cached(&self, requests: &[Request]) -> Result<CacheResults, ApiError> {
        let (disk, objects) =
            (self.engine.tiers().disk_stats(), self.engine.tiers().object_stats());
        let results = requests.iter().map(|request| {
            let found = self.engine.tiers().query(request)?;
            Ok(CacheResult {
                prompt_tokens: prompt_len(request),
                cached_tokens: found.pool,
                resume_tokens: self.engine.cache().query_resume(request)?.resume,
                disk_tokens: disk.map(|_| found.disk),
                object_store_tokens: objects.map(|_| found.object_store),
            })
        });
        Ok(CacheResults { results: results.collect::<Result<_, ApiError>>()? })
    }

    /// Computes each prompt unless all of it that can be cached is cached.
    async fn compute(&self, requests: &[Request]) -> Result<(), ApiError> {
        let mut missing = Vec::new();
        for request in requests {
            let is_warm = self.engine.cache().is_warm(request)?;
            missing.extend((!is_warm).then(|| request.clone()));
        }
        try_join_all(missing.into_iter().map(|request| {
            self.engine.cache().warm(match self.request_timeout {
                Some(timeout) => request.timeout(timeout),
                None => request,
            })
        }))
        .await?;
        Ok(())
    }

    async fn end_pin(&self, id: u64) -> Result<Json<PinDeleted>, ApiError> {
        if self.engine.cache().unpin(PinId(id)).await? {
            return Ok(Json(PinDeleted { deleted: true, pins: 1 }));
        }
        Err(ApiError::new(StatusCode::NOT_FOUND, format!("there is no pin {id}")))
    }

    fn pin_info(&self, pin: &Pin, tokens: bool) -> PinInfo {
        // A token has at least one byte, so no more tokens are needed.
        let shown = &pin.token_ids[..pin.token_ids.len().min(MAX_PIN_TEXT)];
        let text = tokens.then(|| shown_text(&self.engine, shown));
        PinInfo {
            id: pin.id.0,
            namespace: format!("{:?}", pin.namespace),
            tokens: pin.tokens,
            blocks: pin.blocks,
            demoted: pin.demoted,
            is_mark: pin.is_mark,
            ends_in_seconds: pin.ends_in.map(|left| left.as_secs_f64()),
            refresh_on_hit: pin.options.refresh_on_hit,
            reason: pin.options.reason.clone(),
            description: pin.options.description.clone(),
            token_ids: tokens.then(|| pin.token_ids.to_vec()),
            text: text.map(|text| cut(text, MAX_PIN_TEXT)),
        }
    }

    fn policy(&self) -> Policy {
        Policy {
            eviction: self.engine.cache().eviction_policy().map(|policy| policy.to_string()),
            admission: self.engine.admission().to_string(),
        }
    }
}

/// Number of tokens of a tokenized prompt.
pub(crate) fn prompt_len(request: &Request) -> usize {
    match request.prompt() {
        stolon::Prompt::Tokens(tokens) => tokens.len(),
        _ => 0,
    }
}
