//! The hosts that may be in the addresses of requests.
//!
//! A web page can give its own name the address of this machine (DNS rebinding). For its browser
//! the server then has the same origin as the page, so only the name in the address distinguishes
//! such a page from others. An IP address cannot be rebound.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;
use axum::http::header::HOST;
use axum::http::uri::Authority;

/// A name of the server for [`Access::allowed_hosts`](crate::Access::allowed_hosts), or all names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedHost(Option<String>);

impl AllowedHost {
    /// Every name.
    #[must_use]
    pub fn any() -> Self {
        Self(None)
    }

    pub(crate) fn admits(&self, host: &Authority) -> bool {
        self.0.as_deref().is_none_or(|name| host.host().eq_ignore_ascii_case(name))
    }
}

impl FromStr for AllowedHost {
    type Err = String;

    /// Parses a name without a port, or `*`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::any());
        }
        let is_name = text
            .parse()
            .is_ok_and(|authority: Authority| authority.host() == text && !text.is_empty());
        match is_name && !text.contains('*') {
            true => Ok(Self(Some(text.to_owned()))),
            false => Err(format!("expected a name such as llm.example, or *, got `{text}`")),
        }
    }
}

/// The host in the address of a request, with its port.
pub(crate) fn host(headers: &HeaderMap) -> Option<Authority> {
    headers.get(HOST)?.to_str().ok()?.parse().ok()
}

/// Whether a host can only be this machine.
pub(crate) fn is_this_machine(host: &Authority) -> bool {
    is_localhost(host) || address(host).is_some_and(|address| address.is_loopback())
}

/// Whether no page can have given itself this host.
pub(crate) fn is_fixed(host: &Authority) -> bool {
    is_localhost(host) || address(host).is_some()
}

fn is_localhost(host: &Authority) -> bool {
    host.host().eq_ignore_ascii_case("localhost")
}

fn address(host: &Authority) -> Option<IpAddr> {
    host.host().trim_start_matches('[').trim_end_matches(']').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the comparison of names ignores case and port. Texts with more than a name are refused.
    #[test]
    fn allowed_hosts_are_parsed() {
        let host = |text: &str| text.parse::<Authority>().expect("a host");
        let allowed: AllowedHost = "llm.Example".parse().expect("a name");
        assert!(allowed.admits(&host("LLM.example:8080")) && allowed.admits(&host("llm.example")));
        for other in ["example", "a.llm.example", "llm.example.com:80", "127.0.0.1"] {
            assert!(!allowed.admits(&host(other)), "{other}");
        }
        assert!("*".parse::<AllowedHost>().is_ok_and(|all| all.admits(&host("a.example"))));
        for bad in ["", "a.example:80", "http://a.example", "a.example/x", "a b", "*.example"] {
            assert!(
                bad.parse::<AllowedHost>().is_err_and(|error| error.contains("expected")),
                "{bad}"
            );
        }
    }
}
