//! Downloads models from the Hugging Face hub to its cache on disk.
//!
//! Online, the revision is resolved to a commit once and all files are taken from that commit, so a
//! model never mixes files of two commits. Files are downloaded only if the engine reads them and
//! they are not in the cache. An interrupted download is resumed, and the hash of each file is
//! verified. Offline, or if the hub cannot be reached, the cached snapshot is used.

mod cache;
mod checksum;
mod client;
mod download;
mod headers;
mod options;
mod progress;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use cache::{RepoCache, plain_path};
use client::{Client, Failure};
pub(crate) use headers::{Remote, headers};
pub use options::HubOptions;
pub use progress::{DownloadProgress, ProgressCallback};

use crate::error::{ModelError, quoted};
use crate::files as read;
use crate::gguf::split;
use crate::load::{directory as files, task_adapters};
use crate::source::is_hub_id;
use crate::weights::safetensors;

/// Maximum size in bytes of the hub's description of a repository.
const INFO_BYTES_MAX: u64 = 16 << 20;
/// Maximum size in bytes of one file with weights. The public hub accepts no file of this size.
const WEIGHT_BYTES_MAX: u64 = 1 << 40;

/// The requested model.
struct ModelRef<'a> {
    id: &'a str,
    revision: &'a str,
    /// The name of a GGUF file, or of a quantization such as `Q4_K_M`.
    file: Option<&'a str>,
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

/// The fields that are used of the hub's description of a repository.
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
/// files, or the path of a GGUF file in it. `file` selects a GGUF model: see
/// [`ModelSource::Hub`](crate::ModelSource::Hub).
///
/// # Errors
/// [`ModelError::Hub`] with the hub's answer and advice that may help.
pub(crate) fn fetch(
    id: &str,
    revision: &str,
    file: Option<&str>,
    options: &HubOptions,
) -> Result<PathBuf, ModelError> {
    let model = ModelRef { id, revision, file };
    with_snapshot(&model, options, Ok, |snapshot, available| {
        let path = snapshot.fetch(available)?;
        let recorded = snapshot.cache.set_commit(revision, snapshot.commit);
        recorded.map_err(|error| ModelError::Io { path: options.cache.clone(), error })?;
        Ok(path)
    })
}

/// Calls `online` with the current commit of the revision and the names of its files. If the hub
/// cannot be reached, or must not be used, calls `if_cached` with the path of the model in the
/// cache instead.
fn with_snapshot<T>(
    model: &ModelRef<'_>,
    options: &HubOptions,
    if_cached: impl Fn(PathBuf) -> Result<T, ModelError>,
    online: impl Fn(&Snapshot<'_>, &[&str]) -> Result<T, ModelError>,
) -> Result<T, ModelError> {
    if !is_hub_id(model.id, model.revision, model.file) {
        return Err(model.error("model info", "expected the form org/name@revision:file"));
    }
    let cache = RepoCache::new(&options.cache, model.id);
    if options.offline {
        let path = cached(model, &cache).ok_or_else(|| {
            let cache = options.cache.display();
            model
                .error(files::CONFIG, format!("offline, and there is no snapshot of it in {cache}"))
        })?;
        return if_cached(path);
    }
    let explain = |failure: Failure| failure.explain(model, "model info", options);
    let client = Client::new(options).map_err(explain)?;
    let info = match info(&client, model) {
        Ok(info) => info,
        Err(failure) => {
            // The cache is used only if the hub has not answered. An error that the hub has
            // returned is reported.
            if failure.status.is_none()
                && let Some(path) = cached(model, &cache)
            {
                let (text, shown) = (&failure.text, path.display());
                tracing::warn!("cannot reach the hub ({text}); using {shown}");
                return if_cached(path);
            }
            return Err(explain(failure));
        }
    };
    let Some(directory) = cache.snapshot(&info.sha) else {
        let reason = format!("expected a commit, got `{}`", info.sha);
        return Err(model.error("model info", reason));
    };
    let available: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let snapshot = Snapshot { model, client, cache: &cache, options, commit: &info.sha, directory };
    online(&snapshot, &available)
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

/// One commit of a repository whose files are being downloaded.
struct Snapshot<'a> {
    model: &'a ModelRef<'a>,
    client: Client<'a>,
    cache: &'a RepoCache,
    options: &'a HubOptions,
    /// A [`plain`] name.
    commit: &'a str,
    directory: PathBuf,
}

/// The files of a model in a repository.
struct ModelFiles {
    /// The snapshot's directory, or the path of the first part of a GGUF model in it.
    path: PathBuf,
    /// The names of the files with weights.
    weights: Vec<String>,
}

impl Snapshot<'_> {
    /// Downloads the files of `available` that the engine reads. Returns the path of the model.
    fn fetch(&self, available: &[&str]) -> Result<PathBuf, ModelError> {
        let files = self.files(available)?;
        files.weights.iter().try_for_each(|name| self.get(name).map(drop))?;
        Ok(files.path)
    }

    /// Downloads all files of the model except its weights.
    fn files(&self, available: &[&str]) -> Result<ModelFiles, ModelError> {
        let has = |name: &str| available.contains(&name);
        let has_weights = has(safetensors::SINGLE) || has(safetensors::INDEX);
        if self.model.file.is_some() || !has(files::CONFIG) || !has_weights {
            return self.gguf_files(available);
        }
        let is_template = |name: &&str| {
            name.starts_with(&format!("{}/", files::NAMED_TEMPLATES)) && name.ends_with(".jinja")
        };
        let templates = available.iter().copied().filter(is_template);
        let templates = templates.take(files::NAMED_TEMPLATES_MAX);
        let of_dense = |file: &'static str| {
            let is_dense = move |name: &&str| {
                name.split_once('/')
                    .is_some_and(|(module, name)| module.ends_with("_Dense") && name == file)
            };
            available.iter().copied().filter(is_dense).take(crate::load::embedding::DENSE_MAX)
        };
        let small = files::SMALL.into_iter().filter(|name| has(name)).chain(templates);
        for name in small.chain(of_dense(files::CONFIG)) {
            self.get(name)?;
        }
        let config = read::read_json(&self.path(files::CONFIG)?)?;
        let [settings, matrices] = task_adapters::files(&config)?;
        settings.iter().try_for_each(|name| self.get(name).map(drop))?;
        let path = self.directory.clone();
        let mut weights = match has(safetensors::SINGLE) {
            true => vec![safetensors::SINGLE.to_owned()],
            false => {
                let index = self.get(safetensors::INDEX)?;
                let file = index.display().to_string();
                safetensors::shards(&file, &read::read_json(&index)?)?
            }
        };
        weights.extend(of_dense(safetensors::SINGLE).map(str::to_owned).chain(matrices));
        Ok(ModelFiles { path, weights })
    }

    /// The parts of a GGUF model.
    fn gguf_files(&self, available: &[&str]) -> Result<ModelFiles, ModelError> {
        let first = split::choose(available.iter().copied(), self.model.file)
            .map_err(|models| self.no_choice(available, &models))?;
        let weights = split::parts(&first);
        if let Some(missing) = weights.iter().find(|part| !available.contains(&part.as_str())) {
            let reason = "the repository does not have this part of the model";
            return Err(self.model.error(missing, reason));
        }
        Ok(ModelFiles { path: self.directory.join(first), weights })
    }

    /// The error for a repository that does not have exactly one GGUF model that matches the
    /// request.
    fn no_choice(&self, available: &[&str], models: &[String]) -> ModelError {
        const LISTED: usize = 20;
        if models.is_empty() {
            return match available.contains(&files::CONFIG) {
                true => {
                    let reason = "the repository has no safetensors weights and no GGUF file";
                    self.model.error(safetensors::SINGLE, reason)
                }
                false => {
                    let reason = "the repository has neither this file nor a GGUF file";
                    self.model.error(files::CONFIG, reason)
                }
            };
        }
        let listed: Vec<_> = models.iter().take(LISTED).map(String::as_str).collect();
        let more = if models.len() > LISTED { ", ..." } else { "" };
        let listed = listed.join(", ") + more;
        match self.model.file {
            Some(file) => self.model.error(file, format!("expected one of {listed}")),
            None => {
                let id = self.model.id;
                let reason = format!("choose one as {id}:FILE or {id}:Q8_0, for example: {listed}");
                self.model.error("several GGUF models", reason)
            }
        }
    }

    /// The path of the file on disk, whether or not the file exists.
    fn path(&self, name: &str) -> Result<PathBuf, ModelError> {
        if !plain_path(name) {
            let expected = "expected a file name of letters, digits, `-`, `_` and `.`";
            return Err(self.model.error(name, expected));
        }
        Ok(self.directory.join(name))
    }

    /// Returns the path of the file on disk. Downloads it first if it is not in the cache.
    fn get(&self, name: &str) -> Result<PathBuf, ModelError> {
        let path = self.path(name)?;
        if !path.exists() {
            let failed = |failure: Failure| failure.explain(self.model, name, self.options);
            self.download(name, &path).map_err(failed)?;
        }
        Ok(path)
    }
}

/// Maximum size in bytes of the file `name`.
fn bytes_max(name: &str) -> u64 {
    match name {
        files::TOKENIZER => read::TOKENIZER_BYTES_MAX,
        name if name.ends_with(".jinja") => read::TEMPLATE_BYTES_MAX,
        name if name.ends_with(".json") => read::JSON_BYTES_MAX,
        _ => WEIGHT_BYTES_MAX,
    }
}

/// The path of the model in the cached snapshot of the revision, which is a name or a commit;
/// `None` if there is no snapshot or if some of its files are missing.
fn cached(model: &ModelRef<'_>, cache: &RepoCache) -> Option<PathBuf> {
    let commit = cache.commit_of(model.revision).unwrap_or_else(|| model.revision.to_owned());
    let directory = cache.snapshot(&commit)?;
    if model.file.is_none() && is_complete(&directory) {
        return Some(directory);
    }
    let names = cache::files_in(&directory);
    let first = split::choose(names.iter().map(String::as_str), model.file).ok()?;
    let complete = split::parts(&first).iter().all(|part| directory.join(part).exists());
    complete.then(|| directory.join(first))
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
    /// Converts a failure to the error to report, with advice that may help.
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
            Some(404) => {
                let id = model.id;
                format!(
                    "not found (is the id or the revision mistyped? there is no directory `{id}` \
                     here either): {text}"
                )
            }
            Some(_) => text,
            None if self.corrupt => format!("{text} (the file has been removed; try again)"),
            None => format!(
                "{text} (check that {} is reachable; HF_HUB_OFFLINE=1 uses the cache only; there is \
                 no directory `{}` here either)",
                options.endpoint, model.id
            ),
        };
        model.error(file, reason)
    }
}
