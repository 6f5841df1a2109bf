//! The address that a server listens on: a TCP port or a Unix domain socket.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_io_timeout::TimeoutStream;

use crate::wire::peer::Peer;

/// A bound address that a server listens on: a TCP port, or a Unix domain socket that
/// `SocketFile::bind` has made.
#[derive(Debug)]
pub struct Listener(Kind);

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(crate::wire::socket::UnixSocket),
}

/// A connection in both directions.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Io for S {}

/// A connection of either kind, whose writes have a time limit.
pub(crate) type Stream = Pin<Box<dyn Io>>;

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self(Kind::Tcp(listener))
    }
}

#[cfg(unix)]
impl From<crate::wire::socket::UnixSocket> for Listener {
    fn from(socket: crate::wire::socket::UnixSocket) -> Self {
        Self(Kind::Unix(socket))
    }
}

impl Listener {
    /// Waits for a connection. On it, a write may wait for `write_timeout`.
    pub(crate) async fn accept(&self, write_timeout: Duration) -> io::Result<(Stream, Peer)> {
        match &self.0 {
            Kind::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Without this option, the small pieces of a streamed reply are delayed. A failure
                // is ignored.
                let _ = stream.set_nodelay(true);
                Ok((limited(stream, write_timeout), Peer::Address(address)))
            }
            #[cfg(unix)]
            Kind::Unix(socket) => {
                let (stream, peer) = socket.accept().await?;
                Ok((limited(stream, write_timeout), peer))
            }
        }
    }
}

fn limited(stream: impl Io + 'static, write_timeout: Duration) -> Stream {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(write_timeout));
    Box::pin(stream)
}
