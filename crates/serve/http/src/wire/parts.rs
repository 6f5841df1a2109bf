//! The parts of a request's address, with errors in the API's form.

use std::str::FromStr;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::wire::error::ApiError;

/// The members of the query.
#[derive(Debug)]
pub(crate) struct Query<T>(pub(crate) T);

/// The variable part of the path, which the route calls `id`.
#[derive(Debug)]
pub(crate) struct PathId<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = axum::extract::Query::from_request_parts(parts, state).await;
        query.map(|query| Self(query.0)).map_err(|error| refusal(&error.body_text()))
    }
}

impl<T: FromStr, S: Send + Sync> FromRequestParts<S> for PathId<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let params = axum::extract::RawPathParams::from_request_parts(parts, state).await.ok();
        // A server of several models has matched the path before.
        let last = params.as_ref().and_then(|params| params.iter().last());
        let id = last.and_then(|(_, id)| id.parse().ok());
        id.map(Self).ok_or_else(|| {
            // Ids are either whole numbers or strings.
            let message = "the last part of the address: expected an id in UTF-8, and a number \
                           where ids are numbers";
            ApiError::invalid(Some("id"), message).code("invalid_value")
        })
    }
}

/// The error of a query. `text` is axum's: what failed, the path of the member, and serde's
/// message.
fn refusal(text: &str) -> ApiError {
    let text = text.split_once(": ").map_or(text, |(_, rest)| rest);
    let missing = text.strip_prefix("missing field `").and_then(|name| name.strip_suffix('`'));
    if let Some(name) = missing {
        return ApiError::missing(name);
    }
    let unknown = text.split_once("unknown field `").and_then(|(_, rest)| rest.split_once('`'));
    if let Some((name, _)) = unknown {
        return ApiError::unsupported(name, None);
    }
    let Some((param, problem)) = text.split_once(": ") else {
        return ApiError::invalid(None, format!("the query: {text}"));
    };
    let expected = match problem {
        "invalid digit found in string" => "a whole number",
        "provided string was not `true` or `false`" => "true or false",
        problem => problem.rsplit_once("expected ").map_or(problem, |(_, expected)| expected),
    };
    let message = format!("`{param}`: expected {expected}");
    ApiError::invalid(Some(param), message).code("invalid_value")
}

#[cfg(test)]
mod tests {
    use axum::http::Uri;
    use serde::Deserialize;

    use super::*;
    use crate::api::cache::{FlushQuery, TreeQuery};

    fn error<T: for<'de> Deserialize<'de>>(query: &str) -> (Option<String>, String) {
        let uri: Uri = format!("/x?{query}").parse().expect("an address");
        let Err(rejection) = axum::extract::Query::<T>::try_from_uri(&uri) else {
            panic!("{query} is refused")
        };
        let error = refusal(&rejection.body_text()).reply().error;
        (error.param, error.message)
    }

    /// Goal: errors of a query name the member and what is expected, in the API's words.
    #[test]
    fn wrong_queries_are_explained() {
        for (query, param, message) in [
            ("format=xml", "format", "`format`: expected `json` or `dot`"),
            ("tokens=maybe", "tokens", "`tokens`: expected true or false"),
        ] {
            assert_eq!(error::<TreeQuery>(query), (Some(param.to_owned()), message.to_owned()));
        }
        let (param, message) = error::<FlushQuery>("disc=true");
        assert_eq!(param.as_deref(), Some("disc"), "{message}");
    }
}
