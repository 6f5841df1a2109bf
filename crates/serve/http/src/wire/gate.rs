//! Answers every request while there is no engine to answer it: before the model has been loaded,
//! and while the server stops.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use tower::ServiceExt;

use crate::api::admin::{Health, Status};
use crate::wire::error::ApiError;
use crate::wire::receive::linger;
use crate::wire::request_id::RequestId;
use crate::wire::root_path::RootPath;

/// The state of the server: loading, then serving, then stopping.
#[derive(Debug)]
enum Phase {
    Loading { since: Instant },
    Serving(Router),
    Stopping,
}

/// Passes requests to the router while there is one.
#[derive(Debug)]
pub struct Gate {
    phase: RwLock<Phase>,
    root_path: RootPath,
}

impl Gate {
    /// A gate without a router: the model is being loaded.
    #[must_use]
    pub fn loading() -> Self {
        let phase = RwLock::new(Phase::Loading { since: Instant::now() });
        Self { phase, root_path: RootPath::default() }
    }

    /// The same for a router with a [root path](crate::RouterOptions::root_path), below which
    /// `/health` and `/ready` are answered in their own form, too.
    #[must_use]
    pub fn below(self, root_path: RootPath) -> Self {
        Self { root_path, ..self }
    }

    /// Passes requests to the router from now on.
    pub fn open(&self, router: Router) {
        self.set(Phase::Serving(router));
    }

    /// Refuses new requests from now on. Those that the router is answering continue.
    pub fn close(&self) {
        self.set(Phase::Stopping);
    }

    fn set(&self, phase: Phase) {
        *self.phase.write().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    pub(crate) async fn answer(&self, request: Request<Body>) -> Response {
        let health = match &*self.phase.read().unwrap_or_else(PoisonError::into_inner) {
            Phase::Serving(router) => Ok(router.clone()),
            Phase::Loading { since } => Err(Health::not_ready(
                Status::Loading,
                format!("the model has been loading for {} s", since.elapsed().as_secs()),
            )),
            Phase::Stopping => Err(Health::not_ready(
                Status::Stopping,
                "the server is stopping and finishes running requests".to_owned(),
            )),
        };
        match health {
            Ok(router) => match router.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
            Err(health) => {
                let id = RequestId::of(request.headers());
                let mut response = unavailable(self.root_path.strip(request.uri().path()), health);
                linger(request.into_body());
                id.add_to(&mut response);
                response
            }
        }
    }
}

/// Status 503, in the form of the route. Bodies may be too long to be read to their ends, so the
/// connection is closed.
fn unavailable(path: &str, health: Health) -> Response {
    let mut response = match path {
        "/health" | "/ready" => (StatusCode::SERVICE_UNAVAILABLE, Json(health)).into_response(),
        _ => ApiError::unavailable(health.reason.unwrap_or_default(), Duration::from_secs(5))
            .into_response(),
    };
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::Arc;

    use serde_json::json;
    use tokio::net::TcpListener;
    use tokio::sync::watch;

    use super::*;
    use crate::ConnectionLimits;
    use crate::listen;
    use crate::tests::{get, json};

    /// Goal: before the model has been loaded, and while the server stops, every request is answered
    /// with status 503, in the form of its route, and the time to try again.
    #[tokio::test]
    async fn a_closed_gate_answers_every_request() {
        let gate = Gate::loading();
        for name in ["loading", "stopping"] {
            let health = gate.answer(get("/health")).await;
            assert_eq!(health.headers()["connection"], "close");
            let (status, reply) = json(health).await;
            assert_eq!((status, &reply["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(name)));
            let other = gate.answer(get("/v1/models")).await;
            assert!(other.headers().contains_key("retry-after"));
            let (status, reply) = json(other).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(reply["error"]["type"], "service_unavailable_error");
            gate.close();
        }
    }

    /// Goal: a client that reads its reply only after it has sent a large body sees why it was
    /// refused.
    #[tokio::test]
    async fn a_closed_gate_reads_bodies() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let timeout = Duration::from_secs(60);
        let limits = ConnectionLimits { count: 8, header_timeout: timeout, write_timeout: timeout };
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(listen(listener, Arc::new(Gate::loading()), limits, None, stopped));
        let body = vec![b' '; 20 << 20];
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let client = tokio::task::spawn_blocking(move || {
            for _ in 0..5 {
                let mut stream = TcpStream::connect(address).expect("a connection");
                stream.set_read_timeout(Some(timeout)).expect("set");
                stream.write_all(head.as_bytes()).expect("sent");
                stream.write_all(&body).expect("the body is read");
                let mut first = [0; 12];
                stream.read_exact(&mut first).expect("the beginning of a reply");
                assert_eq!(&first, b"HTTP/1.1 503");
            }
        });
        client.await.expect("a reply");
    }

    /// Goal: health has its own form below the root path, too, and only there.
    #[tokio::test]
    async fn a_closed_gate_knows_the_root_path() {
        let gate = Gate::loading().below("/llm".parse().expect("a path"));
        for (path, is_health) in [("/llm/ready", true), ("/ready", true), ("/other/ready", false)] {
            let (status, reply) = json(gate.answer(get(path)).await).await;
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(reply["status"] == "loading", is_health, "{path}: {reply}");
        }
    }
}
