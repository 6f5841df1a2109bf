//! `stolon health`: the exit status of a health check.

use crate::support::{Server, TINY, run};

/// Goal: a server that is ready has status 0, and one that is not there has status 1 and is named.
#[tokio::test]
async fn the_status_says_whether_a_server_is_ready() {
    let server = Server::start(TINY, &[]);
    let health = |url: &str| {
        let output = run(&["health", "--url", url, "--timeout", "60"], "");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).expect("UTF-8"))
    };
    let url = server.url("/");
    let (status, text) = health(&url);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("\"status\":\"ok\""), "{text}");
    server.terminate();
    assert!(server.wait().success());
    let (status, text) = health(&url);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("cannot reach") && text.contains("--url"), "{text}");
}
