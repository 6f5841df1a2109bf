//! A Unix domain socket: binds it, replaces one that a killed server has left, and removes it.
//!
//! A socket is a file, which stays when its server is killed. It is removed only if nothing listens
//! on it. Servers that start at the same time on the same path take turns by a lock on its
//! directory, because otherwise one could remove the socket that another has just made.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::{UnixListener, UnixStream};

use crate::wire::listener::Listener;
use crate::wire::peer::Peer;

/// Time in which another server accepts a connection. A server that takes longer is busy.
const PROBE: Duration = Duration::from_secs(1);
/// Pause between two attempts to lock the directory.
const RETRY: Duration = Duration::from_millis(20);
/// The user id of root.
const ROOT: u32 = 0;

/// A socket that listens.
#[derive(Debug)]
pub(crate) struct UnixSocket {
    listener: UnixListener,
    /// The id of the user who runs the server.
    owner: u32,
}

impl UnixSocket {
    pub(crate) async fn accept(&self) -> io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.listener.accept().await?;
        let uid = stream.peer_cred().ok().map(|user| user.uid());
        let is_operator = uid.is_some_and(|uid| uid == self.owner || uid == ROOT);
        Ok((stream, Peer::Program { uid, is_operator }))
    }
}

/// The file of a socket, which is removed when this value is dropped, unless it has been replaced.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// The file's device and inode.
    id: (u64, u64),
}

impl SocketFile {
    /// Listens on a socket at this path. The process's umask determines who may connect. A socket
    /// on which nothing listens any longer is replaced. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// If another server listens there, if the path leads to another kind of file, or if the
    /// system does not permit the socket.
    pub async fn bind(path: &Path) -> io::Result<(Listener, Self)> {
        // For an empty path, the system would choose a name.
        if path.as_os_str().is_empty() {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "expected a path, got an empty one",
            ));
        }
        let _lock = wait_for_lock(path).await?;
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                remove_stale(path).await?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        let metadata = fs::symlink_metadata(path)?;
        let file = Self { path: path.to_owned(), id: id(&metadata) };
        Ok((UnixSocket { listener, owner: metadata.uid() }.into(), file))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _lock = lock_directory(&self.path);
        if fs::symlink_metadata(&self.path).is_ok_and(|now| id(&now) == self.id)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!("cannot remove the socket {}: {error}", self.path.display());
        }
    }
}

fn id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Removes a socket on which nothing listens.
async fn remove_stale(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        let message = "expected a socket or nothing at this path, got a file of another kind";
        return Err(io::Error::new(ErrorKind::AlreadyExists, message));
    }
    match tokio::time::timeout(PROBE, UnixStream::connect(path)).await {
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Ok(Err(error)) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Err(io::Error::new(ErrorKind::AddrInUse, "another server listens on this socket")),
    }
}

/// Locks the directory of a socket. Waits a limited time if another server holds the lock.
async fn wait_for_lock(path: &Path) -> io::Result<File> {
    let deadline = Instant::now() + 3 * PROBE;
    loop {
        match lock_directory(path) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                tokio::time::sleep(RETRY).await;
            }
            other => return other,
        }
    }
}

/// Locks the directory of a socket, if its file system has locks.
fn lock_directory(path: &Path) -> io::Result<File> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let file = File::open(directory.unwrap_or(Path::new(".")))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            let message = "another program has locked the directory of the socket";
            Err(io::Error::new(ErrorKind::WouldBlock, message))
        }
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

#[cfg(test)]
mod tests;
