//! The routes of a server of several models: those of a server of one, passed to the model that a
//! request names, except for those that are about all models or about none.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request as HttpRequest, State};
use axum::routing::{self, MethodRouter};
use serde_json::json;

use super::{ErrorForm, Reply, Request, Role, Route, all, guarded, openapi, page};
use crate::handlers::app::{App, RouterOptions};
use crate::handlers::several::{self, Front, Passing};
use crate::handlers::{admin, messages, ollama, responses};

/// The router of all routes, without the middleware of all requests.
pub(crate) fn router(front: &Arc<Front>, options: &RouterOptions) -> Router<Arc<Front>> {
    let pages = if options.page { page::routes() } else { Vec::new() };
    let routes = all(options).map(|route| {
        let handler = own(&route).unwrap_or_else(|| passed(&route));
        route.with_handler(handler)
    });
    guarded(routes.chain(pages), &front.access, options)
}

/// The routes of one of the models. Their requests have passed the checks of access.
pub(crate) fn of_model(options: &RouterOptions) -> Router<Arc<App>> {
    all(options).fold(Router::new(), |router, route| router.route(route.path, route.handler))
}

/// The handler of a route that no model answers.
fn own(route: &Route) -> Option<MethodRouter<Arc<Front>>> {
    Some(match (route.method, route.path) {
        ("get", "/v1/models") => routing::get(several::list),
        ("get", "/v1/models/{*id}") => routing::get(several::one),
        ("post", "/models/load") => routing::post(several::load),
        ("post", "/models/unload") => routing::post(several::unload),
        ("get", "/v1/responses/{id}") => routing::get(responses::get),
        ("delete", "/v1/responses/{id}") => routing::delete(responses::delete),
        ("get", "/health" | "/ready") => routing::get(several::health),
        ("get", "/version") => routing::get(admin::version),
        ("get", "/metrics") => routing::get(several::metrics),
        ("get", "/openapi.json") => routing::get(openapi::json),
        ("get", "/docs") => routing::get(openapi::docs),
        ("get", "/docs/search.js") => routing::get(openapi::search),
        ("get", "/api/tags") => routing::get(several::tags),
        ("get", "/api/ps") => routing::get(several::ps),
        ("get", "/api/version") => routing::get(ollama::version),
        ("post", "/api/create" | "/api/push" | "/api/copy" | "/api/blobs/{digest}") => {
            routing::post(ollama::unavailable)
        }
        ("delete", "/api/delete") => routing::delete(ollama::unavailable),
        _ => return None,
    })
}

/// The handler that passes a request to its model.
fn passed(route: &Route) -> MethodRouter<Arc<Front>> {
    let passing = Passing {
        has_json: matches!(route.request, Some(Request::Json(_))),
        looks: route.role == Role::Operator && route.method == "get",
        has_events: route.replies.iter().any(|reply| matches!(reply, Reply::Events(_))),
        is_ollama: route.error_form == ErrorForm::Ollama,
        failed: match route.error_form {
            ErrorForm::Anthropic => |error| (Some("error"), json!(messages::whole_error(error))),
            ErrorForm::OpenAi | ErrorForm::Ollama | ErrorForm::Health => {
                |error| (None, json!(error.reply()))
            }
        },
    };
    let handler = move |State(front): State<Arc<Front>>, request: HttpRequest| {
        several::pass(front, passing, request)
    };
    match route.method {
        "get" => routing::get(handler),
        "delete" => routing::delete(handler),
        _ => routing::post(handler),
    }
}
