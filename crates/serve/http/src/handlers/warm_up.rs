//! [`WarmUp`]: computes the prompts of requests before the server answers any.

use std::sync::Arc;

use axum::response::Response;
use serde::Deserialize;
use serde::de::IgnoredAny;
use stolon::Engine;

use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::guard::access::{Caller, Tenant};
use crate::guard::deadline::Deadline;
use crate::handlers::app::{App, RouterOptions};
use crate::handlers::context::{Incoming, Purpose, RequestContext};
use crate::handlers::{chat, completions};
use crate::wire::advice::Ignored;
use crate::wire::body::{RequestBody, parse};
use crate::wire::error::ApiError;

/// Maximum number of JSON values of a request whose model is not known yet.
const MAX_VALUES: usize = 1 << 20;

/// Computes the prompts of requests, so that they are cached when the first client comes. A request
/// is the body of one to `/v1/chat/completions`, or to `/v1/completions` if it has a `prompt`. Its
/// prompt is exactly the one of such a request, with its tools and its cache salt; everything that
/// concerns the answer has no effect.
#[derive(Debug)]
pub struct WarmUp(Arc<App>);

/// The parts of a request that say what it is for.
#[derive(Debug, Deserialize)]
struct Kind {
    model: Option<String>,
    prompt: Option<IgnoredAny>,
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
        let kind = kind(request)?;
        match kind.prompt {
            Some(_) => drop(parsed::<CompletionRequest>(request, &Ignored::default())?),
            None => drop(parsed::<ChatRequest>(request, &Ignored::default())?),
        }
        Ok(kind.model)
    }

    /// Computes the prompts of a request. Returns the number of their tokens.
    ///
    /// # Errors
    /// The message of the server's reply to such a request.
    pub async fn compute(&self, request: &[u8]) -> Result<usize, String> {
        let Self(app) = self;
        let context = RequestContext {
            app: Arc::clone(app),
            caller: Caller {
                tenant: Tenant::default(),
                owner: String::new(),
                identity: None,
                deadline: Deadline::default(),
                quota: None,
            },
            ignored: Ignored::default(),
            purpose: Purpose::Warm,
            held: None,
        };
        let reply = match kind(request)?.prompt {
            Some(_) => {
                let body = parsed(request, &context.ignored)?;
                completions::create(Incoming { body, context }).await
            }
            None => {
                let body = parsed(request, &context.ignored)?;
                chat::create(Incoming { body, context }).await
            }
        };
        let reply: Response = reply.map_err(message)?;
        Ok(reply.extensions().get::<Warmed>().map_or(0, |warmed| warmed.0))
    }
}

fn kind(request: &[u8]) -> Result<Kind, String> {
    serde_json::from_slice(request).map_err(|error| format!("expected a JSON object: {error}"))
}

fn parsed<T: RequestBody>(request: &[u8], ignored: &Ignored) -> Result<T, String> {
    parse(request, MAX_VALUES, ignored).map_err(message)
}

fn message(error: ApiError) -> String {
    error.reply().error.message
}
