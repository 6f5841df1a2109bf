//! Downloads models from the Hugging Face hub to its cache on disk.
//!
//! Online, the revision is resolved to a commit once and all files are taken from that commit, so
//! that a model never mixes files of two commits. Only files that the engine reads and that are not
//! in the cache are downloaded. Offline, or if the hub cannot be reached, the cached snapshot is
//! used.

mod options;

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

pub use options::HubOptions;

use crate::error::ModelError;
use crate::load::directory as files;
use crate::weights::{read_json, safetensors};

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
            file: file.into(),
            reason: reason.to_string(),
        }
    }
}

/// Downloads missing files of the model, and returns the directory of a snapshot that has all
/// files.
///
/// # Errors
/// [`ModelError::Hub`] with the hub's answer and what may help.
pub(crate) fn fetch(id: &str, revision: &str, options: &HubOptions) -> Result<PathBuf, ModelError> {
    let model = ModelRef { id, revision };
    let cache = Cache::new(options.cache.clone());
    if options.offline {
        return cached(&model, &cache).ok_or_else(|| {
            let cache = options.cache.display();
            model
                .error(files::CONFIG, format!("offline, and there is no snapshot of it in {cache}"))
        });
    }
    let api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(options.endpoint.clone())
        .with_token(options.token.clone())
        .with_progress(options.progress)
        .build()
        .map_err(|e| model.error("", e))?;
    let repo = repo(id, revision);
    let info = match api.repo(repo.clone()).info() {
        Ok(info) => info,
        Err(error) => {
            let failure = Failure::from(error);
            // The cache is used only if the hub has not answered. An error from the hub counts.
            if failure.status.is_none()
                && let Some(directory) = cached(&model, &cache)
            {
                let (text, directory_shown) = (&failure.text, directory.display());
                tracing::warn!("cannot reach the hub ({text}); using {directory_shown}");
                return Ok(directory);
            }
            return Err(failure.explain(&model, "model info", options));
        }
    };
    if !plain_name(&info.sha) {
        let reason = format!("expected a commit, got `{}`", info.sha);
        return Err(model.error("model info", reason));
    }
    let available: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let snapshot = Snapshot {
        model: &model,
        options,
        repo: api.repo(self::repo(id, &info.sha)),
        directory: snapshot_directory(&cache, &repo, &info.sha),
    };
    snapshot.fetch(&available)?;
    // Record in the cache that the revision is this commit, so that it is found offline.
    cache
        .repo(repo)
        .create_ref(&info.sha)
        .map_err(|source| ModelError::Io { path: options.cache.clone(), source })?;
    Ok(snapshot.directory)
}

/// One commit of a repository, whose files are being downloaded.
struct Snapshot<'a> {
    model: &'a ModelRef<'a>,
    options: &'a HubOptions,
    repo: ApiRepo,
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
        let shards = safetensors::shards(&index.display().to_string(), &read_json(&index)?)?;
        for shard in shards {
            self.get(&shard)?;
        }
        Ok(())
    }

    /// Returns the path of the file on disk. Downloads it first if it is not in the cache.
    fn get(&self, name: &str) -> Result<PathBuf, ModelError> {
        let path = self.directory.join(name);
        if path.exists() {
            return Ok(path);
        }
        let failed = |e| Failure::from(e).explain(self.model, name, self.options);
        self.repo.download(name).map_err(failed)
    }
}

fn repo(id: &str, revision: &str) -> Repo {
    Repo::with_revision(id.into(), RepoType::Model, revision.into())
}

fn snapshot_directory(cache: &Cache, repo: &Repo, commit: &str) -> PathBuf {
    cache.path().join(repo.folder_name()).join("snapshots").join(commit)
}

/// Whether a commit's name can be used as a component of a path.
fn plain_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric())
}

/// The directory of the cached snapshot of the revision, which is a name or a commit. `None` if
/// there is no snapshot or some of its files are missing.
fn cached(model: &ModelRef<'_>, cache: &Cache) -> Option<PathBuf> {
    let repo = repo(model.id, model.revision);
    let named = cache.path().join(repo.folder_name()).join("refs").join(model.revision);
    let commit = match std::fs::read_to_string(named) {
        Ok(commit) => commit.trim().to_owned(),
        Err(_) => model.revision.to_owned(),
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
    /// The HTTP status of the hub's answer; `None` if there was no answer.
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
