//! The description of the API in a build without the feature `openapi`: there is none.

use axum::http::StatusCode;

use crate::wire::error::ApiError;

/// `GET /openapi.json`.
pub(super) async fn json() -> ApiError {
    absent()
}

/// `GET /docs`.
pub(super) async fn docs() -> ApiError {
    absent()
}

/// `GET /docs/search.js`.
pub(super) async fn search() -> ApiError {
    absent()
}

fn absent() -> ApiError {
    let message = "this server was built without the feature `openapi`, so it has no description";
    ApiError::new(StatusCode::NOT_FOUND, message)
}
