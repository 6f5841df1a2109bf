//! The other end of the connection on which a request came, and the client that sent it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request};

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Peer {
    /// A TCP connection from this address.
    Address(SocketAddr),
    /// A program that has connected to the server's Unix domain socket, so it runs on this machine.
    #[cfg_attr(
        not(all(unix, feature = "listen")),
        allow(dead_code, reason = "made by the listener of a socket")
    )]
    Program {
        /// The id of the user who runs it, if the system tells.
        uid: Option<u32>,
        /// Whether that user also runs the server, or is root.
        is_operator: bool,
    },
}

/// The engine's name for the client that sent a request. An extension of requests whose client is
/// known.
#[derive(Clone, Debug)]
pub(crate) struct ClientName(pub(crate) Arc<str>);

impl Peer {
    /// The peer of a request, if the server gave it to the router.
    pub(crate) fn of(request: &Request) -> Option<Self> {
        let extensions = request.extensions();
        let address = || extensions.get().map(|&ConnectInfo(address)| Self::Address(address));
        extensions.get().copied().or_else(address)
    }

    /// The name of an unknown client: its address, or the user who runs it. For an IPv6 address, it
    /// is the network, because one client usually has 2^64 addresses, and each would count as a
    /// client.
    pub(crate) fn client(&self) -> String {
        match self {
            Self::Address(address) => match address.ip().to_canonical() {
                IpAddr::V6(address) => {
                    let network = address.to_bits() >> 64 << 64;
                    format!("{}/64", Ipv6Addr::from_bits(network))
                }
                address => address.to_string(),
            },
            Self::Program { uid: Some(uid), .. } => format!("uid {uid}"),
            Self::Program { uid: None, .. } => "unix".to_owned(),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(out),
            Self::Program { .. } => out.write_str(&self.client()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: all addresses of an IPv6 network are one client, and IPv4 addresses are one each, also
    /// in their IPv6 form.
    #[test]
    fn a_network_is_one_client() {
        for (address, client) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:1:2::3", "2001:db8:1:2::/64"),
            ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
            ("2001:db8:1:3::3", "2001:db8:1:3::/64"),
        ] {
            let address: IpAddr = address.parse().expect("an address");
            assert_eq!(Peer::Address((address, 1).into()).client(), client);
        }
    }
}
