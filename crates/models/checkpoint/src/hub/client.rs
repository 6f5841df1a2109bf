//! [`Client`] sends requests to the hub over HTTP.
//!
//! A hub, or a mirror of it, is not trusted. This file follows redirects itself instead of the HTTP
//! library, so that the token is sent only to the hub's own address and a redirect never leaves
//! TLS. The library bounds the size of headers, and [`copy`] bounds the size of bodies and the time
//! without progress.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use ureq::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, LOCATION, RANGE,
};
use ureq::http::uri::{Scheme, Uri};
use ureq::http::{HeaderMap, Method, Response};
use ureq::{Agent, Body};

use super::HubOptions;

/// Maximum number of redirects of one request.
const REDIRECTS_MAX: usize = 5;
/// Maximum size in bytes of the headers of an answer.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Reading a body fails if it is slower than this number of bytes per second, averaged over a
/// [window](Client::window).
const BYTES_PER_SECOND_MIN: u64 = 1024;

/// A request that failed.
#[derive(Debug)]
pub(super) struct Failure {
    /// The HTTP status of the hub's answer; `None` if there was no answer.
    pub(super) status: Option<u16>,
    pub(super) text: String,
    /// Whether a file arrived completely, but with other content than announced.
    pub(super) corrupt: bool,
}

impl Failure {
    /// A failure without an answer of the hub.
    pub(super) fn new(text: impl ToString) -> Self {
        Self { status: None, text: text.to_string(), corrupt: false }
    }

    /// A failure because an answer does not conform to the hub's interface.
    pub(super) fn answer(status: u16, text: impl ToString) -> Self {
        Self { status: Some(status), ..Self::new(text) }
    }

    /// A failure because the hash of a file is wrong.
    pub(super) fn corrupt(text: impl ToString) -> Self {
        Self { corrupt: true, ..Self::new(text) }
    }
}

/// The answer to a `HEAD` request.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) status: u16,
    /// The ETag that the hub itself has sent, not a server to which it redirects. It is not
    /// validated.
    pub(super) etag: Option<String>,
    /// Size of the file in bytes, if it was sent.
    pub(super) size: Option<u64>,
}

/// The answer to a successful request.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// The ETag that the hub itself has sent, not a server to which it redirects. It is not
    /// validated.
    pub(super) etag: Option<String>,
    /// Offset in the file of the body's first byte.
    pub(super) start: u64,
    /// Size of the whole file in bytes, if it was sent.
    pub(super) size: Option<u64>,
    pub(super) body: Body,
}

/// Sends requests to one hub. Connections are reused.
#[derive(Debug)]
pub(super) struct Client<'a> {
    agent: Agent,
    options: &'a HubOptions,
    endpoint: Uri,
}

impl<'a> Client<'a> {
    /// # Errors
    /// [`Failure`] if the endpoint is not an HTTP URL.
    pub(super) fn new(options: &'a HubOptions) -> Result<Self, Failure> {
        let endpoint: Uri = options.endpoint.parse().map_err(|error| {
            Failure::new(format!("`{}` is not a URL: {error}", options.endpoint))
        })?;
        if !is_http(&endpoint) {
            let got = &options.endpoint;
            return Err(Failure::new(format!("expected an http or https URL, got `{got}`")));
        }
        if endpoint.scheme() == Some(&Scheme::HTTP) {
            let endpoint = &options.endpoint;
            tracing::warn!(
                "the hub's address {endpoint} is not encrypted: others on the network can read the \
                 token and replace the model; use https"
            );
        }
        let limit = Some(options.timeout);
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(HEADER_BYTES_MAX)
            .user_agent(concat!("stolon/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(limit)
            .timeout_connect(limit)
            .timeout_send_request(limit)
            .timeout_recv_response(limit)
            .timeout_per_read(limit)
            .build()
            .into();
        Ok(Self { agent, options, endpoint })
    }

    /// Requests `path` of the hub, beginning with the byte `start`.
    ///
    /// # Errors
    /// [`Failure`] if there is no answer, or a status other than success.
    pub(super) fn get(&self, path: &str, start: u64) -> Result<Answer, Failure> {
        let last = self.request(&Method::GET, path, start)?;
        match last.response.status().is_success() {
            true => answer(last),
            false => Err(last.failure()),
        }
    }

    /// Requests the ETag and the size of the file `path`.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get). A redirect to another server is a success, because the hub
    /// has sent both values with it.
    pub(super) fn head(&self, path: &str) -> Result<Head, Failure> {
        let last = self.request(&Method::HEAD, path, 0)?;
        let status = last.response.status();
        if !status.is_success() && !status.is_redirection() {
            return Err(last.failure());
        }
        let length = || text(last.response.headers(), CONTENT_LENGTH.as_str())?.parse().ok();
        let size = last.linked_size.or_else(|| status.is_success().then(length)?);
        Ok(Head { status: status.as_u16(), etag: last.etag, size })
    }

    /// Sends a request and follows redirects. For `HEAD`, only redirects to the hub's own server
    /// are followed.
    fn request(&self, method: &Method, path: &str, start: u64) -> Result<Last, Failure> {
        let url = format!("{}{path}", self.options.endpoint);
        let mut url: Uri = url.parse().map_err(|e| Failure::new(format!("{url}: {e}")))?;
        let mut etag = None;
        let mut linked_size = None;
        for _ in 0..=REDIRECTS_MAX {
            let own = same_server(&url, &self.endpoint);
            let response = self.send(method, &url, own, start)?;
            let headers = response.headers();
            if own {
                etag = text(headers, "x-linked-etag").or(text(headers, ETAG.as_str()));
                etag = etag.map(|etag| etag.trim_start_matches("W/").replace('"', ""));
                linked_size = text(headers, "x-linked-size").and_then(|size| size.parse().ok());
            }
            let target = match text(headers, LOCATION.as_str()) {
                Some(location) if response.status().is_redirection() => {
                    Some(redirected(&url, &location)?)
                }
                _ => None,
            };
            match target {
                Some(target) if *method == Method::GET || same_server(&target, &self.endpoint) => {
                    url = target;
                }
                _ => return Ok(Last { response, url, etag, linked_size }),
            }
        }
        Err(Failure::new(format!("{url}: expected at most {REDIRECTS_MAX} redirects, got more")))
    }

    /// Sends one request. `own` says whether `url` is on the hub's own server.
    fn send(
        &self,
        method: &Method,
        url: &Uri,
        own: bool,
        start: u64,
    ) -> Result<Response<Body>, Failure> {
        let mut request = match *method {
            Method::HEAD => self.agent.head(url.clone()),
            _ => self.agent.get(url.clone()),
        };
        request = request.header(ACCEPT_ENCODING, "identity");
        if let (true, Some(token)) = (own, &self.options.token) {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header(RANGE, format!("bytes={start}-"));
        }
        request.call().map_err(|error| Failure::new(format!("{url}: {error}")))
    }

    /// The time over which the speed of a body is averaged.
    pub(super) fn window(&self) -> Duration {
        self.options.timeout * 6
    }
}

fn is_http(url: &Uri) -> bool {
    url.host().is_some() && [Some(&Scheme::HTTP), Some(&Scheme::HTTPS)].contains(&url.scheme())
}

/// Whether two HTTP URLs have the same scheme, host and port.
fn same_server(a: &Uri, b: &Uri) -> bool {
    let port = |url: &Uri| {
        url.port_u16().unwrap_or(if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 })
    };
    let host = |url: &Uri| url.host().map(str::to_ascii_lowercase);
    a.scheme() == b.scheme() && host(a) == host(b) && port(a) == port(b)
}

/// The target of a redirect from `from`. `location` is a URL or an absolute path.
fn redirected(from: &Uri, location: &str) -> Result<Uri, Failure> {
    let refused = |why: &str| Failure::new(format!("{from}: redirects to `{location}`: {why}"));
    let target: Uri = location.parse().map_err(|_| refused("it is not a URL"))?;
    if target.authority().is_some() {
        if !is_http(&target) {
            return Err(refused("expected an http or https URL"));
        }
        if from.scheme() == Some(&Scheme::HTTPS) && target.scheme() == Some(&Scheme::HTTP) {
            return Err(refused("it is not encrypted"));
        }
        return Ok(target);
    }
    let mut parts = from.clone().into_parts();
    parts.path_and_query = target.into_parts().path_and_query;
    Uri::from_parts(parts).map_err(|_| refused("expected a URL or an absolute path"))
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// The answer to a request after all redirects.
struct Last {
    response: Response<Body>,
    url: Uri,
    /// The ETag that the hub itself sent.
    etag: Option<String>,
    /// The size of the file that the hub itself sent.
    linked_size: Option<u64>,
}

impl Last {
    /// The failure of a status other than success.
    fn failure(&self) -> Failure {
        let status = self.response.status();
        Failure::answer(status.as_u16(), format!("{}: {status}", self.url))
    }
}

/// Reads the start and the size from the headers of a successful answer.
fn answer(last: Last) -> Result<Answer, Failure> {
    let Last { response, etag, linked_size, .. } = last;
    let status = response.status().as_u16();
    let headers = response.headers();
    let (start, size) = match text(headers, CONTENT_RANGE.as_str()).filter(|_| status == 206) {
        Some(range) => match parse_range(&range) {
            Some((start, size)) => (start, Some(size)),
            None => return Err(Failure::answer(status, format!("malformed range `{range}`"))),
        },
        None => (0, text(headers, CONTENT_LENGTH.as_str()).and_then(|size| size.parse().ok())),
    };
    if let (Some(linked), Some(size)) = (linked_size, size)
        && linked != size
    {
        let text = format!("expected {linked} bytes (x-linked-size), got {size}");
        return Err(Failure::answer(status, text));
    }
    let size = size.or(linked_size);
    Ok(Answer { status, etag, start, size, body: response.into_body() })
}

/// Parses the start and the total size of `bytes START-END/SIZE`.
fn parse_range(range: &str) -> Option<(u64, u64)> {
    let (start, rest) = range.strip_prefix("bytes ")?.split_once('-')?;
    Some((start.parse().ok()?, rest.split_once('/')?.1.parse().ok()?))
}

/// Copies at most `bytes_max` bytes from `body` to `out`, and calls `progress` with the number of
/// copied bytes from time to time. Returns this number.
///
/// # Errors
/// The first error of reading or writing. A body that has more bytes, or that is too slow during a
/// time of `window`, is also an error.
pub(super) fn copy(
    body: Body,
    out: &mut dyn Write,
    bytes_max: u64,
    window: Duration,
    mut progress: impl FnMut(u64),
) -> std::io::Result<u64> {
    let mut body = body.into_reader();
    let mut buffer = vec![0; 256 << 10];
    let mut copied = 0;
    let (mut window_start, mut window_bytes) = (Instant::now(), 0);
    loop {
        let count = body.read(&mut buffer)?;
        if count == 0 {
            return Ok(copied);
        }
        copied += count as u64;
        window_bytes += count as u64;
        if copied > bytes_max {
            let text = format!("expected at most {bytes_max} bytes, got more");
            return Err(std::io::Error::other(text));
        }
        out.write_all(&buffer[..count])?;
        if window_start.elapsed() >= window {
            if window_bytes < (window.as_secs_f64() * BYTES_PER_SECOND_MIN as f64) as u64 {
                let text = format!("slower than {BYTES_PER_SECOND_MIN} bytes per second");
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
            (window_start, window_bytes) = (Instant::now(), 0);
        }
        progress(copied);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    /// Goal: only the same scheme, host and port count as the hub's own server.
    #[test]
    fn another_scheme_host_or_port_is_another_server() {
        let hub = uri("https://hub.example/api");
        for own in ["https://hub.example/x", "https://HUB.example:443/x"] {
            assert!(same_server(&uri(own), &hub), "{own}");
        }
        for other in [
            "http://hub.example/",
            "https://hub.example:444/",
            "https://cdn.hub.example/",
            "https://hub.example.evil/",
            "https://hub.example@evil/",
        ] {
            assert!(!same_server(&uri(other), &hub), "{other}");
        }
    }

    /// Goal: redirects lead only to HTTP servers, and never from TLS to a connection without it.
    #[test]
    fn redirects_do_not_leave_http_or_tls() {
        let from = uri("https://hub.example/a?b");
        let to = |location: &str| redirected(&from, location).map(|url| url.to_string());
        assert_eq!(to("https://cdn.example/x?y").unwrap(), "https://cdn.example/x?y");
        assert_eq!(to("/c/d?e").unwrap(), "https://hub.example/c/d?e");
        for location in ["http://hub.example/a", "ftp://x/y", "file:///etc/passwd", "", "a b"] {
            assert!(to(location).is_err(), "{location}: {:?}", to(location));
        }
    }
}
