//! `stolon serve --root-path`: the setting, and the paths in the log.

use crate::support::{Server, TINY, fail, stolon};

/// Goal: the log names a request below the root path as it names one without it.
#[tokio::test]
async fn the_log_has_the_same_paths() {
    let server = Server::with_log(TINY, &["--root-path", "/llm", "--log-level", "info"]);
    for root in ["", "/llm"] {
        assert_eq!(server.get(&format!("{root}/v1/models")).await.0, 200);
    }
    let log = server.stop_and_read_errors();
    assert_eq!(log.matches("path=\"/v1/models\"").count(), 2, "{log}");
    assert!(!log.contains("/llm/v1"), "{log}");
}

/// Goal: the root path is a setting like the others, and a value that is not a path is refused with
/// what was expected.
#[test]
fn the_root_path_is_a_setting() {
    let mut config = stolon(&["config"]);
    let output = config.env("STOLON_ROOT_PATH", "/llm").output().expect("the binary ends");
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.contains("root-path = \"/llm\" # environment"), "{output}");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("stolon.toml");
    std::fs::write(&file, "root-path = \"/of-the-file\"\n").expect("written");
    let output = stolon(&["config", "--config"]).arg(&file).output().expect("the binary ends");
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.contains("root-path = \"/of-the-file\" # file"), "{output}");
    for bad in ["llm", "/a//b", "/a/../b", "/a?b", "/v1"] {
        let message = fail(&["serve", "--model", TINY, "--root-path", bad]);
        assert!(
            message.contains("--root-path") && message.contains("expected a path"),
            "{message}"
        );
    }
}
