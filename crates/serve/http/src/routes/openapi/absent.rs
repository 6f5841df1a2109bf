//! The description of the API in a build without the feature `openapi`: there is none.

use axum::http::StatusCode;

use crate::wire::error::ApiError;

/// `GET /openapi.json`.
pub(crate) async fn json() -> ApiError {
    absent()
}

/// `GET /docs`.
pub(crate) async fn docs() -> ApiError {
    absent()
}

/// `GET /docs/search.js`.
pub(crate) async fn search() -> ApiError {
    absent()
}

fn absent() -> ApiError {
    let message = "this server was built without the feature `openapi`, so it has no description";
    ApiError::new(StatusCode::NOT_FOUND, message)
}
