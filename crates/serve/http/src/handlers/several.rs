//! A server of several models: finds the model of each request, loads it if it is not loaded, and
//! passes the request to the router of that model.
//!
//! The router of a model is the router of a server with that model alone, without the checks of
//! access, which a request has passed before. It lives as long as the model is loaded.
//!
//! A request names its model in the query (`?model=NAME`), which all routes accept, or else in the
//! member `model` of its body. A request that names none is for the first model.

mod keep_alive;
mod lists;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::StatusCode;
use axum::http::uri::{PathAndQuery, Uri};
use axum::response::Response;
use futures::FutureExt;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use serde_json::Value;
use stolon::{Engine, ModelLease, ModelSet, ModelSetError};
use tokio::sync::Semaphore;
use tower::ServiceExt;

use crate::guard::access::{Access, Caller};
use crate::handlers::app::{BODY_LIMITS, RouterOptions};
use crate::handlers::ollama::LATEST;
use crate::handlers::responses::ResponseStore;
use crate::wire::asked::Asked;
use crate::wire::error::ApiError;
use crate::wire::receive::{Already, BodyLimits, Received};
use crate::wire::root_path::RootPath;
use crate::wire::unix_seconds;

use keep_alive::keep_alive;
pub(crate) use lists::{health, list, load, metrics, one, ps, tags, unload};

/// Time after which a client that asked for a streamed reply gets the comment that its model is being
/// loaded.
/// A reply that has begun has status 200, so a load that fails sooner is answered with its own
/// status.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes the router of one model.
type MakeRouter = fn(Engine, RouterOptions, ResponseStore) -> Router;

/// The state of a server of several models.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) models: ModelSet,
    options: RouterOptions,
    make: MakeRouter,
    pub(crate) access: Arc<Access>,
    bodies: BodyLimits,
    responses: ResponseStore,
    patience: Duration,
    /// When the router was made, in seconds since 1970-01-01 UTC.
    started: u64,
}

/// How the requests of a route are passed to a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passing {
    /// Whether the body is JSON, which may name the model.
    pub(crate) has_json: bool,
    /// Whether the route only looks at a model for the operator: it does not load it, and does not
    /// keep it loaded.
    pub(crate) looks: bool,
    /// Whether the reply may be server-sent events.
    pub(crate) has_events: bool,
    /// Whether the route is Ollama's, whose requests say how long a model stays loaded.
    pub(crate) is_ollama: bool,
    /// The event of an error: its name, if it has one, and its data.
    pub(crate) failed: fn(&ApiError) -> (Option<&'static str>, Value),
}

impl Front {
    pub(crate) fn new(models: ModelSet, options: RouterOptions, make: MakeRouter) -> Self {
        let memory = options.body_memory.min(Semaphore::MAX_PERMITS);
        Self {
            bodies: BodyLimits {
                size: options.body_limit.unwrap_or(BODY_LIMITS.1),
                time: options.body_timeout,
                memory: Arc::new(Semaphore::new(memory)),
            },
            responses: ResponseStore::new(options.response_memory),
            access: Arc::new(options.access.clone()),
            models,
            options,
            make,
            patience: PATIENCE,
            started: unix_seconds(),
        }
    }

    /// The same with another time until a client gets the comment about a load.
    #[cfg(test)]
    pub(crate) fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The name of the model that a client means by `asked`. An adapter means its model.
    ///
    /// # Errors
    /// Status 404, with all names.
    fn resolve(&self, asked: Option<&str>) -> Result<String, ApiError> {
        let Some(asked) = asked else {
            return Ok(self.models.names().next().unwrap_or_default().to_owned());
        };
        let untagged = asked.strip_suffix(LATEST).unwrap_or(asked);
        let is_named = |name: &&str| *name == asked || *name == untagged;
        if let Some(name) = self.models.names().find(is_named) {
            return Ok(name.to_owned());
        }
        let models = self.models.list();
        let has = |adapters: &[String]| adapters.iter().any(|it| it == asked || it == untagged);
        match models.iter().find(|model| has(&model.adapters)) {
            Some(model) => Ok(model.name.clone()),
            None => {
                let known = models.into_iter().map(|model| model.name).collect();
                Err(ModelSetError::Unknown { name: asked.to_owned(), known }.into())
            }
        }
    }

    /// The reply of a loaded model, which stays loaded until the reply has been sent.
    async fn answer(&self, lease: ModelLease, request: Request) -> Result<Response, ApiError> {
        let options = || RouterOptions {
            served_names: vec![lease.name().to_owned()],
            ..self.options.clone()
        };
        let responses = || self.responses.clone();
        let router = lease.attached(|engine| (self.make)(engine.clone(), options(), responses()));
        let router = router.ok_or_else(ApiError::internal)?;
        let response = match Router::clone(&router).oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        if response.body().size_hint().exact().is_some() {
            return Ok(response);
        }
        Ok(response.map(|body| {
            Body::new(body.map_frame(move |frame| {
                let _until_the_end = &lease;
                frame
            }))
        }))
    }

    /// The reply of a model for the operator, if it is loaded.
    async fn look(&self, name: &str, request: Request) -> Result<Response, ApiError> {
        let Some(lease) = self.models.peek(name)? else {
            let message = format!(
                "the model `{name}` is not loaded: POST /models/load, or a request for an answer, \
                 loads it"
            );
            return Err(ApiError::new(StatusCode::CONFLICT, message).code("model_not_loaded"));
        };
        self.answer(lease, request).await
    }
}

/// Passes a request to its model.
pub(crate) async fn pass(
    front: Arc<Front>,
    route: Passing,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut request, asked) = match route.has_json {
        true => received(&front, request).await?,
        false => (request, Asked::default()),
    };
    let queried = take_model(&mut request)?;
    let name = front.resolve(queried.as_deref().or(asked.model(route.is_ollama)))?;
    if route.looks {
        return front.look(&name, request).await;
    }
    let mut loaded = get(&front, name.clone(), &request);
    let lease = if route.has_events && asked.streams() {
        match tokio::time::timeout(front.patience, &mut loaded).await {
            Ok(lease) => lease?,
            Err(_) => {
                let reply = async move { front.answer(loaded.await?, request).await };
                return Ok(waiting::events(name, reply.boxed(), route.failed));
            }
        }
    } else {
        loaded.await?
    };
    if route.is_ollama
        && let Some(idle) = keep_alive(asked.keep_alive())
    {
        lease.keep_alive(idle);
    }
    front.answer(lease, request).await
}

/// A lease of a model, within the time that the request has.
fn get(
    front: &Front,
    name: String,
    request: &Request,
) -> BoxFuture<'static, Result<ModelLease, ApiError>> {
    let models = front.models.clone();
    let deadline = request.extensions().get().map(|caller: &Caller| caller.deadline);
    let left = deadline.unwrap_or_default().within(front.options.request_timeout).left();
    async move {
        let Some(left) = left else { return Ok(models.get(&name).await?) };
        match tokio::time::timeout(left, models.get(&name)).await {
            Ok(lease) => Ok(lease?),
            Err(_) => {
                let message = format!("the model `{name}` was not loaded in time");
                Err(ApiError::timed_out(message))
            }
        }
    }
    .boxed()
}

/// Receives the body of a request, which the model's router then finds in the request.
async fn received(front: &Arc<Front>, request: Request) -> Result<(Request, Asked), ApiError> {
    let (parts, body) = request.into_parts();
    let mut passed = Request::from_parts(parts.clone(), Body::empty());
    let received = Received::from_request(Request::from_parts(parts, body), front).await?;
    let (asked, received) = Asked::of(received).await?;
    passed.extensions_mut().insert(Already::new(received));
    Ok((passed, asked))
}

/// Takes the model out of the query of a request, where no route expects it.
fn take_model(request: &mut Request) -> Result<Option<String>, ApiError> {
    let Some(query) = request.uri().query() else { return Ok(None) };
    let is_model = |pair: &&str| pair.split('=').next() == Some("model");
    if !query.split('&').any(|pair| is_model(&pair)) {
        return Ok(None);
    }
    let wrong = || ApiError::invalid(Some("model"), "`model`: expected a name, encoded for a URL");
    let pairs = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(request.uri());
    let pairs = pairs.map_err(|_| wrong())?.0;
    let model = pairs.into_iter().find(|(key, _)| key == "model").map(|(_, model)| model);
    let rest: Vec<&str> = query.split('&').filter(|pair| !is_model(pair)).collect();
    let path = match rest.is_empty() {
        true => request.uri().path().to_owned(),
        false => format!("{}?{}", request.uri().path(), rest.join("&")),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path).map_err(|_| wrong())?);
    *request.uri_mut() = Uri::from_parts(parts).map_err(|_| wrong())?;
    Ok(model)
}

impl FromRef<Arc<Front>> for BodyLimits {
    fn from_ref(front: &Arc<Front>) -> Self {
        front.bodies.clone()
    }
}

impl FromRef<Arc<Front>> for ResponseStore {
    fn from_ref(front: &Arc<Front>) -> Self {
        front.responses.clone()
    }
}

impl FromRef<Arc<Front>> for RootPath {
    fn from_ref(front: &Arc<Front>) -> Self {
        front.options.root_path.clone()
    }
}

impl From<ModelSetError> for ApiError {
    fn from(error: ModelSetError) -> Self {
        let message = error.to_string();
        match error {
            ModelSetError::Unknown { .. } => Self::model_not_found(message),
            // The operator has to act. The whole message may have paths of the server.
            ModelSetError::Load { name, .. } => {
                let message = format!(
                    "the model `{name}` cannot be loaded: the server's log says why, and the reply \
                     to POST /models/load"
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_load_failed")
            }
            ModelSetError::TooLarge { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code("model_too_large")
            }
            _ => Self::unavailable(message, Duration::from_secs(5)),
        }
    }
}
