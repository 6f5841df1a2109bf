//! Tests downloads from a hub that is hostile or broken: nothing is written outside of the cache,
//! the token is sent to no other server, and nothing hangs or fills memory or disk.
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use stolon_checkpoint::{HubOptions, LoadOptions, ModelError, ModelSource, load};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

/// Writes the answer to a request for a path.
type Answer = dyn Fn(&str, &mut TcpStream) -> std::io::Result<()> + Send + Sync;

/// A server on the loopback interface that answers each connection on a thread of its own. It ends
/// with the process.
struct Server {
    endpoint: String,
    /// The heads of all requests.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(
        answer: impl Fn(&str, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (heads, answer): (_, Arc<Answer>) = (requests.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(mut stream), heads, answer) = (stream, heads.clone(), answer.clone())
                else {
                    return;
                };
                std::thread::spawn(move || {
                    let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                    let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                    let path = head.first().and_then(|line| line.split(' ').nth(1));
                    let path = path.unwrap_or_default().to_owned();
                    heads.lock().unwrap().push(head.join("\n"));
                    // The client may close its connection at any time.
                    let _ = answer(&path, &mut stream);
                });
            }
        });
        Self { endpoint, requests }
    }

    /// A hub that describes a repository correctly, and answers requests for its files by
    /// `answer`.
    fn with_files(
        answer: impl Fn(&str, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self::start(move |path, stream| match path.starts_with("/api/") {
            true => send(stream, 200, "", &info(COMMIT)),
            false => answer(path, stream),
        })
    }

    fn saw_token(&self) -> bool {
        self.requests.lock().unwrap().iter().any(|head| head.contains(TOKEN))
    }
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} x\r\nConnection: close\r\n{headers}")?;
    write!(stream, "Content-Length: {length}\r\n\r\n")?;
    stream.write_all(body)
}

fn info(commit: &str) -> Vec<u8> {
    let files = ["config.json", "model.safetensors"].map(|name| json!({ "rfilename": name }));
    json!({ "sha": commit, "siblings": files }).to_string().into_bytes()
}

fn options(server: &Server, home: &Path) -> HubOptions {
    HubOptions {
        cache: home.join("a/b/c/hub"),
        endpoint: server.endpoint.clone(),
        token: Some(TOKEN.into()),
        offline: false,
        timeout: Duration::from_millis(300),
        progress: None,
    }
}

/// Loads a model from `server`, which must fail, and returns the error and the cache's parent
/// directory.
fn failure(server: &Server) -> (String, tempfile::TempDir) {
    let home = tempfile::tempdir().unwrap();
    let source = ModelSource::Hub { id: "org/name".into(), revision: "main".into(), file: None };
    let error =
        load(&source, &LoadOptions { hub: options(server, home.path()), ..LoadOptions::default() })
            .unwrap_err();
    assert!(matches!(error, ModelError::Hub { .. }), "{error}");
    let error = error.to_string();
    assert!(error.len() < 1000 && !error.contains(TOKEN), "{error}");
    (error, home)
}

/// All files below `directory`.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let below = entries.flat_map(|entry| match entry.path() {
        path if path.is_dir() => files(&path),
        path => vec![path],
    });
    below.collect()
}

/// Goal: an ETag that is a path is refused, and nothing is written outside of the repository's
/// directory.
#[test]
fn etags_never_become_paths() {
    for etag in
        ["../../../../../x", "/tmp/stolon-hostile-etag", "..", "a/b", "..\\x", ".hidden", "", "a b"]
    {
        for header in ["ETag", "X-Linked-ETag"] {
            let headers = format!("{header}: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
            let server =
                Server::with_files(move |_, stream| send(stream, 200, &headers, b"{\"a\": 1}"));
            let (error, home) = failure(&server);
            assert!(error.contains("config.json: expected an ETag"), "{etag}: {error}");
            let repository = home.path().join("a/b/c/hub/models--org--name");
            for file in files(home.path()) {
                assert!(file.starts_with(repository.join("blobs")), "{etag}: {}", file.display());
            }
        }
    }
    assert!(!Path::new("/tmp/stolon-hostile-etag").exists());
}

/// Goal: a commit that is a path is refused. A commit in the header of a file's answer is not used.
#[test]
fn commits_never_become_paths() {
    for commit in ["../../../../x", "/tmp/x", "a/b", "", "..", "a\\b", &"f".repeat(10_000)] {
        let body = info(commit);
        let server = Server::start(move |_, stream| send(stream, 200, "", &body));
        let (error, home) = failure(&server);
        assert!(error.contains("expected a commit"), "{commit}: {error}");
        assert_eq!(files(home.path()), [] as [PathBuf; 0]);
    }
    let headers = "ETag: \"abc\"\r\nX-Repo-Commit: ../../../../x\r\n";
    let server = Server::with_files(move |path, stream| match path.ends_with("config.json") {
        true => send(stream, 200, headers, b"{}"),
        false => send(stream, 404, headers, b""),
    });
    let (_, home) = failure(&server);
    let snapshot = format!("a/b/c/hub/models--org--name/snapshots/{COMMIT}/config.json");
    assert!(home.path().join(snapshot).exists());
    assert_eq!(files(home.path()).len(), 2, "the file and its link");
}

/// Goal: ids and revisions that are not parsed from text are checked too.
#[test]
fn ids_and_revisions_never_become_paths() {
    let server = Server::start(|_, stream| send(stream, 200, "", &info(COMMIT)));
    let home = tempfile::tempdir().unwrap();
    for (id, revision) in [
        ("../../x", "main"),
        ("org/name", "../../../x"),
        ("org/name", "/x"),
        ("..", "main"),
        ("org/name\r\nX: y", "main"),
        ("", ""),
    ] {
        let source = ModelSource::Hub { id: id.into(), revision: revision.into(), file: None };
        let error = load(
            &source,
            &LoadOptions { hub: options(&server, home.path()), ..LoadOptions::default() },
        )
        .unwrap_err();
        assert!(error.to_string().contains("expected the form"), "{error}");
    }
    assert!(server.requests.lock().unwrap().is_empty());
    assert_eq!(files(home.path()), [] as [PathBuf; 0]);
}

/// Goal: names in the index of a sharded model are file names, not paths.
#[test]
fn shard_names_never_become_paths() {
    for name in ["../../../../x", "/etc/passwd", "a/../../b", "..", "a\\b", "C:x", "a?b", ""] {
        let map = json!({ "weight_map": { "t": name } }).to_string();
        let files = ["config.json", "model.safetensors.index.json"];
        let files = files.map(|name| json!({ "rfilename": name }));
        let info = json!({ "sha": COMMIT, "siblings": files }).to_string();
        let server = Server::start(move |path, stream| match path {
            path if path.starts_with("/api/") => send(stream, 200, "", info.as_bytes()),
            path if path.ends_with("index.json") => {
                send(stream, 200, "ETag: \"index\"\r\n", map.as_bytes())
            }
            path if path.ends_with("/config.json") => send(stream, 200, "ETag: \"c\"\r\n", b"{}"),
            _ => send(stream, 200, "ETag: \"x\"\r\n", b"evil"),
        });
        let home = tempfile::tempdir().unwrap();
        let source =
            ModelSource::Hub { id: "org/name".into(), revision: "main".into(), file: None };
        let error = load(
            &source,
            &LoadOptions { hub: options(&server, home.path()), ..LoadOptions::default() },
        )
        .unwrap_err();
        assert!(error.to_string().contains("file name"), "{name}: {error}");
        // The description, and two requests each for the configuration and the index.
        assert_eq!(server.requests.lock().unwrap().len(), 5, "{name}");
    }
}

/// Goal: names of GGUF files become paths only inside of the snapshot.
#[test]
fn gguf_names_never_become_paths() {
    for name in
        ["../../../../x.gguf", "/tmp/x.gguf", "a/../../x.gguf", "a\\x.gguf", "a/b/c/d/e/x.gguf"]
    {
        let info = json!({ "sha": COMMIT, "siblings": [{ "rfilename": name }] }).to_string();
        let server = Server::start(move |_, stream| send(stream, 200, "", info.as_bytes()));
        let (error, home) = failure(&server);
        assert!(error.contains("expected a file name"), "{name}: {error}");
        assert_eq!(files(home.path()), [] as [PathBuf; 0]);
    }
}

/// Goal: a file that changes between the request for its hash and the request for its content is
/// refused, and so is one with the wrong hash.
#[test]
fn files_that_change_are_refused() {
    let answers = |first: &'static str, then: &'static str| {
        let count = std::sync::atomic::AtomicUsize::new(0);
        Server::with_files(move |_, stream| {
            let earlier = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            send(stream, 200, if earlier == 0 { first } else { then }, b"{}")
        })
    };
    let hash = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
    let sha1: &str = "ETag: \"b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0\"\r\n";
    for (first, then, expected) in [
        ("ETag: \"a\"\r\n", "ETag: \"b\"\r\n", "expected the ETag `a`, got `b`".to_owned()),
        (
            "ETag: \"a\"\r\nX-Linked-Size: 3\r\n",
            "ETag: \"a\"\r\n",
            "expected 3 bytes, got 2".into(),
        ),
        (sha1, sha1, format!("SHA-1 of the Git object: expected {hash}, got ")),
    ] {
        let (error, home) = failure(&answers(first, then));
        assert!(error.contains(&expected), "{first}: {error}");
        let sizes = files(home.path()).iter().map(|f| f.metadata().unwrap().len()).sum::<u64>();
        assert_eq!(sizes, 0, "{first}");
    }
}

/// Goal: the token is sent to the hub, also after a redirect within it, but not to another server.
#[test]
fn the_token_is_not_sent_to_the_target_of_a_redirect() {
    let other = Server::start(|_, stream| send(stream, 200, "", b"{}"));
    let target = other.endpoint.clone();
    let server = Server::with_files(move |path, stream| match path {
        "/moved" => send(stream, 302, &format!("ETag: \"e\"\r\nLocation: {target}/file\r\n"), b""),
        path if path.ends_with("config.json") => send(stream, 307, "Location: /moved\r\n", b""),
        _ => send(stream, 404, "", b""),
    });
    let (error, home) = failure(&server);
    // The configuration came from the other server, so the next file was requested.
    assert!(error.contains("model.safetensors"), "{error}");
    let blob = home.path().join("a/b/c/hub/models--org--name/blobs/e");
    assert_eq!(std::fs::read(blob).unwrap(), b"{}");
    assert!(!other.requests.lock().unwrap().is_empty());
    assert!(server.requests.lock().unwrap().iter().all(|head| head.contains(TOKEN)));
    assert!(!other.saw_token());
}

/// Goal: redirects in a circle end.
#[test]
fn redirects_in_a_circle_end() {
    let server = Server::start(|_, stream| send(stream, 302, "Location: /again\r\n", b""));
    let (error, _) = failure(&server);
    assert!(error.contains("redirects"), "{error}");
}

/// Goal: a body without end is given up at the maximum size of the file.
#[test]
fn endless_bodies_are_given_up() {
    let endless = |stream: &mut TcpStream| -> std::io::Result<()> {
        let head = "HTTP/1.1 200 x\r\nConnection: close\r\nETag: \"e\"\r\n";
        write!(stream, "{head}Transfer-Encoding: chunked\r\n\r\n")?;
        let chunk = [b' '; 1 << 16];
        loop {
            write!(stream, "10000\r\n")?;
            stream.write_all(&chunk)?;
            write!(stream, "\r\n")?;
        }
    };
    let (error, _) = failure(&Server::start(move |_, stream| endless(stream)));
    assert!(error.contains("expected at most 16777216 bytes, got more"), "{error}");
    let (error, home) = failure(&Server::with_files(move |_, stream| endless(stream)));
    assert!(error.contains("config.json: expected at most 16777216 bytes"), "{error}");
    let sizes = files(home.path()).iter().map(|f| f.metadata().unwrap().len()).sum::<u64>();
    assert!(sizes <= 16 << 20, "{sizes}");
}

/// Goal: endless headers are given up.
#[test]
fn endless_headers_are_given_up() {
    let server = Server::start(|_, stream| {
        write!(stream, "HTTP/1.1 200 x\r\n")?;
        loop {
            write!(stream, "X-Filler: {}\r\n", "x".repeat(1000))?;
        }
    });
    failure(&server);
}

/// Goal: a size that is too large for the file, that differs from the one that was announced, or
/// that is missing, is an error before anything is stored.
#[test]
fn wrong_sizes_are_refused() {
    let file = |headers: &'static str, body: &'static [u8]| {
        Server::with_files(move |path, stream| match path.ends_with("config.json") {
            true => send(stream, 200, "ETag: \"config\"\r\n", b"{}"),
            false => {
                write!(stream, "HTTP/1.1 200 x\r\nConnection: close\r\nETag: \"e\"\r\n")?;
                write!(stream, "{headers}\r\n")?;
                stream.write_all(body)
            }
        })
    };
    for (headers, body, expected) in [
        ("Content-Length: 9223372036854775807\r\n", b"x".as_slice(), "expected at most 10995"),
        ("Content-Length: 4\r\nX-Linked-Size: 5\r\n", b"abcd", "expected 5 bytes"),
        ("Content-Length: 9\r\n", b"abcd", "model.safetensors"),
        ("", b"abcd", "expected a size"),
        ("Content-Length: x\r\n", b"abcd", "model.safetensors"),
    ] {
        let (error, home) = failure(&file(headers, body));
        assert!(error.contains(expected), "{headers}: {error}");
        let blob = home.path().join("a/b/c/hub/models--org--name/blobs/e");
        assert!(!blob.exists(), "{headers}");
    }
}

/// Goal: a file that does not start where it was requested is not appended to what is there.
#[test]
fn wrong_ranges_are_refused() {
    for range in ["bytes 7-9/10", "bytes x", "bytes 99999999999999999999-1/2"] {
        let headers = format!("ETag: \"e\"\r\nContent-Range: {range}\r\n");
        let server = Server::with_files(move |_, stream| send(stream, 206, &headers, b"{}"));
        let (error, home) = failure(&server);
        assert!(error.contains("config.json"), "{range}: {error}");
        assert!(!home.path().join("a/b/c/hub/models--org--name/blobs/e").exists());
    }
}

/// Goal: a hub that is silent, or that sends a byte now and then, is given up.
#[test]
fn slow_hubs_are_given_up() {
    let trickle = |stream: &mut TcpStream, head: &str| -> std::io::Result<()> {
        write!(stream, "{head}")?;
        loop {
            stream.write_all(b" ")?;
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let silent = |_: &str, _: &mut TcpStream| {
        std::thread::sleep(Duration::from_secs(60));
        Ok(())
    };
    let body = "HTTP/1.1 200 x\r\nETag: \"e\"\r\nContent-Length: 1000000\r\n\r\n";
    failure(&Server::start(silent));
    failure(&Server::with_files(silent));
    failure(&Server::start(move |_, stream| trickle(stream, "HTTP/1.1 200 x\r\nX: ")));
    let (error, _) = failure(&Server::start(move |_, stream| trickle(stream, body)));
    assert!(error.contains("slower than"), "{error}");
    let (error, _) = failure(&Server::with_files(move |_, stream| trickle(stream, body)));
    assert!(error.contains("slower than"), "{error}");
}

/// Goal: answers that are not HTTP, and descriptions that are not JSON, are errors.
#[test]
fn nonsense_is_an_error() {
    for answer in
        [&b"\0\0\0\0\r\n\r\n"[..], b"", b"HTTP/9.9 abc\r\n\r\n", b"HTTP/1.1 200 x\r\n\r\n"]
    {
        failure(&Server::start(move |_, stream| stream.write_all(answer)));
    }
    let nested = "[".repeat(100_000).into_bytes();
    for body in [b"[]".to_vec(), b"{\"sha\": 5}".to_vec(), nested] {
        failure(&Server::start(move |_, stream| send(stream, 200, "", &body)));
    }
}
