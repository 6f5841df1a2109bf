//! [`WarmUp`]: computes the prompts of requests before the server answers any.

use std::sync::Arc;

use axum::response::Response;
use serde_json::Value;
use stolon::Engine;

use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::handlers::app::{App, RouterOptions};
use crate::handlers::context::{Incoming, Purpose, RequestContext};
use crate::handlers::{chat, completions};
use crate::wire::advice::Ignored;
use crate::wire::body::{brief, object, request as typed_request};
use crate::wire::error::ApiError;

/// Maximum number of JSON values of a request whose model is not known yet.
const MAX_VALUES: usize = 1 << 20;

/// Computes the prompts of requests, so that they are cached when the first client comes. A request
/// is the body of one to `/v1/chat/completions`, or to `/v1/completions` if it has a `prompt`. Its
/// prompt is exactly the one of such a request, with its tools and its cache salt; everything that
/// concerns the answer has no effect. On a server with tenants, the member `tenant` names the one
/// whose clients send the prompt.
#[derive(Debug)]
pub struct WarmUp(Arc<App>);

/// A request, and what its other members say about it.
struct Line {
    model: Option<String>,
    tenant: Option<String>,
    is_completion: bool,
    body: Value,
}

/// The number of prompt tokens of a request whose prompts were computed. An extension of its reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Warmed(pub(crate) usize);

impl WarmUp {
    /// For an engine behind a router with these options.
    #[must_use]
    pub fn new(engine: Engine, options: RouterOptions) -> Self {
        Self(Arc::new(App::new(engine, options)))
    }

    /// Checks the form of a request, without a model. Returns the name of its model, if it has one.
    ///
    /// # Errors
    /// What was expected, and what came.
    pub fn check(request: &[u8]) -> Result<Option<String>, String> {
        let Line { model, is_completion, body, .. } = Line::parse(request)?;
        let ignored = Ignored::default();
        match is_completion {
            true => drop(typed_request::<CompletionRequest>(body, &ignored).map_err(message)?),
            false => drop(typed_request::<ChatRequest>(body, &ignored).map_err(message)?),
        }
        Ok(model)
    }

    /// Computes the prompts of a request. Returns the number of their tokens.
    ///
    /// # Errors
    /// The message of the server's reply to such a request, or what is wrong with its tenant.
    pub async fn compute(&self, request: &[u8]) -> Result<usize, String> {
        let Self(app) = self;
        let Line { tenant, is_completion, body, .. } = Line::parse(request)?;
        let context = RequestContext {
            app: Arc::clone(app),
            caller: app.access.caller_of(tenant)?,
            ignored: Ignored::default(),
            purpose: Purpose::Warm,
            held: None,
        };
        let reply: Response = if is_completion {
            let body = typed_request(body, &context.ignored).map_err(message)?;
            completions::create(Incoming { body, context }).await.map_err(message)?
        } else {
            let body = typed_request(body, &context.ignored).map_err(message)?;
            chat::create(Incoming { body, context }).await.map_err(message)?
        };
        Ok(reply.extensions().get::<Warmed>().map_or(0, |warmed| warmed.0))
    }
}

impl Line {
    fn parse(request: &[u8]) -> Result<Self, String> {
        // A copy, because halves of surrogate pairs are replaced in place.
        let mut body = object(&mut request.to_vec(), MAX_VALUES).map_err(message)?;
        let tenant = body.as_object_mut().and_then(|members| members.remove("tenant"));
        let tenant = match tenant {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name),
            Some(other) => {
                return Err(format!("`tenant`: expected a string, got {}", brief(&other)));
            }
        };
        let model = body.get("model").and_then(Value::as_str).map(str::to_owned);
        let is_completion = body.get("prompt").is_some_and(|prompt| !prompt.is_null());
        Ok(Self { model, tenant, is_completion, body })
    }
}

fn message(error: ApiError) -> String {
    error.reply().error.message
}
