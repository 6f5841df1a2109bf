//! The routes of the API, each of which is defined in one row of a table.
//!
//! The router, the rules of access, the description at `/openapi.json` and `/docs`, and the names
//! of operations in traces are made from these rows. One file has the rows of each group.

mod cache;
mod generation;
mod models;
mod ollama;
pub(crate) mod openapi;
mod operation;
pub(crate) mod other_paths;
pub(crate) mod page;
mod sessions;
pub(crate) mod several;

use std::sync::Arc;

use axum::extract::Request as HttpRequest;
use axum::handler::Handler;
use axum::middleware::Next;
use axum::routing::MethodRouter;
use axum::{Extension, Router, middleware, routing};
use schemars::JsonSchema;

use crate::api::admin::Health;
use crate::api::error::ErrorReply;
use crate::api::messages::MessagesError;
use crate::api::ollama::OllamaError;
use crate::api::schemas::{Make, reference};
use crate::guard::access::Access;
use crate::guard::{access, cors};
use crate::handlers::app::{App, RouterOptions};
use crate::handlers::context::Purpose;
use crate::handlers::{self, admin, messages};
use crate::wire::traces;

/// The media type of exported prefixes.
pub(crate) const FILE: &str = "application/octet-stream";

/// Who may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Everybody,
    /// Clients with an API key, if there are any keys.
    Client,
    /// The operator: with the administrator's key, or on the server's machine.
    Operator,
}

/// The body of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request {
    Json(Make),
    /// The file of an exported prompt.
    File,
}

/// The body of a reply.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reply {
    Json(Make),
    /// Text of this media type.
    Text(&'static str),
    /// Server-sent events whose data has this schema.
    Events(Make),
    /// Lines of JSON, each of which has this schema.
    Lines(Make),
}

/// The form of a route's errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    OpenAi,
    Anthropic,
    Ollama,
    /// The reply of `/health`.
    Health,
}

/// The name and summary of a route in the API's description.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    /// A name that is unique in the description.
    pub(crate) id: &'static str,
    pub(crate) summary: &'static str,
}

/// A route, whose handler has the state `S`.
#[derive(Debug)]
pub(crate) struct Route<S = Arc<App>> {
    /// The HTTP method, in lower case.
    pub(crate) method: &'static str,
    /// The path, in axum's syntax.
    pub(crate) path: &'static str,
    pub(crate) role: Role,
    handler: MethodRouter<S>,
    pub(crate) query: Option<Make>,
    pub(crate) request: Option<Request>,
    pub(crate) replies: Vec<Reply>,
    pub(crate) error_form: ErrorForm,
    /// Statuses of errors, in addition to those that follow from the rest of the row.
    own_errors: &'static [u16],
    /// Whether the model computes something.
    pub(crate) generates: bool,
    /// The value of `gen_ai.operation.name` in traces, for routes that answer with the model.
    traced_as: Option<&'static str>,
    /// `None` for routes that are not part of the API: pages, and older names of described routes.
    pub(crate) operation: Option<Operation>,
}

/// Routes under one heading of the description.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    pub(crate) routes: Vec<Route>,
}

/// The table of all routes, in the order in which they are described.
pub(crate) fn groups(options: &RouterOptions) -> [Group; 6] {
    [
        generation::group(),
        models::group(),
        ollama::group(),
        cache::group(),
        operation::group(options),
        sessions::group(),
    ]
}

/// The rows of all groups.
fn all(options: &RouterOptions) -> impl Iterator<Item = Route> {
    groups(options).into_iter().flat_map(|group| group.routes)
}

/// The router of all routes of a server with one model, without the middleware of all requests.
pub(crate) fn router(app: &Arc<App>, options: &RouterOptions) -> Router<Arc<App>> {
    let pages = if options.page { page::routes() } else { Vec::new() };
    guarded(all(options).chain(pages), &app.access, options)
}

/// The routes behind the checks of their roles.
fn guarded<S: Clone + Send + Sync + 'static>(
    routes: impl Iterator<Item = Route<S>>,
    access: &Arc<Access>,
    options: &RouterOptions,
) -> Router<S> {
    let (mut clients, mut others) = (Router::new(), Router::new());
    for route in routes {
        let router = if route.role == Role::Client { &mut clients } else { &mut others };
        *router = std::mem::take(router).route(route.path, route.guarded(access));
    }
    if let Some(cors) = cors::layer(&options.allowed_origins) {
        // The layer applies to other methods only if their fallback is added before it.
        clients = clients.method_not_allowed_fallback(admin::method_not_allowed).layer(cors);
    }
    others.merge(clients)
}

/// A route with the method GET.
pub(crate) fn get<H, T, S>(path: &'static str, role: Role, handler: H) -> Route<S>
where
    H: Handler<T, S>,
    T: 'static,
    S: Clone + Send + Sync + 'static,
{
    Route::new("get", path, role, routing::get(handler))
}

/// A route with the method POST.
pub(crate) fn post<H, T>(path: &'static str, role: Role, handler: H) -> Route
where
    H: Handler<T, Arc<App>>,
    T: 'static,
{
    Route::new("post", path, role, routing::post(handler))
}

/// A route with the method DELETE.
pub(crate) fn delete<H, T>(path: &'static str, role: Role, handler: H) -> Route
where
    H: Handler<T, Arc<App>>,
    T: 'static,
{
    Route::new("delete", path, role, routing::delete(handler))
}

impl<S: Clone + Send + Sync + 'static> Route<S> {
    fn new(method: &'static str, path: &'static str, role: Role, handler: MethodRouter<S>) -> Self {
        Self {
            method,
            path,
            role,
            handler,
            query: None,
            request: None,
            replies: Vec::new(),
            error_form: ErrorForm::OpenAi,
            own_errors: &[],
            generates: false,
            traced_as: None,
            operation: None,
        }
    }

    /// Makes the route a part of the description. `id` is unique.
    fn described(mut self, id: &'static str, summary: &'static str) -> Self {
        self.operation = Some(Operation { id, summary });
        self
    }

    /// The body of a request is JSON.
    fn takes<T: JsonSchema>(mut self) -> Self {
        self.request = Some(Request::Json(reference::<T>));
        self
    }

    /// The body of a request is a file.
    fn takes_file(mut self) -> Self {
        self.request = Some(Request::File);
        self
    }

    /// The members of the query. All of them are optional.
    fn query<T: JsonSchema>(mut self) -> Self {
        // The members are listed one by one, so a reference would be of no use.
        self.query = Some(T::json_schema);
        self
    }

    /// The reply is JSON, or can be.
    fn replies<T: JsonSchema>(self) -> Self {
        self.replies_as(Reply::Json(reference::<T>))
    }

    /// The reply is, or can be, a stream of events with this data.
    fn streams<T: JsonSchema>(self) -> Self {
        self.replies_as(Reply::Events(reference::<T>))
    }

    /// The reply is, or can be, lines of JSON with this schema.
    fn lines<T: JsonSchema>(self) -> Self {
        self.replies_as(Reply::Lines(reference::<T>))
    }

    /// The reply is this, or can be.
    fn replies_as(mut self, reply: Reply) -> Self {
        self.replies.push(reply);
        self
    }

    /// The form of errors, if it is not OpenAI's.
    fn fails_as(mut self, form: ErrorForm) -> Self {
        self.error_form = form;
        self
    }

    /// Statuses of errors that do not follow from the rest of the row.
    fn fails(mut self, statuses: &'static [u16]) -> Self {
        self.own_errors = statuses;
        self
    }

    /// The model computes something.
    fn generates(mut self) -> Self {
        self.generates = true;
        self
    }

    /// The handler only explains how much of the request's prompt is cached.
    fn explains(mut self) -> Self {
        self.handler = self.handler.layer(Extension(Purpose::Explain));
        self
    }

    /// The name of the operation in traces.
    fn traced_as(mut self, name: &'static str) -> Self {
        self.traced_as = Some(name);
        self
    }

    /// The handler behind the checks of the route's role.
    fn guarded(self, access: &Arc<Access>) -> MethodRouter<S> {
        let state = || Arc::clone(access);
        let handler = match self.role {
            Role::Everybody => self.handler,
            Role::Client => {
                self.handler.layer(middleware::from_fn_with_state(state(), access::client))
            }
            Role::Operator => {
                self.handler.layer(middleware::from_fn_with_state(state(), access::admin))
            }
        };
        let handler = match self.traced_as {
            Some(name) => {
                handler.layer(middleware::from_fn(move |request: HttpRequest, next: Next| {
                    traces::operation(name);
                    next.run(request)
                }))
            }
            None => handler,
        };
        match self.error_form {
            // The refusals of the checks have this form, too.
            ErrorForm::Anthropic => handler.layer(middleware::from_fn(messages::errors)),
            ErrorForm::Ollama => handler.layer(middleware::from_fn(handlers::ollama::errors)),
            ErrorForm::OpenAi | ErrorForm::Health => handler,
        }
    }

    /// The same route with another handler.
    fn with_handler<T>(self, handler: MethodRouter<T>) -> Route<T> {
        let Self { method, path, role, query, request, replies, error_form, .. } = self;
        let Self { own_errors, generates, traced_as, operation, .. } = self;
        Route {
            method,
            path,
            role,
            handler,
            query,
            request,
            replies,
            error_form,
            own_errors,
            generates,
            traced_as,
            operation,
        }
    }

    /// Whether clients may set a deadline for the answer.
    pub(crate) fn has_deadline(&self) -> bool {
        self.generates && self.role == Role::Client
    }

    /// The schema of its errors.
    pub(crate) fn error(&self) -> Make {
        match self.error_form {
            ErrorForm::OpenAi => reference::<ErrorReply>,
            ErrorForm::Anthropic => reference::<MessagesError>,
            ErrorForm::Ollama => reference::<OllamaError>,
            ErrorForm::Health => reference::<Health>,
        }
    }

    /// Statuses of its errors, in ascending order.
    pub(crate) fn errors(&self) -> Vec<u16> {
        let mut errors = self.own_errors.to_vec();
        match self.role {
            Role::Everybody => {}
            // A header that says who sends the request must not come twice.
            Role::Client => errors.extend([400, 401, 500, 503]),
            Role::Operator => errors.extend([400, 401, 403, 500, 503]),
        }
        match self.request {
            Some(Request::Json(_)) => errors.extend([400, 408, 413, 415]),
            // The size of a file is not limited.
            Some(Request::File) => errors.extend([400, 408, 415]),
            None => {}
        }
        if self.query.is_some() {
            errors.push(400);
        }
        if self.generates {
            errors.extend([429, 504]);
        }
        errors.sort_unstable();
        errors.dedup();
        errors
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use super::*;
    use crate::wire::root_path::{OWN_PARTS, first_part};

    /// Goal: no two operations of the description have the same name.
    #[test]
    fn names_of_operations_are_unique() {
        let groups = groups(&RouterOptions::default());
        let mut names = HashSet::new();
        for route in groups.iter().flat_map(|group| &group.routes) {
            if let Some(Operation { id, .. }) = route.operation {
                assert!(names.insert(id), "{id}");
            }
        }
    }

    /// Goal: no root path can begin like the path of a route, whichever routes there are.
    #[test]
    fn first_parts_of_routes_are_known_to_root_paths() {
        let groups = groups(&RouterOptions::default());
        let routes: Vec<Route> =
            groups.into_iter().flat_map(|group| group.routes).chain(page::routes()).collect();
        let parts = routes.iter().map(|route| first_part(route.path));
        let parts: BTreeSet<&str> = parts.filter(|part| !part.is_empty()).collect();
        assert_eq!(parts, BTreeSet::from(OWN_PARTS));
    }
}
