//! A client's request whose body has been parsed, with all that answering it needs besides.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};

use crate::guard::access::Caller;
use crate::handlers::app::App;
use crate::wire::advice::Ignored;
use crate::wire::body::RequestBody;
use crate::wire::error::ApiError;
use crate::wire::receive::{Held, Received};

/// What is done for a request. An extension of requests on routes that do not answer them, which
/// have the handlers of the routes that do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It is answered.
    #[default]
    Answer,
    /// The reply explains how much of the prompt is cached.
    Explain,
    /// The prompt is computed for the cache.
    Warm,
}

/// A request of a client with its parameters.
#[derive(Debug)]
pub(crate) struct Incoming<T> {
    /// The parameters, from the body.
    pub(crate) body: T,
    pub(crate) context: RequestContext,
}

/// The origin of a request, and what it holds while it is answered.
#[derive(Debug)]
pub(crate) struct RequestContext {
    pub(crate) app: Arc<App>,
    /// The client, whose key has been checked.
    pub(crate) caller: Caller,
    /// The parameters that are ignored are noted here.
    pub(crate) ignored: Ignored,
    pub(crate) purpose: Purpose,
    /// The memory of the body. It is released when prompts have been tokenized and images decoded.
    pub(crate) held: Held,
}

impl<T: RequestBody> FromRequest<Arc<App>> for Incoming<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        // The middleware of clients' routes adds it.
        let caller = request.extensions().get::<Caller>().cloned();
        let caller = caller.ok_or_else(ApiError::internal)?;
        let purpose = request.extensions().get::<Purpose>().copied().unwrap_or_default();
        let received = Received::from_request(request, app).await?;
        let ignored = received.ignored.clone();
        let (body, held) = app.parser.parse_held(received).await?;
        Ok(Self {
            body,
            context: RequestContext { app: Arc::clone(app), caller, ignored, purpose, held },
        })
    }
}
