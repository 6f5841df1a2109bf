//! A small hub on the loopback interface. It answers the requests of a model download: weights as
//! the public hub answers for large files (SHA-256), all others as for files in Git.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ring::digest::{Algorithm, Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A repository: its commit, its files, and the required token, if any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repository {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) token: Option<String>,
    /// The server closes the connection in the middle of this file.
    pub(crate) cut: Option<String>,
    /// The server sends another content of this file than its hash says, with the same size.
    pub(crate) corrupt: Option<String>,
}

#[derive(Default)]
struct State {
    /// Repositories by `org/name` and revision.
    repositories: BTreeMap<(String, String), Repository>,
    /// Paths of all `GET` requests, and the byte from which on the file was requested.
    requests: Vec<(String, usize)>,
}

/// The server. Dropping it stops the server.
pub(crate) struct Hub {
    pub(crate) endpoint: String,
    state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (state.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // A client may close its connection at any time.
                let _ = stream.and_then(|stream| answer(stream, &shared));
            }
        });
        Self { endpoint, state, stop, thread: Some(thread) }
    }

    /// Adds a repository under a revision and under its commit.
    pub(crate) fn put(&self, id: &str, revision: &str, repository: &Repository) {
        let mut state = self.state.lock().unwrap();
        for name in [revision, &repository.commit] {
            state.repositories.insert((id.into(), name.into()), repository.clone());
        }
    }

    /// Returns the paths requested since the last call.
    pub(crate) fn take_requests(&self) -> Vec<String> {
        self.take_ranges().into_iter().map(|(path, _)| path).collect()
    }

    /// As [`take_requests`](Self::take_requests), with the first byte that was requested.
    pub(crate) fn take_ranges(&self) -> Vec<(String, usize)> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // A connection wakes the thread, which then stops.
        let _ = TcpStream::connect(self.endpoint.trim_start_matches("http://"));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The head of a request: path, start of the `Range`, token.
struct Head {
    path: String,
    /// Whether the method is `HEAD`.
    probe: bool,
    start: usize,
    token: Option<String>,
}

fn head(stream: &TcpStream) -> std::io::Result<Head> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut head = Head {
        path: first.split(' ').nth(1).unwrap_or_default().replace("%2F", "/"),
        probe: first.starts_with("HEAD "),
        start: 0,
        token: None,
    };
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(": ").unwrap_or((&line, ""));
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let start = value.trim_start_matches("bytes=").split('-').next();
                head.start = start.and_then(|n| n.parse().ok()).unwrap_or(0);
            }
            "authorization" => head.token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Ok(head)
}

fn answer(mut stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let head = head(&stream)?;
    let (status, headers, mut body) = respond(&head, &mut state.lock().unwrap());
    let length = body.len();
    if headers.iter().any(|(name, _)| *name == CUT) {
        body.truncate(length / 2);
    }
    let mut response = format!("HTTP/1.1 {status} x\r\nConnection: close\r\n");
    for (name, value) in headers {
        response += &format!("{name}: {value}\r\n");
    }
    response += &format!("Content-Length: {}\r\n\r\n", length);
    stream.write_all(response.as_bytes())?;
    match head.probe {
        true => Ok(()),
        false => stream.write_all(&body),
    }
}

/// The header of a response whose body is to be cut off.
const CUT: &str = "x-cut";

type Response = (u16, Vec<(&'static str, String)>, Vec<u8>);

fn respond(head: &Head, state: &mut State) -> Response {
    if !head.probe {
        state.requests.push((head.path.clone(), head.start));
    }
    let (id, revision, file) = match head.path.strip_prefix("/api/models/") {
        Some(rest) => match rest.split_once("/revision/") {
            Some((id, revision)) => (id, revision, None),
            None => return (404, vec![], vec![]),
        },
        None => match head.path[1..].split_once("/resolve/") {
            Some((id, rest)) => match rest.split_once('/') {
                Some((revision, file)) => (id, revision, Some(file)),
                None => return (404, vec![], vec![]),
            },
            None => return (404, vec![], vec![]),
        },
    };
    let Some(repository) = state.repositories.get(&(id.to_owned(), revision.to_owned())) else {
        return (404, vec![], vec![]);
    };
    if repository.token.is_some() && repository.token != head.token {
        return (401, vec![], vec![]);
    }
    let Some(file) = file else {
        let siblings: Vec<_> =
            repository.files.keys().map(|f| serde_json::json!({ "rfilename": f })).collect();
        let info = serde_json::json!({ "sha": repository.commit, "siblings": siblings });
        return (200, vec![], info.to_string().into_bytes());
    };
    let Some(content) = repository.files.get(file) else { return (404, vec![], vec![]) };
    let mut headers = vec![("x-repo-commit", repository.commit.clone())];
    if file.ends_with(".safetensors") || file.ends_with(".gguf") {
        headers.push(("x-linked-etag", format!("\"{}\"", hex(&SHA256, &[content]))));
        headers.push(("x-linked-size", content.len().to_string()));
        headers.push(("etag", "\"of-another-server\"".into()));
    } else {
        let blob = format!("blob {}\0", content.len());
        let hash = hex(&SHA1_FOR_LEGACY_USE_ONLY, &[blob.as_bytes(), content]);
        headers.push(("etag", format!("W/\"{hash}\"")));
    }
    if !head.probe && repository.cut.as_deref() == Some(file) {
        headers.push((CUT, "yes".into()));
    }
    let mut content = content.clone();
    if repository.corrupt.as_deref() == Some(file)
        && let Some(last) = content.last_mut()
    {
        *last ^= 1;
    }
    if head.start == 0 {
        return (200, headers, content);
    }
    if head.start >= content.len() {
        return (416, headers, vec![]);
    }
    let range = format!("bytes {}-{}/{}", head.start, content.len() - 1, content.len());
    headers.push(("Content-Range", range));
    (206, headers, content[head.start..].to_vec())
}

fn hex(algorithm: &'static Algorithm, parts: &[&[u8]]) -> String {
    let mut context = Context::new(algorithm);
    parts.iter().for_each(|part| context.update(part));
    context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
