//! Flags of the tiers behind the KV pool: a directory, and an object store that servers share.

use std::path::{Path, PathBuf};

use clap::Args;
use stolon::{EngineBuilder, PrefetchPolicy, WritePolicy};

use super::files;
use crate::memory::parse_bytes;

/// Where computed KV is stored in addition to the KV pool.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct TierArgs {
    /// Directory in which computed KV is stored, so that it is read back instead of being computed
    /// again when it was evicted, and after a restart
    ///
    /// It is created if it does not exist, and only one process can use it at a time. KV is read
    /// back only where that is faster than computing it. The files contain prompts and answers as
    /// token ids.
    #[arg(long, value_name = "DIR")]
    pub kv_cache_dir: Option<PathBuf>,
    /// Maximum size of `--kv-cache-dir`, in bytes or with a unit. `--eviction-policy` decides what
    /// is removed first
    #[arg(long, value_parser = parse_bytes, default_value = "16G", value_name = "BYTES")]
    pub kv_cache_dir_size: u64,
    /// When KV is written to `--kv-cache-dir`: `write-through` (as soon as it is computed),
    /// `write-through-selective[=HITS]` (when HITS later requests have begun with it, by default
    /// one), or `write-back` (when it is evicted from the KV pool, and when the server stops)
    #[arg(long, alias = "hicache-write-policy")]
    #[arg(default_value_t = WritePolicy::default(), value_name = "POLICY")]
    pub kv_write_policy: WritePolicy,
    /// How long a request waits for KV that is read from `--kv-cache-dir` or from an object store:
    /// `best-effort` (as long as that is expected to be faster than computing it), `wait-complete`
    /// (until everything is read), or `timeout=MILLISECONDS` (as the first, but not longer)
    #[arg(long, alias = "hicache-storage-prefetch-policy")]
    #[arg(default_value_t = PrefetchPolicy::default(), value_name = "POLICY")]
    pub kv_prefetch_policy: PrefetchPolicy,
    /// Object store in which the KV of `--kv-cache-dir` is stored, too, so that servers with the
    /// same model share it: `s3://bucket/folder`, `gs://`, `az://`, or `file://` for a shared
    /// directory
    ///
    /// Credentials, regions and endpoints are taken from the environment: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `GOOGLE_SERVICE_ACCOUNT`,
    /// `AZURE_STORAGE_ACCOUNT_NAME` and so on. Stolon removes nothing from the store.
    #[cfg(feature = "object-store")]
    #[arg(long, requires = "kv_cache_dir", value_name = "URL")]
    pub kv_object_store: Option<String>,
    /// File with the secret key from which the namespaces of cache salts and tenants are derived:
    /// 64 hexadecimal digits
    ///
    /// Servers that share an object store need the same key to share KV of requests with a salt. By
    /// default the key is kept in `--kv-cache-dir`; without a directory, each process draws a
    /// random key.
    #[arg(long, value_name = "FILE")]
    pub namespace_key_file: Option<PathBuf>,
}

impl TierArgs {
    /// Adds a disk tier in a directory, with the settings of the disk tier in these arguments.
    pub(crate) fn with_disk(&self, builder: EngineBuilder, directory: &Path) -> EngineBuilder {
        builder
            .kv_cache_dir(directory, self.kv_cache_dir_size)
            .write_policy(self.kv_write_policy)
            .prefetch_policy(self.kv_prefetch_policy)
    }

    /// Adds all tiers that are asked for.
    ///
    /// # Errors
    /// If the key of namespaces cannot be read.
    pub(super) fn apply(&self, mut builder: EngineBuilder) -> anyhow::Result<EngineBuilder> {
        if let Some(directory) = &self.kv_cache_dir {
            builder = self.with_disk(builder, directory);
        }
        if let Some(path) = &self.namespace_key_file {
            builder = builder.namespace_key(files::read_namespace_key(path)?);
        }
        #[cfg(feature = "object-store")]
        if let Some(url) = &self.kv_object_store {
            builder = builder.kv_object_store(url);
        }
        Ok(builder)
    }
}
