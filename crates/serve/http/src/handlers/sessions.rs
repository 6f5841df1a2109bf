//! Handlers of `/v1/sessions`, of SGLang's routes for sessions, and of the operators' list.
//!
//! A session belongs to the tenant or, without tenants, to the name of the API key that opened it.
//! Others cannot reach it, so an id says nothing about the sessions of others. Without keys and
//! tenants, all clients count as one, and only the ids keep their sessions apart.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use serde_json::json;
use stolon::{SessionId, SessionInfo, SessionOptions};

use crate::api::sessions::{
    ForkSession, MAX_TTL_SECONDS, OpenSession, RewindSession, Session, SessionClosed, SessionList,
    SglangCloseSession, SglangOpenSession,
};
use crate::guard::access::Caller;
use crate::handlers::app::App;
use crate::wire::error::ApiError;
use crate::wire::parts::PathId;
use crate::wire::receive::Received;

/// `POST /v1/sessions`.
pub(crate) async fn open(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Received,
) -> Result<Json<Session>, ApiError> {
    let ignored = body.ignored.clone();
    let request: OpenSession = app.parser.parse(body).await?;
    let ttl = request.ttl_seconds.map(|seconds| Duration::from_secs(seconds as u64));
    let (_, adapter) = app.chosen(request.model, &ignored)?;
    let mut options = caller.session_options(request.id, ttl, request.cache_salt.as_deref());
    if let Some(adapter) = adapter {
        options = options.adapter(adapter);
    }
    let info = app.engine.sessions().open(options)?;
    Ok(Json(app.session(&info)))
}

/// `GET /v1/sessions`: the sessions of the client.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<SessionList>, ApiError> {
    if caller.owner.is_empty() {
        let message = "without API keys and tenants, only operators may list sessions, because \
                       all clients are one: expected a request to /v1/cache/sessions";
        return Err(ApiError::new(StatusCode::FORBIDDEN, message));
    }
    let mut sessions = app.engine.sessions().list();
    sessions.retain(|info| info.id.owner() == caller.owner);
    let data = sessions.iter().map(|info| app.session(info)).collect();
    Ok(Json(SessionList { object: "list".into(), data }))
}

/// `GET /v1/sessions/{id}`.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
) -> Result<Json<Session>, ApiError> {
    let info = app.engine.sessions().get(&caller.session(id))?;
    Ok(Json(app.session(&info)))
}

/// `DELETE /v1/sessions/{id}`.
pub(crate) async fn close(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
) -> Result<Json<SessionClosed>, ApiError> {
    app.close_session(caller.session(id))
}

/// `POST /v1/sessions/{id}/fork`: opens a session that continues where this one is, or earlier.
pub(crate) async fn fork(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
    body: Received,
) -> Result<Json<Session>, ApiError> {
    let from = caller.session(id);
    let request: ForkSession = app.parser.parse(body).await?;
    let to = caller.new_session(request.id);
    let info = app.engine.sessions().fork(&from, to, request.tokens).await?;
    Ok(Json(app.session(&info)))
}

/// `POST /v1/sessions/{id}/rewind`: takes a session back to a prefix of its conversation.
pub(crate) async fn rewind(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathId(id): PathId<String>,
    body: Received,
) -> Result<Json<Session>, ApiError> {
    let id = caller.session(id);
    let request: RewindSession = app.parser.parse(body).await?;
    let info = app.engine.sessions().rewind(&id, request.tokens).await?;
    Ok(Json(app.session(&info)))
}

/// `POST /open_session`: replies with the id alone.
pub(crate) async fn sglang_open(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Received,
) -> Result<Json<String>, ApiError> {
    let request: SglangOpenSession = app.parser.parse(body).await?;
    let ttl = request.timeout.map(|seconds| {
        let valid = seconds > 0.0 && seconds <= MAX_TTL_SECONDS as f32;
        let expected = format!("a number above 0 and at most {MAX_TTL_SECONDS}");
        let refused = || ApiError::expected("timeout", &expected, &json!(seconds));
        valid.then(|| Duration::from_secs_f32(seconds)).ok_or_else(refused)
    });
    let options = caller.session_options(request.session_id, ttl.transpose()?, None);
    let info = app.engine.sessions().open(options)?;
    Ok(Json(info.id.name().to_owned()))
}

/// `POST /close_session`.
pub(crate) async fn sglang_close(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Received,
) -> Result<Json<SessionClosed>, ApiError> {
    let request: SglangCloseSession = app.parser.parse(body).await?;
    app.close_session(caller.session(request.session_id))
}

/// `GET /v1/cache/sessions`: the sessions of all clients.
pub(crate) async fn list_all(State(app): State<Arc<App>>) -> Json<SessionList> {
    let describe = |info: &SessionInfo| {
        let owner = Some(info.id.owner().to_owned());
        Session { owner, ..Session::new(info) }
    };
    let data = app.engine.sessions().list().iter().map(describe).collect();
    Json(SessionList { object: "list".into(), data })
}

impl Caller {
    /// The id of a new session of the client; random without a name.
    fn new_session(&self, name: Option<String>) -> SessionId {
        match name {
            Some(name) => self.session(name),
            None => SessionId::random(self.owner.as_str()),
        }
    }

    /// How a session of the client is opened.
    fn session_options(
        &self,
        name: Option<String>,
        ttl: Option<Duration>,
        salt: Option<&str>,
    ) -> SessionOptions {
        let mut options = SessionOptions::new(self.new_session(name));
        if let Some(ttl) = ttl {
            options = options.ttl(ttl);
        }
        if let Some(salt) = self.tenant.salt(salt) {
            options = options.cache_salt(salt);
        }
        options
    }

    /// The client's session of this name.
    pub(crate) fn session(&self, name: String) -> SessionId {
        SessionId::owned_by(self.owner.as_str(), name)
    }
}

impl App {
    fn close_session(&self, id: SessionId) -> Result<Json<SessionClosed>, ApiError> {
        // The error of a session that is not open.
        self.engine.sessions().get(&id)?;
        self.engine.sessions().close(&id);
        Ok(Json(SessionClosed { id: id.name().to_owned(), deleted: true }))
    }

    /// Describes a session to its client.
    fn session(&self, info: &SessionInfo) -> Session {
        let session = Session::new(info);
        let cached_tokens = session.cached_tokens.filter(|_| !self.hide_cached_tokens);
        Session { cached_tokens, ..session }
    }
}
