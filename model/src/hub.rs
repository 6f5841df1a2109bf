//! Models from the Hugging Face hub, through its cache on disk.
//!
//! Online, the revision is resolved to a commit once and every file is taken from that commit,
//! so that a model is never a mixture of two. Files that are in the cache already are not
//! fetched again, and only those that the engine reads are fetched at all. Offline, and when
//! the hub cannot be reached, the cached snapshot is used.

mod options;

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

pub use options::HubOptions;

use crate::error::ModelError;
use crate::load::directory as files;
use crate::weights::{read_json, safetensors};

/// What the hub is asked for.
struct Wanted<'a> {
    id: &'a str,
    revision: &'a str,
}

impl Wanted<'_> {
    fn error(&self, file: &str, reason: impl ToString) -> ModelError {
        ModelError::Hub {
            repo: self.id.into(),
            revision: self.revision.into(),
            file: file.into(),
            reason: reason.to_string(),
        }
    }
}

/// The directory of a snapshot that has every file of the model, fetching what is missing.
///
/// # Errors
/// [`ModelError::Hub`] with what the hub answered and what may help.
pub(crate) fn fetch(id: &str, revision: &str, options: &HubOptions) -> Result<PathBuf, ModelError> {
    let wanted = Wanted { id, revision };
    let cache = Cache::new(options.cache.clone());
    if options.offline {
        return cached(&wanted, &cache).ok_or_else(|| {
            let place = options.cache.display();
            wanted.error(files::CONFIG, format!("offline, and no snapshot of it is in {place}"))
        });
    }
    let api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(options.endpoint.clone())
        .with_token(options.token.clone())
        .with_progress(options.progress)
        .build()
        .map_err(|e| wanted.error("", e))?;
    let repo = repo(id, revision);
    let info = match api.repo(repo.clone()).info() {
        Ok(info) => info,
        Err(error) => {
            let failure = Failure::from(error);
            // The hub's own word counts; only when there is none does the cache stand in.
            if failure.status.is_none()
                && let Some(directory) = cached(&wanted, &cache)
            {
                let (text, directory_shown) = (&failure.text, directory.display());
                tracing::warn!("hub not reached ({text}); using {directory_shown}");
                return Ok(directory);
            }
            return Err(failure.explain(&wanted, "model info", options));
        }
    };
    if !plain_name(&info.sha) {
        let reason = format!("expected a commit, got `{}`", info.sha);
        return Err(wanted.error("model info", reason));
    }
    let there: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let snapshot = Snapshot {
        wanted: &wanted,
        options,
        repo: api.repo(self::repo(id, &info.sha)),
        directory: snapshot_directory(&cache, &repo, &info.sha),
    };
    snapshot.fetch(&there)?;
    // From now on the revision's name stands for this commit, also offline.
    cache
        .repo(repo)
        .create_ref(&info.sha)
        .map_err(|source| ModelError::Io { path: options.cache.clone(), source })?;
    Ok(snapshot.directory)
}

/// One commit, on its way to the disk.
struct Snapshot<'a> {
    wanted: &'a Wanted<'a>,
    options: &'a HubOptions,
    repo: ApiRepo,
    directory: PathBuf,
}

impl Snapshot<'_> {
    /// Fetches what the engine reads of the files `there`.
    fn fetch(&self, there: &[&str]) -> Result<(), ModelError> {
        let has = |name: &str| there.contains(&name);
        if !has(files::CONFIG) {
            let gguf = there.iter().find(|name| name.ends_with(".gguf"));
            let reason = match gguf {
                Some(name) => format!("the repository has none; download {name} and give the file"),
                None => "the repository has none: it holds no transformers model".into(),
            };
            return Err(self.wanted.error(files::CONFIG, reason));
        }
        // Small files first: what is wrong with them is told before the long download.
        for name in files::SMALL.iter().filter(|name| has(name)) {
            self.get(name)?;
        }
        if has(safetensors::SINGLE) {
            return self.get(safetensors::SINGLE).map(drop);
        }
        if !has(safetensors::INDEX) {
            let reason = "the repository has no safetensors weights";
            return Err(self.wanted.error(safetensors::SINGLE, reason));
        }
        let index = self.get(safetensors::INDEX)?;
        let shards = safetensors::shards(&index.display().to_string(), &read_json(&index)?)?;
        for shard in shards {
            self.get(&shard)?;
        }
        Ok(())
    }

    /// The file's place on the disk, after fetching it if it was not there.
    fn get(&self, name: &str) -> Result<PathBuf, ModelError> {
        let path = self.directory.join(name);
        if path.exists() {
            return Ok(path);
        }
        let failed = |e| Failure::from(e).explain(self.wanted, name, self.options);
        self.repo.download(name).map_err(failed)
    }
}

fn repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.into(), RepoType::Model, revision.into())
}

fn snapshot_directory(cache: &Cache, repo: &Repo, commit: &str) -> PathBuf {
    cache.path().join(repo.folder_name()).join("snapshots").join(commit)
}

/// Whether a commit's name can be part of a path.
fn plain_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// The snapshot that the cache has under the revision's name, or under the commit it is; only
/// one whose files are all there.
fn cached(wanted: &Wanted<'_>, cache: &Cache) -> Option<PathBuf> {
    let repo = repo(wanted.id, wanted.revision);
    let named = cache.path().join(repo.folder_name()).join("refs").join(wanted.revision);
    let commit = match std::fs::read_to_string(named) {
        Ok(commit) => commit.trim().to_owned(),
        Err(_) => wanted.revision.to_owned(),
    };
    let directory = plain_name(&commit).then(|| snapshot_directory(cache, &repo, &commit))?;
    is_complete(&directory).then_some(directory)
}

fn is_complete(directory: &Path) -> bool {
    if !directory.join(files::CONFIG).exists() {
        return false;
    }
    if directory.join(safetensors::SINGLE).exists() {
        return true;
    }
    let index = directory.join(safetensors::INDEX);
    let shards = read_json(&index).and_then(|value| safetensors::shards("index", &value));
    shards.is_ok_and(|shards| shards.iter().all(|shard| directory.join(shard).exists()))
}

/// A request that failed.
struct Failure {
    /// The HTTP status the hub answered with; nothing when it did not answer.
    status: Option<u16>,
    text: String,
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let text = error.to_string();
        let status = match error {
            ApiError::RequestError(error) => error.into_response().map(|r| r.status()),
            ApiError::TooManyRetries(error) => Self::from(*error).status,
            _ => None,
        };
        Self { status, text }
    }
}

impl Failure {
    /// The error to report, with what may help.
    fn explain(self, wanted: &Wanted<'_>, file: &str, options: &HubOptions) -> ModelError {
        let token = if options.token.is_some() {
            "the token given has no access to it"
        } else {
            "if it is private or gated, set HF_TOKEN"
        };
        let text = self.text;
        let reason = match self.status {
            Some(401 | 403) => {
                format!("refused (no such repository, or no access: {token}): {text}")
            }
            Some(404) => format!("not found (is the id or the revision mistyped?): {text}"),
            Some(_) => text,
            None => format!(
                "{text} (is {} reachable? HF_HUB_OFFLINE=1 uses the cache only)",
                options.endpoint
            ),
        };
        wanted.error(file, reason)
    }
}
