//! Where the server listens, as flags of `stolon serve`.

use std::fmt;
use std::net::SocketAddr;
#[cfg(unix)]
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
#[cfg(unix)]
use stolon_http::SocketFile;
use stolon_http::{Access, Listener, RootPath};
use tokio::net::TcpListener;

use crate::terminal;

/// Where the server listens.
#[derive(Debug, Args)]
pub(super) struct AddressArgs {
    /// IP address or host name to listen on
    ///
    /// Use 0.0.0.0 to listen on all interfaces. Everybody who can reach the address can then use
    /// the model, unless API keys are set.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// TCP port to listen on. 0 chooses a free port, which is printed
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Unix domain socket to listen on, instead of a TCP port. --host and --port then have no effect
    ///
    /// The umask of the process determines who may connect: with 007, its user and group. A socket
    /// that a killed server has left is replaced.
    #[cfg(unix)]
    #[arg(long, value_name = "PATH")]
    uds: Option<PathBuf>,
    /// Path below which clients reach the server, such as /llm behind a reverse proxy
    ///
    /// All routes are then answered below this path and without it, so it does not matter whether
    /// the proxy removes the path from requests. /openapi.json names it as the server's address.
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub(super) root_path: RootPath,
}

/// An address at which the server listens.
#[derive(Debug)]
pub(super) struct Bound {
    place: Place,
    is_tls: bool,
}

#[derive(Debug)]
enum Place {
    Tcp(SocketAddr),
    /// The file is removed when this value is dropped.
    #[cfg(unix)]
    Unix(PathBuf, #[expect(dead_code, reason = "it is only dropped")] SocketFile),
}

impl AddressArgs {
    /// Binds the address. Connections wait until they are accepted.
    pub(super) async fn bind(&self, is_tls: bool) -> anyhow::Result<(Listener, Bound)> {
        #[cfg(unix)]
        if let Some(path) = &self.uds {
            let bound = SocketFile::bind(path).await;
            let (listener, file) =
                bound.with_context(|| format!("cannot listen on unix:{}", path.display()))?;
            return Ok((listener, Bound { place: Place::Unix(path.clone(), file), is_tls }));
        }
        let listener = TcpListener::bind((self.host.as_str(), self.port))
            .await
            .with_context(|| format!("cannot listen on {}:{}", self.host, self.port))?;
        let place = Place::Tcp(listener.local_addr()?);
        Ok((listener.into(), Bound { place, is_tls }))
    }
}

impl Bound {
    /// Warns if other machines can reach a server without API keys.
    pub(super) fn warn_if_open(&self, access: &Access) {
        match &self.place {
            Place::Tcp(address) if access.api_keys.is_empty() && !address.ip().is_loopback() => {
                terminal::warn(format!(
                    "WARNING: other machines can reach {address}, and there are no API keys: \
                     everybody there can use the model. Set --api-key-file or STOLON_API_KEY, or \
                     listen on 127.0.0.1."
                ));
            }
            _ => {}
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        match &self.place {
            Place::Tcp(address) => write!(out, "{scheme}://{address}"),
            #[cfg(unix)]
            Place::Unix(path, _) if self.is_tls => write!(out, "unix:{} (TLS)", path.display()),
            #[cfg(unix)]
            Place::Unix(path, _) => write!(out, "unix:{}", path.display()),
        }
    }
}
