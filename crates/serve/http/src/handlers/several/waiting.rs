//! The reply to a client that wants its answer in pieces while its model is being loaded: comments,
//! which clients skip, and then the answer.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use serde_json::Value;

use crate::wire::error::ApiError;

/// Time between two comments.
const INTERVAL: Duration = Duration::from_secs(10);

/// The event of an error.
pub(super) type Failed = fn(&ApiError) -> (Option<&'static str>, Value);

/// The rest of the reply.
enum Rest {
    Loading(BoxFuture<'static, Result<Response, ApiError>>),
    Answer(BoxStream<'static, Result<Bytes, axum::Error>>),
}

/// Server-sent events: comments until there is a `reply`, and then its events. If the client
/// disconnects, all is dropped, and the load continues.
pub(super) fn events(
    name: String,
    reply: BoxFuture<'static, Result<Response, ApiError>>,
    failed: Failed,
) -> Response {
    let comment = Bytes::from(format!(": loading {}\n\n", name.escape_debug()));
    let first = stream::iter([Ok::<_, axum::Error>(comment.clone())]);
    let rest = stream::try_unfold(Rest::Loading(reply), move |rest| {
        let comment = comment.clone();
        async move {
            let mut answer = match rest {
                Rest::Answer(answer) => answer,
                Rest::Loading(mut reply) => {
                    match tokio::time::timeout(INTERVAL, &mut reply).await {
                        Err(_) => return Ok(Some((comment, Rest::Loading(reply)))),
                        Ok(reply) => answer_of(reply, failed),
                    }
                }
            };
            Ok(answer.try_next().await?.map(|bytes| (bytes, Rest::Answer(answer))))
        }
    });
    let body = Body::from_stream(first.chain(rest));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, body).into_response()
}

/// The events of a reply. One that is not sent in pieces is an error, which becomes one event.
fn answer_of(
    reply: Result<Response, ApiError>,
    failed: Failed,
) -> BoxStream<'static, Result<Bytes, axum::Error>> {
    let reply = reply.unwrap_or_else(ApiError::into_response);
    let Some(error) = reply.extensions().get::<ApiError>() else {
        return reply.into_body().into_data_stream().boxed();
    };
    let (event, data) = failed(error);
    let event = event.map_or_else(String::new, |event| format!("event: {event}\n"));
    stream::iter([Ok(format!("{event}data: {data}\n\n").into())]).boxed()
}
