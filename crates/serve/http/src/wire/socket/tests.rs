//! Tests of the file of a socket.

use std::os::unix::net::{UnixDatagram, UnixListener as StdListener};

use super::*;

/// Goal: a socket is removed when its server ends, and one that a killed server has left is
/// replaced.
#[tokio::test]
async fn sockets_are_removed_or_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (listener, file) = SocketFile::bind(&path).await.expect("bound");
    UnixStream::connect(&path).await.expect("connected");
    drop((listener, file));
    assert!(!path.exists());
    drop(StdListener::bind(&path).expect("bound"));
    assert!(path.exists(), "the standard library leaves the file");
    let bound = SocketFile::bind(&path).await.expect("replaced");
    UnixStream::connect(&path).await.expect("connected");
    drop(bound);
    assert!(!path.exists());
}

/// Goal: neither the socket of another server nor a file of another kind is removed, at the start
/// or at the end, and errors name the existing file.
#[tokio::test]
async fn files_of_others_are_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let refused = async |name: &str, message: &str| {
        let path = dir.path().join(name);
        let error = SocketFile::bind(&path).await.expect_err(name).to_string();
        assert!(error.contains(message), "{name}: {error}");
        assert!(fs::symlink_metadata(path).is_ok(), "{name}");
    };
    let (_listener, file) = SocketFile::bind(&dir.path().join("ours")).await.expect("bound");
    refused("ours", "another server listens").await;
    fs::write(dir.path().join("file"), "text").expect("written");
    refused("file", "expected a socket or nothing").await;
    std::os::unix::fs::symlink("nowhere", dir.path().join("link")).expect("linked");
    refused("link", "expected a socket or nothing").await;
    let datagrams = UnixDatagram::bind(dir.path().join("datagrams"));
    refused("datagrams", "").await;
    drop(datagrams);
    assert!(SocketFile::bind(Path::new("")).await.is_err());
    assert!(SocketFile::bind(&dir.path().join("none/s")).await.is_err());

    fs::remove_file(&file.path).expect("removed by somebody");
    fs::write(&file.path, "a file of somebody else").expect("written");
    let path = file.path.clone();
    drop(file);
    assert!(path.exists(), "it is not the socket");
}

/// Goal: of two servers that start at the same time on a socket that was left, one gets it, and
/// clients reach that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_servers_gets_the_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    for _ in 0..50 {
        drop(StdListener::bind(&path).expect("bound"));
        let bind = || {
            let path = path.clone();
            tokio::spawn(async move { SocketFile::bind(&path).await })
        };
        let (one, other) = (bind(), bind());
        let results = [one.await.expect("ended"), other.await.expect("ended")];
        let mut bound = results.into_iter().flatten();
        let (listener, file) = bound.next().expect("one gets it");
        assert!(bound.next().is_none());
        let (accepted, connected) =
            tokio::join!(listener.accept(PROBE), UnixStream::connect(&path));
        let (_, peer) = accepted.expect("accepted");
        assert!(matches!(peer, Peer::Program { is_operator: true, .. }), "{peer:?}");
        drop((connected.expect("connected"), file));
    }
}
