//! Access control: API keys for clients' routes; the operator's key, or this machine, for
//! `/v1/cache`, `/admin` and `/metrics`.
//!
//! Two kinds of callers are kept apart from the operator on the same machine: clients behind a
//! reverse proxy, whose connections come from this machine, and web pages that are open in a
//! browser here, which can send requests to 127.0.0.1.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use stolon::Quota;

use crate::guard::deadline::{self, Deadline};
use crate::guard::hosts::{self, AllowedHost};
use crate::guard::keys::{AcceptedKey, ApiKeys, Secret};
use crate::wire::error::{ApiError, cut};
use crate::wire::peer::{ClientName, Peer};
use crate::wire::receive::linger;

/// Headers by which reverse proxies show that they forward a request.
const FORWARDED: [&str; 5] =
    ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"];

/// Headers that tell who sends a request, from where, and to which host. One that comes twice is
/// refused: a proxy may have checked the other one.
const SINGLE: [HeaderName; 7] = [
    header::HOST,
    header::AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("x-moondream-auth"),
    header::ORIGIN,
    HeaderName::from_static("sec-fetch-site"),
    deadline::HEADER,
];

/// Where the tenant of a request comes from. Tenants never share cached prefixes; a request's own
/// `cache_salt` divides its tenant's prefixes further.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tenants {
    /// All requests belong to one tenant.
    #[default]
    One,
    /// The tenant is the name of the API key.
    ByKey,
    /// The tenant is the value of a header, which a reverse proxy sets. A request without it is
    /// refused.
    ByHeader(HeaderName),
}

/// The rules of access.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Keys for clients' routes. If there are none, everybody may use these.
    pub api_keys: ApiKeys,
    /// The key for the operator's routes. Without one, only connections from this machine may use
    /// them.
    pub admin_key: Option<Secret>,
    /// Where the tenant of a request comes from.
    pub tenants: Tenants,
    /// Without API keys, names that may be in the addresses of clients' routes, next to `localhost`
    /// and IP addresses. If there are none, only connections from this machine are checked.
    pub allowed_hosts: Vec<AllowedHost>,
}

/// The client that sent a request, and its limits. A request extension.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    /// Owner of the client's sessions: the tenant or, without tenants, the name of its key. Empty
    /// if there are neither.
    pub(crate) owner: String,
    /// The engine's name for the client: the owner or, if that is empty, the address that the
    /// request came from, or the user of the socket. `None` if that is not known.
    pub(crate) identity: Option<Arc<str>>,
    /// The time by which the client wants its answer.
    pub(crate) deadline: Deadline,
    /// The quota of the client's key, if it has limits.
    pub(crate) quota: Option<Quota>,
}

/// The tenant of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tenant(Option<String>);

impl Tenant {
    pub(crate) fn named(name: Option<String>) -> Self {
        Self(name)
    }

    /// The salt for the engine. The length of the tenant's name comes first, so that no choice of
    /// `salt` gives another tenant's.
    pub(crate) fn salt(&self, salt: Option<&str>) -> Option<String> {
        match (&self.0, salt) {
            (None, salt) => salt.map(str::to_owned),
            (Some(tenant), salt) => {
                Some(format!("{}:{tenant}{}", tenant.len(), salt.unwrap_or_default()))
            }
        }
    }
}

impl Caller {
    /// Adds the client's identity, the salt of its tenant and its quota to a request to the engine.
    pub(crate) fn sign(&self, mut request: stolon::Request) -> stolon::Request {
        if let Some(identity) = &self.identity {
            request = request.tenant(Arc::clone(identity));
        }
        if let Some(salt) = self.tenant.salt(None) {
            request = request.cache_salt(salt);
        }
        if let Some(quota) = &self.quota {
            request = request.quota(quota.clone());
        }
        request
    }
}

/// Middleware of clients' routes: checks the API key, and determines the tenant and the deadline.
pub(crate) async fn client(
    State(access): State<Arc<Access>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    match access.caller(Peer::of(&request), request.headers()) {
        Ok(caller) => {
            if let Some(name) = &caller.identity {
                request.extensions_mut().insert(ClientName(Arc::clone(name)));
            }
            request.extensions_mut().insert(caller);
        }
        Err(error) => {
            linger(request.into_body());
            return Err(error);
        }
    }
    Ok(next.run(request).await)
}

/// Middleware of the operator's routes: checks the operator's key or the connection's address.
pub(crate) async fn admin(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Err(error) = access.check_admin(Peer::of(&request), request.headers()) {
        linger(request.into_body());
        return Err(error);
    }
    Ok(next.run(request).await)
}

impl Access {
    /// The client that has sent a request with these headers.
    fn caller(&self, peer: Option<Peer>, headers: &HeaderMap) -> Result<Caller, ApiError> {
        self.check_single(headers)?;
        self.check_host(peer, headers)?;
        let key = self.key(headers)?;
        let tenant = self.tenant(key.as_deref(), headers)?;
        let deadline = Deadline::of(headers)?;
        let key_name = key.as_deref().map(AcceptedKey::name);
        let owner = tenant.0.as_deref().or(key_name).unwrap_or_default().to_owned();
        let identity = match owner.as_str() {
            "" => peer.map(|peer| peer.client().into()),
            owner => Some(owner.into()),
        };
        let quota = key.and_then(|key| key.quota.clone());
        Ok(Caller { tenant, owner, identity, deadline, quota })
    }

    /// The caller of a prompt that the server computes itself for the clients of a tenant.
    ///
    /// # Errors
    /// There are tenants and none is named, or the other way round, or no key has the name.
    pub(crate) fn caller_of(&self, tenant: Option<String>) -> Result<Caller, String> {
        match (&self.tenants, tenant.as_deref()) {
            (Tenants::One, Some(_)) => {
                return Err("`tenant`: expected none without --tenant-by, got one".to_owned());
            }
            (Tenants::ByKey | Tenants::ByHeader(_), None) => {
                return Err("`tenant` is required with --tenant-by: without one, \
                            no client would find the prompt"
                    .to_owned());
            }
            (Tenants::ByKey, Some(name)) if !self.api_keys.has_name(name) => {
                let name = cut(name.to_owned(), 80);
                return Err(format!("`tenant`: expected the name of an API key, got `{name}`"));
            }
            (Tenants::One, None) | (Tenants::ByKey | Tenants::ByHeader(_), Some(_)) => {}
        }
        let owner = tenant.clone().unwrap_or_default();
        let identity = tenant.as_deref().map(Arc::from);
        let tenant = Tenant(tenant);
        Ok(Caller { tenant, owner, identity, deadline: Deadline::default(), quota: None })
    }

    /// Refuses a request that has one of the `SINGLE` headers twice.
    fn check_single(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let of_tenant = match &self.tenants {
            Tenants::ByHeader(header) => Some(header),
            Tenants::One | Tenants::ByKey => None,
        };
        let is_repeated = |name: &&HeaderName| headers.get_all(*name).iter().nth(1).is_some();
        match SINGLE.iter().chain(of_tenant).find(is_repeated) {
            None => Ok(()),
            Some(name) => {
                let message = format!("expected the header {name} once, got it several times");
                Err(ApiError::invalid(None, message))
            }
        }
    }

    /// The tenant of a request with this key.
    fn tenant(&self, key: Option<&AcceptedKey>, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        match &self.tenants {
            Tenants::One => Ok(Tenant(None)),
            // A router without keys has one tenant, which has no name.
            Tenants::ByKey => {
                let name = key.map_or("", AcceptedKey::name);
                Ok(Tenant(Some(name.to_owned())))
            }
            Tenants::ByHeader(header) => match headers.get(header).map(|value| value.to_str()) {
                Some(Ok(tenant)) => Ok(Tenant(Some(tenant.to_owned()))),
                _ => {
                    let message = format!("expected the header {header} with the tenant's name");
                    Err(ApiError::invalid(None, message))
                }
            },
        }
    }

    /// The request's key; `None` if there are no keys.
    fn key(&self, headers: &HeaderMap) -> Result<Option<Arc<AcceptedKey>>, ApiError> {
        if self.api_keys.is_empty() {
            return Ok(None);
        }
        let given = bearer(headers).or_else(|| plain_key(headers)).unwrap_or_default();
        let refused = || {
            ApiError::unauthorized("expected the header Authorization: Bearer KEY with an API key")
        };
        self.api_keys.find(given).map(Some).ok_or_else(refused)
    }

    /// Refuses a name that a web page may have given the address of the server (DNS rebinding).
    /// Without API keys, nothing else keeps such a page from using the model. Only the host tells:
    /// a page can send any other header that a program or a proxy sends.
    fn check_host(&self, peer: Option<Peer>, headers: &HeaderMap) -> Result<(), ApiError> {
        let is_checked = match peer {
            Some(Peer::Address(_)) if self.allowed_hosts.is_empty() => is_on_this_machine(peer),
            Some(Peer::Address(_)) => true,
            // A browser reaches a socket by no name.
            Some(Peer::Program { .. }) | None => false,
        };
        if !is_checked || !self.api_keys.is_empty() {
            return Ok(());
        }
        let host = hosts::host(headers);
        let is_known = |host| {
            hosts::is_fixed(host) || self.allowed_hosts.iter().any(|allowed| allowed.admits(host))
        };
        if host.as_ref().is_some_and(is_known) {
            return Ok(());
        }
        let got = host.map_or("none".to_owned(), |host| cut(host.to_string(), 80));
        Err(forbidden(format!(
            "without API keys (--api-key), the host in the address must be localhost, an IP address, \
             or a name given with --allowed-hosts, such as that of a reverse proxy; got {got}"
        )))
    }

    fn check_admin(&self, peer: Option<Peer>, headers: &HeaderMap) -> Result<(), ApiError> {
        self.check_single(headers)?;
        if is_cross_site(headers) {
            return Err(forbidden("a web page of another site may not use this route"));
        }
        if let Some(key) = &self.admin_key {
            if key.matches(bearer(headers).unwrap_or_default()) {
                return Ok(());
            }
            let message =
                "expected the header Authorization: Bearer KEY with the administrator's key";
            return Err(ApiError::unauthorized(message));
        }
        if let Some(Peer::Program { is_operator: false, .. }) = peer {
            return Err(forbidden(
                "without an administrator's key (--admin-key) only the user who runs the server, and \
                 root, can use this route through its socket",
            ));
        }
        if !is_local(peer, headers) {
            return Err(forbidden(
                "without an administrator's key (--admin-key) this route can be used only from the \
                 machine that the server runs on",
            ));
        }
        // A web page can give its own name the address 127.0.0.1 (DNS rebinding).
        if names_this_machine(peer, headers) {
            return Ok(());
        }
        Err(forbidden(
            "without an administrator's key (--admin-key) this route can be used only with the host \
             localhost, 127.0.0.1 or [::1] in its address",
        ))
    }
}

/// Whether a connection comes from this machine, and from a program that is not a proxy.
fn is_local(peer: Option<Peer>, headers: &HeaderMap) -> bool {
    is_on_this_machine(peer) && !FORWARDED.iter().any(|name| headers.contains_key(*name))
}

fn is_on_this_machine(peer: Option<Peer>) -> bool {
    match peer {
        Some(Peer::Address(address)) => address.ip().to_canonical().is_loopback(),
        Some(Peer::Program { .. }) => true,
        None => false,
    }
}

/// Whether the request was sent to a name that can only be this machine. No name leads a browser to
/// a Unix domain socket, and programs write any name in the addresses of its routes.
fn names_this_machine(peer: Option<Peer>, headers: &HeaderMap) -> bool {
    matches!(peer, Some(Peer::Program { .. }))
        || hosts::host(headers).is_some_and(|host| hosts::is_this_machine(&host))
}

fn forbidden(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, message)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// The API key in the form of Anthropic's and Moondream's clients.
fn plain_key(headers: &HeaderMap) -> Option<&str> {
    headers.get("x-api-key").or_else(|| headers.get("x-moondream-auth"))?.to_str().ok()
}

/// Whether a browser sent the request for a page of another site.
fn is_cross_site(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").map(axum::http::HeaderValue::as_bytes);
    if site.is_some_and(|site| !matches!(site, b"same-origin" | b"none")) {
        return true;
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    let own = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    origin.map(|(_, authority)| authority) != own
}

#[cfg(test)]
mod tests;
