//! The settings of an engine, as JSON.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use stolon::{EmbeddingConfig, EmbeddingSizes, Engine, EngineBuilder, Pooling};

use crate::error::Failure;

/// Reads JSON. The message of the error names the member that is wrong.
pub(crate) fn read<T: DeserializeOwned>(json: &str) -> Result<T, Failure> {
    let mut reader = serde_json::Deserializer::from_str(json);
    serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let reason = error.inner().to_string();
        // The place in the JSON means nothing to the caller, who has not written any.
        let reason = reason.split(" at line ").next().unwrap_or_default();
        let path = error.path().to_string();
        // The options of a batch are the same for all of its requests.
        let name = path.split_once("options.").map_or(path.as_str(), |(_, name)| name);
        match name {
            "." => Failure::Invalid(reason.to_owned()),
            name => Failure::Invalid(format!("{name}: {reason}")),
        }
    })
}

/// A duration of a number of seconds.
pub(crate) fn seconds(name: &str, seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::invalid(name, "a number of seconds of at least 0", seconds))
}

/// A name as the type knows it, whose error has the possible ones.
pub(crate) fn parsed<T: FromStr<Err: Display>>(name: &str, text: &str) -> Result<T, Failure> {
    text.parse().map_err(|error: T::Err| Failure::Invalid(format!("{name}: {error}")))
}

/// The settings that `stolon.EngineOptions` describes.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EngineOptions {
    adapters: BTreeMap<String, PathBuf>,
    adapter_memory: Option<u64>,
    admission: Option<String>,
    bind_threads: Option<bool>,
    block_size: Option<usize>,
    chat_template: Option<String>,
    default_max_tokens: Option<usize>,
    draft_model: Option<String>,
    encoder_cache_bytes: Option<usize>,
    eviction_policy: Option<String>,
    history_bytes: Option<usize>,
    kv_cache_bytes: Option<u64>,
    kv_cache_dir: Option<PathBuf>,
    kv_memory: Option<u64>,
    kv_type: Option<String>,
    logit_cache_bytes: Option<usize>,
    map_embeddings: Option<bool>,
    max_batched_tokens: Option<usize>,
    max_positions: Option<usize>,
    max_queued_requests: Option<usize>,
    max_queued_tokens: Option<usize>,
    max_running: Option<usize>,
    max_sessions: Option<usize>,
    mmproj: Option<PathBuf>,
    mtp: Option<bool>,
    namespace_quota: Option<usize>,
    normalize: Option<bool>,
    num_blocks: Option<usize>,
    pin_budget: Option<usize>,
    pooling: Option<PoolingName>,
    prefix_caching: Option<bool>,
    rerank_template: Option<String>,
    rerank_tokens: Option<Vec<String>>,
    session_budget: Option<usize>,
    session_ttl: Option<f64>,
    step_timeout: Option<f64>,
    threads: Option<usize>,
    weights: Option<String>,
    window_kv: Option<String>,
}

/// How embeddings are made.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PoolingName {
    Last,
    Mean,
}

impl EngineOptions {
    /// The engine's builder with these settings.
    ///
    /// # Errors
    /// [`Failure::Invalid`] for a value that is not one of the setting's.
    pub(crate) fn builder(self, model: String) -> Result<EngineBuilder, Failure> {
        let mut builder = Engine::builder().model(model);
        macro_rules! set {
            ($($name:ident),*) => {
                $(if let Some(value) = self.$name {
                    builder = builder.$name(value);
                })*
            };
        }
        macro_rules! set_parsed {
            ($($name:ident),*) => {
                $(if let Some(text) = &self.$name {
                    builder = builder.$name(parsed(stringify!($name), text)?);
                })*
            };
        }
        macro_rules! set_seconds {
            ($($name:ident),*) => {
                $(if let Some(value) = self.$name {
                    builder = builder.$name(seconds(stringify!($name), value)?);
                })*
            };
        }
        set!(
            adapter_memory,
            bind_threads,
            block_size,
            chat_template,
            default_max_tokens,
            draft_model,
            encoder_cache_bytes,
            history_bytes,
            kv_memory,
            logit_cache_bytes,
            map_embeddings,
            max_batched_tokens,
            max_positions,
            max_queued_requests,
            max_queued_tokens,
            max_running,
            max_sessions,
            mmproj,
            mtp,
            namespace_quota,
            num_blocks,
            pin_budget,
            prefix_caching,
            rerank_template,
            session_budget,
            threads
        );
        set_parsed!(admission, eviction_policy, kv_type, weights, window_kv);
        set_seconds!(session_ttl, step_timeout);
        for (name, path) in self.adapters {
            builder = builder.adapter(name, path);
        }
        builder = match self.rerank_tokens.as_deref() {
            None => builder,
            Some([positive]) => builder.rerank_tokens(positive, None),
            Some([positive, negative]) => builder.rerank_tokens(positive, Some(negative)),
            Some(others) => {
                let expected = "one or two strings of one token each";
                return Err(Failure::invalid("rerank_tokens", expected, others.len()));
            }
        };
        builder = match (self.kv_cache_dir, self.kv_cache_bytes) {
            (None, None) => builder,
            (Some(directory), Some(bytes)) => builder.kv_cache_dir(directory, bytes),
            (directory, _) => {
                let got = if directory.is_some() { "`kv_cache_dir`" } else { "`kv_cache_bytes`" };
                let expected = "`kv_cache_dir` and `kv_cache_bytes` together";
                return Err(Failure::invalid("kv_cache_dir", expected, got));
            }
        };
        if let Some(name) = self.pooling {
            let pooling = match name {
                PoolingName::Last => Pooling::Last,
                PoolingName::Mean => Pooling::Mean,
            };
            let normalize = self.normalize.unwrap_or(true);
            let config = EmbeddingConfig { pooling, normalize, sizes: EmbeddingSizes::Any };
            builder = builder.embedding(config);
        } else if self.normalize.is_some() {
            return Err(Failure::invalid("normalize", "`pooling` with it", "none"));
        }
        Ok(builder)
    }
}
