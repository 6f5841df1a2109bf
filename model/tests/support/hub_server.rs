//! A small hub on the loopback interface. It answers the three requests of a model download.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A repository: its commit, its files, and the required token, if any.
#[derive(Clone, Debug, Default)]
pub(crate) struct Repository {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) token: Option<String>,
    /// The server closes the connection in the middle of this file.
    pub(crate) cut: Option<String>,
}

#[derive(Default)]
struct State {
    /// Repositories by `org/name` and revision.
    repositories: BTreeMap<(String, String), Repository>,
    /// Paths of all requests, except those that probe a file's size with a short `Range`.
    requests: Vec<String>,
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
    probe: bool,
    start: usize,
    token: Option<String>,
}

fn head(stream: &TcpStream) -> std::io::Result<Head> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut head = Head {
        path: first.split(' ').nth(1).unwrap_or_default().replace("%2F", "/"),
        probe: false,
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
                head.probe = value == "bytes=0-0";
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
    stream.write_all(&body)
}

/// The header of a response whose body is to be cut off.
const CUT: &str = "x-cut";

type Response = (u16, Vec<(&'static str, String)>, Vec<u8>);

fn respond(head: &Head, state: &mut State) -> Response {
    if !head.probe {
        state.requests.push(head.path.clone());
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
    let end = if head.probe { 1.min(content.len()) } else { content.len() };
    let range = format!("bytes {}-{}/{}", head.start, end.max(1) - 1, content.len());
    let etag = format!("\"{}-{}\"", repository.commit, file.replace(['/', '.'], "-"));
    let mut headers = vec![
        ("x-repo-commit", repository.commit.clone()),
        ("etag", etag),
        ("Content-Range", range),
    ];
    if !head.probe && repository.cut.as_deref() == Some(file) {
        headers.push((CUT, "yes".into()));
    }
    (206, headers, content[head.start..end].to_vec())
}
