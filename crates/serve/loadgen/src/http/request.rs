//! Single HTTP requests: the client, one request and its reply, and the conversion of error replies
//! and broken connections to failures.

use std::time::Duration;

use anyhow::Context;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use serde_json::Value;

use super::answer;
use crate::drive::Failure;

/// Maximum number of bytes that are read of a reply that is not a stream.
const MAX_REPLY_BYTES: usize = 1 << 20;
/// Maximum number of characters of a server's text in a message.
const MAX_SHOWN: usize = 300;
/// Time to open a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Keeps connections open and uses them again.
pub(super) type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

pub(super) fn client(tls: Option<ClientConfig>) -> HttpClient {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connector = HttpsConnectorBuilder::new();
    let connector = match tls {
        None => connector.with_webpki_roots(),
        Some(config) => connector.with_tls_config(config),
    };
    let connector = connector.https_or_http().enable_http1().wrap_connector(tcp);
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector)
}

/// Advice for an error of a connection, if certificates are the cause; empty otherwise.
#[must_use]
pub fn certificate_hint(error: &str) -> &'static str {
    match error.contains("certificate") {
        true => {
            ". If the server's certificate is of a private authority, give that authority's \
             certificate with --cacert"
        }
        false => "",
    }
}

pub(super) fn url(base: &str, path: &str) -> anyhow::Result<Uri> {
    let expected = || {
        format!(
            "expected a URL such as http://127.0.0.1:8080 and a path, got `{base}` and `{path}`"
        )
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let url: Uri = format!("{base}{slash}{path}").parse().with_context(expected)?;
    let is_http = matches!(url.scheme_str(), Some("http" | "https"));
    anyhow::ensure!(is_http && url.host().is_some(), expected());
    Ok(url)
}

pub(super) async fn first_model(
    client: &HttpClient,
    url: &Uri,
    headers: &HeaderMap,
    timeout: Duration,
) -> anyhow::Result<String> {
    let ask = async {
        let response = send(client, Method::GET, url, headers, Vec::new()).await?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        let body = Limited::new(response.into_body(), MAX_REPLY_BYTES).collect().await;
        Ok(body.map_err(|error| failed("connection lost", error.to_string()))?.to_bytes())
    };
    let body = tokio::time::timeout(timeout, ask).await.context("there was no answer in time")?;
    let body = body.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let models: Value = serde_json::from_slice(&body).context("expected a list of models")?;
    let id = models["data"][0]["id"].as_str();
    Ok(id.context("the server lists no model: name one with --model")?.to_owned())
}

pub(super) async fn send(
    client: &HttpClient,
    method: Method,
    url: &Uri,
    headers: &HeaderMap,
    body: Vec<u8>,
) -> Result<Response<Incoming>, Failure> {
    let mut request = Request::new(Full::new(Bytes::from(body)));
    *request.method_mut() = method;
    *request.uri_mut() = url.clone();
    *request.headers_mut() = headers.clone();
    let mut reply = client.request(request.clone()).await;
    // A server may close a connection that was idle just when the request is sent. llama.cpp's does
    // after some requests.
    if reply.as_ref().is_err_and(was_closed) {
        reply = client.request(request).await;
    }
    reply.map_err(|error| {
        let kind = if error.is_connect() { "cannot connect" } else { "connection lost" };
        let message = chain(&error);
        let hint = certificate_hint(&message);
        failed(kind, message + hint)
    })
}

/// Whether the connection was closed before anything of the reply came.
fn was_closed(error: &hyper_util::client::legacy::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    cause.is_some_and(hyper::Error::is_incomplete_message)
}

/// The failure for a reply whose status is not 200.
pub(super) async fn refusal(response: Response<Incoming>) -> Failure {
    let status = response.status();
    if status == StatusCode::TOO_MANY_REQUESTS {
        let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let seconds = seconds.and_then(|value| value.trim().parse().ok());
        return Failure::Overloaded { retry_after: seconds.map(Duration::from_secs) };
    }
    let body = Limited::new(response.into_body(), MAX_REPLY_BYTES).collect().await;
    let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let message = match serde_json::from_slice::<Value>(&body) {
        Ok(reply) => answer::error_message(&reply),
        Err(_) => shown(&String::from_utf8_lossy(&body)),
    };
    failed(&format!("status {}", status.as_u16()), message)
}

pub(super) fn failed(kind: &str, message: impl Into<String>) -> Failure {
    Failure::Counted { kind: kind.to_owned(), message: message.into() }
}

/// An error and its causes on one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

/// The beginning of a server's text, without line breaks and control characters.
pub(super) fn shown(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MAX_SHOWN).collect()
}
