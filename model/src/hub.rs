//! Downloads models from the Hugging Face hub to its cache on disk.
//!
//! Online, the revision is resolved to a commit once and all files are taken from that commit, so
//! that a model never mixes files of two commits. Only files that the engine reads and that are not
//! in the cache are downloaded. Offline, or if the hub cannot be reached, the cached snapshot is
//! used.

mod cache;
mod client;
mod options;

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;

use cache::{RepoCache, plain};
use client::{Answer, Client, Failure};
pub use options::HubOptions;

use crate::error::{ModelError, quoted};
use crate::files as read;
use crate::load::directory as files;
use crate::source::is_hub_id;
use crate::weights::safetensors;

/// Maximum size in bytes of the hub's description of a repository.
const INFO_BYTES_MAX: u64 = 16 << 20;
/// Maximum size in bytes of one file with weights. It is above the largest size that the public hub
/// accepts.
const WEIGHT_BYTES_MAX: u64 = 1 << 40;
/// Time between two log messages about the progress of a download.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// The requested model.
struct ModelRef<'a> {
    id: &'a str,
    revision: &'a str,
}

impl ModelRef<'_> {
    fn error(&self, file: &str, reason: impl ToString) -> ModelError {
        ModelError::Hub {
            repo: self.id.into(),
            revision: self.revision.into(),
            file: quoted(file),
            reason: quoted(&reason.to_string()),
        }
    }
}

/// The part that is used of the hub's description of a repository.
#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Downloads missing files of the model, and returns the directory of a snapshot that has all
/// files.
///
/// # Errors
/// [`ModelError::Hub`] with the hub's answer and what may help.
pub(crate) fn fetch(id: &str, revision: &str, options: &HubOptions) -> Result<PathBuf, ModelError> {
    let model = ModelRef { id, revision };
    if !is_hub_id(id, revision) {
        return Err(model.error("model info", "expected the form org/name@revision"));
    }
    let cache = RepoCache::new(&options.cache, id);
    if options.offline {
        return cached(&model, &cache).ok_or_else(|| {
            let cache = options.cache.display();
            model
                .error(files::CONFIG, format!("offline, and there is no snapshot of it in {cache}"))
        });
    }
    let explain = |failure: Failure| failure.explain(&model, "model info", options);
    let client = Client::new(options).map_err(explain)?;
    let info = match info(&client, &model) {
        Ok(info) => info,
        Err(failure) => {
            // The cache is used only if the hub has not answered. An error from the hub counts.
            if failure.status.is_none()
                && let Some(directory) = cached(&model, &cache)
            {
                let (text, directory_shown) = (&failure.text, directory.display());
                tracing::warn!("cannot reach the hub ({text}); using {directory_shown}");
                return Ok(directory);
            }
            return Err(explain(failure));
        }
    };
    let Some(directory) = cache.snapshot(&info.sha) else {
        let reason = format!("expected a commit, got `{}`", info.sha);
        return Err(model.error("model info", reason));
    };
    let available: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let snapshot =
        Snapshot { model: &model, client, cache: &cache, options, commit: &info.sha, directory };
    snapshot.fetch(&available)?;
    cache
        .set_commit(revision, &info.sha)
        .map_err(|error| ModelError::Io { path: options.cache.clone(), error })?;
    Ok(snapshot.directory)
}

/// Requests the description of the model's revision.
fn info(client: &Client<'_>, model: &ModelRef<'_>) -> Result<Info, Failure> {
    let revision = model.revision.replace('/', "%2F");
    let answer = client.get(&format!("/api/models/{}/revision/{revision}", model.id), 0)?;
    let mut bytes = Vec::new();
    client::copy(answer.body, &mut bytes, INFO_BYTES_MAX, client.window(), |_| {})
        .map_err(Failure::new)?;
    serde_json::from_slice(&bytes).map_err(|error| Failure::answer(answer.status, error))
}

/// One commit of a repository, whose files are being downloaded.
struct Snapshot<'a> {
    model: &'a ModelRef<'a>,
    client: Client<'a>,
    cache: &'a RepoCache,
    options: &'a HubOptions,
    /// A [`plain`] name.
    commit: &'a str,
    directory: PathBuf,
}

impl Snapshot<'_> {
    /// Downloads those of the `available` files that the engine reads.
    fn fetch(&self, available: &[&str]) -> Result<(), ModelError> {
        let has = |name: &str| available.contains(&name);
        if !has(files::CONFIG) {
            let gguf = available.iter().find(|name| name.ends_with(".gguf"));
            let reason = match gguf {
                Some(name) => {
                    format!("the repository does not have it; download {name} and pass its path")
                }
                None => "the repository does not have it: it is not a transformers model".into(),
            };
            return Err(self.model.error(files::CONFIG, reason));
        }
        // Small files first, so that a missing one is reported before the long download.
        for name in files::SMALL.iter().filter(|name| has(name)) {
            self.get(name)?;
        }
        if has(safetensors::SINGLE) {
            return self.get(safetensors::SINGLE).map(drop);
        }
        if !has(safetensors::INDEX) {
            let reason = "the repository has no safetensors weights";
            return Err(self.model.error(safetensors::SINGLE, reason));
        }
        let index = self.get(safetensors::INDEX)?;
        let shards = safetensors::shards(&index.display().to_string(), &read::read_json(&index)?)?;
        for shard in shards {
            self.get(&shard)?;
        }
        Ok(())
    }

    /// Returns the path of the file on disk. Downloads it first if it is not in the cache.
    fn get(&self, name: &str) -> Result<PathBuf, ModelError> {
        if !plain(name) {
            let expected = "expected a file name of letters, digits, `-`, `_` and `.`";
            return Err(self.model.error(name, expected));
        }
        let path = self.directory.join(name);
        if !path.exists() {
            let failed = |failure: Failure| failure.explain(self.model, name, self.options);
            self.download(name, &path).map_err(failed)?;
        }
        Ok(path)
    }

    /// Downloads the file `name` to `path`. An interrupted download is continued.
    fn download(&self, name: &str, path: &Path) -> Result<(), Failure> {
        let incomplete = self.cache.incomplete(self.commit, name);
        incomplete.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(Failure::new)?;
        let file = OpenOptions::new().create(true).append(true).open(&incomplete);
        let mut file = file.map_err(Failure::new)?;
        // Another process may be downloading the same file. Some file systems have no locks.
        if let Err(error) = file.lock() {
            tracing::debug!(%error, "cannot lock {}", incomplete.display());
        }
        if path.exists() {
            return Ok(());
        }
        let answer = self.request(name, &mut file)?;
        let etag = answer.etag.unwrap_or_default();
        let Some(blob) = self.cache.blob(&etag) else {
            let text = format!("expected an ETag of letters and digits, got `{etag}`");
            return Err(Failure::answer(answer.status, text));
        };
        // The same content may be part of another commit already.
        if !blob.is_file() {
            let have = answer.start;
            let size = expected_size(name, answer.status, answer.size)?;
            let limit = size.unwrap_or(bytes_max(name)).saturating_sub(have);
            let mut progress = Progress::new(self.model, name, size);
            let report = |copied| progress.report(have + copied);
            let got = client::copy(answer.body, &mut file, limit, self.client.window(), report);
            let got = have + got.map_err(Failure::new)?;
            if let Some(size) = size
                && got != size
            {
                return Err(Failure::new(format!("expected {size} bytes, got {got}")));
            }
            std::fs::rename(&incomplete, &blob).map_err(Failure::new)?;
        } else {
            let _ = std::fs::remove_file(&incomplete);
        }
        cache::link(&blob, path).map_err(Failure::new)
    }

    /// Requests the rest of a file of which `file` has the beginning. If the hub does not send the
    /// rest, `file` is emptied, and the answer is the whole file.
    fn request(&self, name: &str, file: &mut File) -> Result<Answer, Failure> {
        let path = format!("/{}/resolve/{}/{name}", self.model.id, self.commit);
        let have = file.metadata().map_err(Failure::new)?.len();
        if have > 0 {
            match self.client.get(&path, have) {
                Ok(answer) if answer.start == have => return Ok(answer),
                // The range is not satisfiable: the file is shorter.
                Err(failure) if failure.status != Some(416) => return Err(failure),
                _ => file.set_len(0).map_err(Failure::new)?,
            }
        }
        let answer = self.client.get(&path, 0)?;
        match answer.start {
            0 => Ok(answer),
            start => {
                let text = format!("expected the file from its start, got it from byte {start}");
                Err(Failure::answer(answer.status, text))
            }
        }
    }
}

/// Maximum size in bytes of the file `name`.
fn bytes_max(name: &str) -> u64 {
    match name {
        files::TOKENIZER => read::TOKENIZER_BYTES_MAX,
        files::CHAT_TEMPLATE => read::TEMPLATE_BYTES_MAX,
        name if name.ends_with(".json") => read::JSON_BYTES_MAX,
        _ => WEIGHT_BYTES_MAX,
    }
}

/// Checks the size that the hub has sent for the file `name`. It is required for weights.
fn expected_size(name: &str, status: u16, size: Option<u64>) -> Result<Option<u64>, Failure> {
    let max = bytes_max(name);
    match size {
        Some(size) if size > max => {
            let text = format!("expected at most {max} bytes, got {size}");
            Err(Failure::answer(status, text))
        }
        None if max == WEIGHT_BYTES_MAX => {
            Err(Failure::answer(status, "expected a size, got none"))
        }
        size => Ok(size),
    }
}

/// Logs the progress of a download.
struct Progress {
    what: String,
    size: Option<u64>,
    next: Instant,
}

impl Progress {
    fn new(model: &ModelRef<'_>, name: &str, size: Option<u64>) -> Self {
        let what = format!("{}: {name}", model.id);
        Self { what, size, next: Instant::now() + PROGRESS_INTERVAL }
    }

    /// Reports that `bytes` bytes of the file are on disk.
    fn report(&mut self, bytes: u64) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + PROGRESS_INTERVAL;
        let percent = self.size.map_or(0, |size| 100 * bytes / size.max(1));
        tracing::info!("downloading {}: {} MB, {percent} %", self.what, bytes / 1_000_000);
    }
}

/// The directory of the cached snapshot of the revision, which is a name or a commit. `None` if
/// there is no snapshot or some of its files are missing.
fn cached(model: &ModelRef<'_>, cache: &RepoCache) -> Option<PathBuf> {
    let commit = cache.commit_of(model.revision).unwrap_or_else(|| model.revision.to_owned());
    cache.snapshot(&commit).filter(|directory| is_complete(directory))
}

fn is_complete(directory: &Path) -> bool {
    if !directory.join(files::CONFIG).exists() {
        return false;
    }
    if directory.join(safetensors::SINGLE).exists() {
        return true;
    }
    let index = directory.join(safetensors::INDEX);
    let shards = read::read_json(&index).and_then(|value| safetensors::shards("index", &value));
    shards.is_ok_and(|shards| shards.iter().all(|shard| directory.join(shard).exists()))
}

impl Failure {
    /// The error to report, with advice that may help.
    fn explain(self, model: &ModelRef<'_>, file: &str, options: &HubOptions) -> ModelError {
        let token = if options.token.is_some() {
            "the given token has no access"
        } else {
            "if the repository is private or gated, set HF_TOKEN"
        };
        let text = self.text;
        let reason = match self.status {
            Some(401 | 403) => {
                format!("refused (no such repository, or no access: {token}): {text}")
            }
            Some(404) => format!("not found (is the id or the revision mistyped?): {text}"),
            Some(_) => text,
            None => format!(
                "{text} (check that {} is reachable; HF_HUB_OFFLINE=1 uses the cache only)",
                options.endpoint
            ),
        };
        model.error(file, reason)
    }
}
