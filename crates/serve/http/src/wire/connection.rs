//! Accepts connections and serves HTTP/1.1 on them, with or without TLS, within limits on their
//! number and their times.
//!
//! A connection is either *receiving* (it waits for a request, or for the rest of one) or *busy* (a
//! complete request is being answered). Connections that have been receiving for a while are closed
//! when there are too many connections and when the server stops, so that neither new clients nor
//! the shutdown wait for a slow or idle client. Other receiving connections are kept for a moment,
//! because a request may be on its way: when the server stops, it is answered with status 503
//! instead of being lost. For the same reason a busy connection is not closed at the end of a reply
//! whose head did not announce it. Busy connections are closed only by the time limits of their
//! requests and by [`ConnectionLimits::write_timeout`].

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;

use crate::wire::activity::Activity;
use crate::wire::gate::Gate;
use crate::wire::listener::{Listener, Stream};
use crate::wire::peer::Peer;

/// Time for which a connection may be receiving before it can be closed to make room for others.
const GRACE: Duration = Duration::from_secs(1);
/// Pause between two attempts to make room, and after a failed `accept`.
const RETRY: Duration = Duration::from_millis(100);
/// Maximum size of a request's headers, in bytes. Larger ones are refused with status 431.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Limits of the connections of one listener.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Maximum number of open connections, at least 1.
    pub count: usize,
    /// Maximum time until a request's headers have arrived, from the opening of the connection or
    /// the end of the previous reply. A TLS handshake before that may take as long again.
    pub header_timeout: Duration,
    /// Maximum time in which a client accepts no byte of a reply.
    pub write_timeout: Duration,
}

/// Marks a connection as receiving again when the reply has been handed to the connection.
struct ReplyGuard(Arc<Activity>);

impl Drop for ReplyGuard {
    fn drop(&mut self) {
        self.0.receive();
    }
}

/// The listener's message to its connections. After each change they check whether they have to
/// close.
#[derive(Clone, Copy, Debug, Default)]
struct Signal {
    stopping: bool,
}

/// Serves until `stop` becomes true, and then until the connections of that moment have ended.
/// Connections that are accepted after that are answered by the gate. They do not prolong this by
/// more than a moment.
pub async fn listen(
    listener: impl Into<Listener>,
    gate: Arc<Gate>,
    limits: ConnectionLimits,
    tls: Option<TlsAcceptor>,
    mut stop: watch::Receiver<bool>,
) {
    let listener = listener.into();
    let (signal, _) = watch::channel(Signal::default());
    let permits = Arc::new(Semaphore::new(limits.count));
    let (open, mut ended) = mpsc::channel::<Infallible>(1);
    let (late, mut late_ended) = mpsc::channel::<Infallible>(1);
    let mut open = Some(open);
    // When the listener is closed, as soon as the older connections have ended.
    let mut end: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, limits.write_timeout, &permits, &signal) => accepted,
            // An error means that the sender was dropped, and with it the whole server.
            _ = stop.wait_for(|&stop| stop), if open.is_some() => {
                open = None;
                signal.send_modify(|signal| signal.stopping = true);
                continue;
            }
            _ = ended.recv(), if open.is_none() && end.is_none() => {
                // The system has accepted connections that were not taken over yet.
                end = Some(Instant::now() + RETRY);
                continue;
            }
            () = tokio::time::sleep(RETRY), if open.is_none() => {
                signal.send_modify(|_| {});
                if end.is_some_and(|end| end <= Instant::now()) {
                    break;
                }
                continue;
            }
        };
        let (stream, peer, permit) = accepted;
        let (gate, signal) = (Arc::clone(&gate), signal.subscribe());
        let (tls, open) = (tls.clone(), open.clone().unwrap_or_else(|| late.clone()));
        tokio::spawn(async move {
            serve(stream, peer, gate, limits, tls, signal).await;
            drop((permit, open));
        });
        if end.is_some_and(|end| end <= Instant::now()) {
            break;
        }
    }
    drop((listener, late));
    let limit = Instant::now() + GRACE + RETRY;
    while Instant::now() < limit && tokio::time::timeout(RETRY, late_ended.recv()).await.is_err() {
        signal.send_modify(|_| {});
    }
}

/// Waits for a connection. If there are too many, or the process has no file descriptors left,
/// idle ones are closed.
async fn accept(
    listener: &Listener,
    write_timeout: Duration,
    permits: &Arc<Semaphore>,
    signal: &watch::Sender<Signal>,
) -> (Stream, Peer, OwnedSemaphorePermit) {
    let permit = loop {
        if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
            break permit;
        }
        signal.send_modify(|_| {});
        tokio::time::sleep(RETRY).await;
    };
    let mut failed = false;
    loop {
        match listener.accept(write_timeout).await {
            Ok((stream, peer)) => return (stream, peer, permit),
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!("cannot accept a connection, trying again: {error}");
                }
                signal.send_modify(|_| {});
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Serves one connection until it ends or has to be closed.
async fn serve(
    stream: Stream,
    peer: Peer,
    gate: Arc<Gate>,
    limits: ConnectionLimits,
    tls: Option<TlsAcceptor>,
    mut signal: watch::Receiver<Signal>,
) {
    let activity = Activity::new();
    let Some(tls) = tls else {
        return exchange(stream, peer, gate, limits, activity, signal).await;
    };
    let handshake = tokio::time::timeout(limits.header_timeout, tls.accept(stream));
    let accepted = tokio::select! {
        accepted = handshake => accepted,
        () = must_close(&mut signal, &activity) => return,
    };
    match accepted {
        Ok(Ok(stream)) => exchange(Box::new(stream), peer, gate, limits, activity, signal).await,
        Ok(Err(error)) => tracing::debug!("no TLS connection with {peer}: {error}"),
        Err(_) => tracing::debug!("the TLS handshake of {peer} took too long"),
    }
}

/// Waits until a connection whose handshake has not ended has to make room.
async fn must_close(signal: &mut watch::Receiver<Signal>, activity: &Activity) {
    while signal.changed().await.is_ok() {
        if activity.receiving().is_some_and(|time| time >= GRACE) {
            return;
        }
    }
}

/// Answers the requests of a connection.
async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    peer: Peer,
    gate: Arc<Gate>,
    limits: ConnectionLimits,
    activity: Arc<Activity>,
    mut signal: watch::Receiver<Signal>,
) {
    let stopping = signal.clone();
    let service = service_fn(|request: Request<Incoming>| {
        answer(request, peer, Arc::clone(&gate), Arc::clone(&activity), stopping.clone())
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!("the connection of {peer} ended: {error}");
                }
                return;
            }
            () = activity.ended() => return,
            changed = signal.changed() => {
                if changed.is_err() {
                    return; // The listener has ended, which waits for older connections.
                }
                signal.mark_unchanged();
                if activity.receiving().is_some_and(|time| time >= GRACE) {
                    return;
                }
            }
        }
    }
}

async fn answer(
    request: Request<Incoming>,
    peer: Peer,
    gate: Arc<Gate>,
    activity: Arc<Activity>,
    signal: watch::Receiver<Signal>,
) -> Result<Response<Body>, Infallible> {
    let guard = ReplyGuard(Arc::clone(&activity));
    if request.body().is_end_stream() {
        activity.busy();
    }
    let mut request = request.map(Body::new);
    match peer {
        Peer::Address(address) => request.extensions_mut().insert(ConnectInfo(address)).is_some(),
        Peer::Program { .. } => request.extensions_mut().insert(peer).is_some(),
    };
    request.extensions_mut().insert(activity);
    let mut response = gate.answer(request).await;
    if signal.borrow().stopping {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    // The closure owns the guard and is dropped with the body, when the reply has been sent.
    let hold = move |error| {
        let _guard = &guard;
        error
    };
    Ok(response.map(|body| Body::new(body.map_err(hold))))
}

#[cfg(test)]
mod tests;
