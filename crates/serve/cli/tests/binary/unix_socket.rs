//! `stolon serve --uds`: the server listens on a Unix domain socket.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, stolon};

fn serve(socket: &Path) -> Server {
    Server::start(TINY, &["--uds", socket.to_str().expect("UTF-8")])
}

/// Sends a request through the socket. The host in its URL has no effect on the connection.
async fn ask(socket: &Path, host: &str, path: &str, body: Option<Value>) -> (u16, String) {
    let client = reqwest::Client::builder().unix_socket(socket).build().expect("a client");
    let url = format!("http://{host}{path}");
    let request = match body {
        Some(body) => client.post(url).json(&body),
        None => client.get(url),
    };
    let reply = request.send().await.expect("a reply");
    (reply.status().as_u16(), reply.text().await.expect("text"))
}

async fn is_healthy(socket: &Path) -> bool {
    ask(socket, "localhost", "/health", None).await.0 == 200
}

/// Goal: clients of the socket use the model and the user's own programs the operator's routes,
/// with any host in the address; web pages of other sites cannot. There is no TCP listener.
#[tokio::test]
async fn a_socket_serves_everything() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("stolon.sock");
    let server = serve(&socket);
    assert_eq!(server.url(""), format!("unix:{}", socket.display()));
    for host in ["localhost", "stolon", "rebound.example:8080"] {
        let body = json!({"prompt": "x", "max_tokens": 2});
        let (status, reply) = ask(&socket, host, "/v1/completions", Some(body)).await;
        assert_eq!(status, 200, "{host}: {reply}");
        let (status, reply) = ask(&socket, host, "/admin/audit", None).await;
        assert_eq!(status, 200, "{host}: {reply}");
    }
    let streamed = json!({"prompt": "x", "max_tokens": 2, "stream": true});
    let (_, events) = ask(&socket, "localhost", "/v1/completions", Some(streamed)).await;
    assert!(events.trim_end().ends_with("data: [DONE]"), "{events}");
    let client = reqwest::Client::builder().unix_socket(socket.as_path()).build();
    let page = client.expect("a client").get("http://localhost/admin/audit");
    let reply = page.header("origin", "https://evil.example").send().await.expect("a reply");
    assert_eq!(reply.status(), 403);
}

/// Goal: the socket is removed when the server ends. One that was left by a killed server is
/// replaced.
#[tokio::test]
async fn the_socket_is_removed_or_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("stolon.sock");
    drop(serve(&socket)); // Killed.
    assert!(socket.exists(), "nothing could remove it");
    let server = serve(&socket);
    assert!(is_healthy(&socket).await);
    server.terminate();
    let status = tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
    assert!(status.success(), "{status}");
    assert!(!socket.exists());

    // Another program has put its own socket there.
    let server = serve(&socket);
    std::fs::remove_file(&socket).expect("removed");
    let _other = UnixListener::bind(&socket).expect("bound");
    server.terminate();
    tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
    assert!(socket.exists(), "it is not the server's");
}

/// Goal: a server does not start on the socket of another one, nor on a file of another kind, says
/// so before it loads a model, and leaves both as they are.
#[tokio::test]
async fn used_paths_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("stolon.sock");
    let _server = serve(&socket);
    let inode = std::fs::metadata(&socket).expect("a file").ino();
    let file = dir.path().join("file");
    std::fs::write(&file, "text").expect("written");
    for (path, expected) in [
        (socket.as_path(), "another server listens"),
        (file.as_path(), "expected a socket or nothing"),
        (dir.path(), "expected a socket or nothing"),
        (&dir.path().join("x".repeat(120)), "cannot listen on unix:"),
        (Path::new("/nonexistent/s"), "cannot listen on unix:"),
        (Path::new(""), "a value is required"),
    ] {
        let arguments = ["serve", "--model", "/no/such/model", "--uds"];
        let error = fail(&[&arguments[..], &[path.to_str().expect("UTF-8")]].concat());
        assert!(error.contains(expected), "{}: {error}", path.display());
    }
    let metadata = std::fs::symlink_metadata(&socket).expect("a file");
    assert!(metadata.file_type().is_socket() && metadata.ino() == inode);
    assert!(is_healthy(&socket).await);
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "text");
}

/// Goal: a server that cannot load its model leaves no socket.
#[test]
fn a_failed_start_leaves_no_socket() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("stolon.sock");
    let mut command = stolon(&["serve", "--model", "/no/such/model"]);
    let output = command.env("STOLON_UDS", &socket).output().expect("the binary ends");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains(&format!("unix:{}", socket.display())), "the setting is used: {said}");
    assert!(!socket.exists());
}
