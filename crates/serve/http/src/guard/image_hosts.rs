//! Fetches the images that requests name by URL, from the hosts that the operator has named.
//!
//! Clients choose the URLs, so the server must not become a way into its own network: a host has to
//! be on the list, its addresses have to be public, and each redirect is checked like the first URL.
//! Addresses are checked when the connection is made, because a name may get another address after
//! an earlier check. Size, time and the number of fetches are bounded, and a fetch ends when its
//! request does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use ureq::config::Config;
use ureq::http::header::{ACCEPT, LOCATION};
use ureq::http::uri::{Authority, Scheme, Uri};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

/// Maximum length of a URL in bytes.
const URL_BYTES_MAX: usize = 4096;
/// Maximum number of redirects of one image.
const REDIRECTS_MAX: usize = 3;
/// Maximum size in bytes of a file.
const FILE_BYTES_MAX: u64 = 20 << 20;
/// Time within which a file has to arrive, redirects included.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Time within which a connection has to be made. Only this cannot be ended early.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);
/// Maximum number of files that are fetched at the same time: twice as many as the requests of an
/// engine fetch, so that no request waits for connections that are still being made for ended
/// requests.
const FETCHES_MAX: usize = 64;
/// Maximum size in bytes of the headers of an answer.
const HEADER_BYTES_MAX: usize = 16 << 10;

/// A host whose images may be fetched: a name, `images.example.com`, or all names below one,
/// `*.example.com`. Without a port (`images.example.com:8443`), only those of http and https are
/// admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageHost {
    /// Lowercase.
    name: String,
    /// Whether names below `name` are meant, and not the name itself.
    below: bool,
    port: Option<u16>,
}

impl FromStr for ImageHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (below, rest) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let refused = || {
            let expected = "expected a host such as images.example.com, *.example.com or \
                            images.example.com:8443";
            format!("{expected}, got `{text}`")
        };
        let authority: Authority = rest.parse().map_err(|_| refused())?;
        let (host, port) = (authority.host(), authority.port_u16());
        let whole = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        if host.is_empty() || host.contains('*') || whole != rest {
            return Err(refused());
        }
        Ok(Self { name: host.to_ascii_lowercase(), below, port })
    }
}

impl ImageHost {
    fn admits(&self, url: &Uri) -> bool {
        let host = url.host().unwrap_or_default().to_ascii_lowercase();
        let is_named = match host.strip_suffix(&self.name) {
            Some(before) if self.below => before.len() > 1 && before.ends_with('.'),
            Some(before) => before.is_empty(),
            None => false,
        };
        let default = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
        is_named && url.port_u16().unwrap_or(default) == self.port.unwrap_or(default)
    }
}

/// Whether a URL has no user, and no port or one that exists. Otherwise [`Uri`] and a client
/// disagree about the port: for `:65536`, [`Uri`] reports none.
fn is_plain(url: &Uri) -> bool {
    let Some(authority) = url.authority() else { return false };
    let after_host = authority.as_str().strip_prefix(authority.host());
    after_host.is_some_and(|port| match port.strip_prefix(':') {
        Some(digits) if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
            digits.is_empty() || digits.parse::<u16>().is_ok_and(|number| number > 0)
        }
        Some(_) => false,
        None => port.is_empty(),
    })
}

/// Fetches images from some hosts. Clones share their limits.
///
/// ```
/// use stolon_http::ImageHosts;
///
/// let hosts = ImageHosts::new(vec!["images.example.com".parse().unwrap()]);
/// // let builder = stolon::Engine::builder().image_urls(move |url| hosts.fetch(url));
/// # drop(hosts);
/// ```
#[derive(Clone, Debug)]
pub struct ImageHosts {
    hosts: Arc<[ImageHost]>,
    resolver: SharedResolver,
    permits: Arc<Semaphore>,
    file_bytes_max: u64,
    time_max: Duration,
}

impl ImageHosts {
    /// Fetches from these hosts: files of at most 20 MiB, each within 10 seconds, at most 64 at a
    /// time.
    #[must_use]
    pub fn new(hosts: Vec<ImageHost>) -> Self {
        Self::with_resolver(hosts, PublicAddresses::default())
    }

    fn with_resolver(hosts: Vec<ImageHost>, resolver: impl Resolver) -> Self {
        Self {
            hosts: hosts.into(),
            resolver: SharedResolver(Arc::new(resolver)),
            permits: Arc::new(Semaphore::new(FETCHES_MAX)),
            file_bytes_max: FILE_BYTES_MAX,
            time_max: TIME_MAX,
        }
    }

    /// A client for one fetch, which can be ended without the others.
    fn agent(&self) -> Agent {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(HEADER_BYTES_MAX)
            // A proxy would look up the names itself.
            .proxy(None)
            // Each file has a connection of its own, whose address is checked.
            .max_idle_connections(0)
            .timeout_resolve(Some(CONNECT_TIME_MAX))
            .timeout_connect(Some(CONNECT_TIME_MAX))
            .user_agent(concat!("stolon/", env!("CARGO_PKG_VERSION")))
            .build();
        Agent::with_parts(config, DefaultConnector::default(), self.resolver.clone())
    }

    /// The file at `url`. Has to be called on a tokio runtime, on whose blocking threads it waits. If
    /// the future is dropped, the connection is closed.
    ///
    /// # Errors
    /// A message with the expected and the received value.
    pub fn fetch(
        &self,
        url: Arc<str>,
    ) -> impl Future<Output = Result<Vec<u8>, String>> + Send + use<> {
        let hosts = self.clone();
        async move {
            let permit = Arc::clone(&hosts.permits).acquire_owned().await;
            let permit = permit.map_err(|_| "the server is stopping")?;
            let agent = hosts.agent();
            let _ended_with_the_request = Fetching(Some(agent.clone()));
            let job = tokio::task::spawn_blocking(move || {
                // Returned when the thread is free, even if the request is gone.
                let _returned = permit;
                hosts.fetch_here(&agent, &url)
            });
            job.await.map_err(|_| "the server is stopping")?
        }
    }

    /// As [`Self::fetch`], on the calling thread.
    fn fetch_here(&self, agent: &Agent, url: &str) -> Result<Vec<u8>, String> {
        let end = Instant::now() + self.time_max;
        let mut url = self.admitted(url)?;
        for _ in 0..=REDIRECTS_MAX {
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let request = agent.get(url.clone()).header(ACCEPT, "image/*");
            let request = request.config().timeout_global(Some(left)).build();
            let failed = |error: Error| self.failure(&url, &error);
            let mut response = request.call().map_err(failed)?;
            let status = response.status();
            if status.is_redirection() {
                let location = response.headers().get(LOCATION);
                let location = location.and_then(|location| location.to_str().ok());
                url = self.redirected(&url, location.unwrap_or_default())?;
                continue;
            }
            if status.as_u16() != 200 {
                return Err(format!("{}: expected status 200, got {status}", host_of(&url)));
            }
            // A body of exactly the limit counts as one that exceeds it.
            let body = response.body_mut().with_config().limit(self.file_bytes_max + 1);
            return body.read_to_vec().map_err(failed);
        }
        Err(format!("{}: expected at most {REDIRECTS_MAX} redirects, got more", host_of(&url)))
    }

    /// The URL, if it is one of a host that is on the list.
    fn admitted(&self, text: &str) -> Result<Uri, String> {
        /// Number of characters of a URL that an error shows.
        const SHOWN: usize = 80;
        let refused = |expected: &str| {
            let shown: String = text.chars().take(SHOWN).collect();
            format!("expected {expected}, got {shown:?}")
        };
        if text.len() > URL_BYTES_MAX {
            let expected = format!("a URL of at most {URL_BYTES_MAX} bytes");
            return Err(format!("expected {expected}, got one of {} bytes", text.len()));
        }
        let is_http = |url: &Uri| {
            [Some(&Scheme::HTTP), Some(&Scheme::HTTPS)].contains(&url.scheme()) && is_plain(url)
        };
        let url = text.parse().ok().filter(is_http);
        let expected = "an http or https URL without a user and with a port from 1 to 65535, \
                        or a data URL";
        let url = url.ok_or_else(|| refused(expected))?;
        match self.hosts.iter().any(|host| host.admits(&url)) {
            true => Ok(url),
            false => Err(refused("a URL of a host that this server fetches images from")),
        }
    }

    /// The target of a redirect from `from`, a URL or an absolute path.
    fn redirected(&self, from: &Uri, location: &str) -> Result<Uri, String> {
        let target = match location.strip_prefix('/').filter(|rest| !rest.starts_with('/')) {
            Some(_) => {
                let (scheme, authority) = (from.scheme_str(), from.authority());
                let server = scheme.zip(authority);
                server.map(|(scheme, authority)| format!("{scheme}://{authority}{location}"))
            }
            None => None,
        };
        let target = self.admitted(target.as_deref().unwrap_or(location));
        let target = target.map_err(|error| format!("{} redirects: {error}", host_of(from)))?;
        if from.scheme() == Some(&Scheme::HTTPS) && target.scheme() == Some(&Scheme::HTTP) {
            return Err(format!("{} redirects: expected https, got http", host_of(from)));
        }
        Ok(target)
    }

    /// The error of a request, in words that say nothing about the network.
    fn failure(&self, url: &Uri, error: &Error) -> String {
        tracing::debug!("image at {}: {error}", host_of(url));
        let host = host_of(url);
        match error {
            Error::BodyExceedsLimit(_) => {
                format!("{host}: expected at most {} bytes, got more", self.file_bytes_max)
            }
            Error::Timeout(_) => {
                format!("{host}: expected the file within {:?}, got no more in time", self.time_max)
            }
            Error::Other(_) => format!("{host}: expected a public address, got a private one"),
            _ => format!("{host}: expected an answer, got none"),
        }
    }
}

/// A fetch that is being made. Dropping it closes the connection of its client.
#[derive(Debug)]
struct Fetching(Option<Agent>);

impl Drop for Fetching {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Agent::shutdown);
    }
}

/// The resolver of all clients.
#[derive(Clone, Debug)]
struct SharedResolver(Arc<dyn Resolver>);

impl Resolver for SharedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        self.0.resolve(uri, config, timeout)
    }
}

fn host_of(url: &Uri) -> &str {
    url.host().unwrap_or_default()
}

/// Looks up names, and leaves out addresses that are not public.
#[derive(Debug, Default)]
struct PublicAddresses(DefaultResolver);

impl Resolver for PublicAddresses {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let mut public = self.empty();
        let found = self.0.resolve(uri, config, timeout)?;
        found.iter().filter(|found| is_public(found.ip())).for_each(|found| public.push(*found));
        match public.is_empty() {
            true => Err(Error::Other("no public address".into())),
            false => Ok(public),
        }
    }
}

/// Whether an address belongs to the public internet: global unicast addresses that have no special
/// purpose (IANA's registries).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match embedded_v4(address) {
            Some(address) => is_public_v4(address),
            None => {
                let [first, second, ..] = address.segments();
                let is_global = first & 0xe000 == 0x2000;
                let is_protocol = first == 0x2001 && second < 0x200;
                let is_example =
                    (first, second) == (0x2001, 0xdb8) || first == 0x3fff && second & 0xf000 == 0;
                // 6to4
                is_global && !is_protocol && !is_example && first != 0x2002
            }
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || address.is_multicast()
        || matches!((a, b, c), (0 | 240.., ..) | (192, 0, 0) | (192, 88, 99))
        // Shared by providers, and benchmarks.
        || (a == 100 && (64..128).contains(&b))
        || (a == 198 && (18..20).contains(&b));
    !special
}

/// The IPv4 address that an IPv6 address contains: mapped, or translated by NAT64.
fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let nat64 = address.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0];
    let [.., a, b, c, d] = address.octets();
    address.to_ipv4_mapped().or(nat64.then_some(Ipv4Addr::new(a, b, c, d)))
}

#[cfg(test)]
mod tests;
