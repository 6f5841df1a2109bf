//! Flags of the tiers behind the KV pool: a directory, and an object store that servers share.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::bail;
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
    /// token ids, and answers as text.
    #[arg(long, value_name = "DIR")]
    pub kv_cache_dir: Option<PathBuf>,
    /// Maximum size of `--kv-cache-dir`, in bytes (`20G`) or as a multiple of the size of the KV
    /// pool (`4x`, at most `1000x`). Default 16G
    ///
    /// `--eviction-policy` decides what is removed first.
    #[arg(long, value_name = "SIZE")]
    pub kv_cache_dir_size: Option<DiskSize>,
    /// When KV is written to `--kv-cache-dir`: `write-through` (as soon as it is computed, the
    /// default), `write-through-selective[=HITS]` (when HITS later requests have begun with it, by
    /// default one), or `write-back` (when it is evicted from the KV pool, and when the server
    /// stops)
    #[arg(long, alias = "hicache-write-policy", value_name = "POLICY")]
    pub kv_write_policy: Option<WritePolicy>,
    /// How long a request waits for KV that is read from `--kv-cache-dir` or from an object store:
    /// `best-effort` (as long as that is expected to be faster than computing it, the default),
    /// `wait-complete` (until everything is read), or `timeout=MILLISECONDS` (as the first, but not
    /// longer)
    #[arg(long, alias = "hicache-storage-prefetch-policy", value_name = "POLICY")]
    pub kv_prefetch_policy: Option<PrefetchPolicy>,
    /// Maximum memory for KV that was read from `--kv-cache-dir` or from an object store and is not
    /// in the KV pool yet: by default the size of the KV pool, at least 64M and at most 1G
    ///
    /// It is used in addition to the memory of the KV pool. If a prompt needs more, only its
    /// beginning is read.
    #[arg(long, requires = "kv_cache_dir", value_parser = parse_bytes, value_name = "SIZE")]
    pub kv_read_memory: Option<u64>,
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

/// Maximum size of the disk tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DiskSize {
    /// A number of bytes, at least 1.
    Bytes(u64),
    /// A multiple of the size of the KV pool: above 0 and at most 1,000.
    Ratio(f64),
}

impl DiskSize {
    /// The size if none is given.
    pub(crate) const DEFAULT: DiskSize = DiskSize::Bytes(16 << 30);
}

impl FromStr for DiskSize {
    type Err = String;

    /// Parses a size in bytes, as [`parse_bytes`], or a number followed by `x`.
    fn from_str(text: &str) -> Result<DiskSize, String> {
        let size = match text.trim().strip_suffix(['x', 'X']) {
            None => parse_bytes(text).ok().map(DiskSize::Bytes),
            Some(number) => {
                let ratio = number.parse().ok().filter(|&ratio| ratio > 0.0 && ratio <= 1000.0);
                ratio.map(DiskSize::Ratio)
            }
        };
        size.ok_or_else(|| {
            format!(
                "expected a size such as 20G, or a multiple of the size of the KV pool such as 4x, \
                 above 0x and at most 1000x, got `{text}`"
            )
        })
    }
}

impl TierArgs {
    /// Adds a disk tier of this size in a directory, with the policies in these arguments.
    pub(crate) fn with_disk(
        &self,
        builder: EngineBuilder,
        directory: &Path,
        size: DiskSize,
    ) -> EngineBuilder {
        let builder = match size {
            DiskSize::Bytes(bytes) => builder.kv_cache_dir(directory, bytes),
            DiskSize::Ratio(ratio) => builder.kv_cache_dir_ratio(directory, ratio),
        };
        let write = self.kv_write_policy.unwrap_or_default();
        let prefetch = self.kv_prefetch_policy.unwrap_or_default();
        let builder = builder.write_policy(write).prefetch_policy(prefetch);
        match self.kv_read_memory {
            Some(bytes) => builder.kv_read_memory(bytes),
            None => builder,
        }
    }

    /// The flags that have no effect without a directory, and whether each is set.
    fn of_directory(&self) -> [(&'static str, bool); 3] {
        [
            ("--kv-cache-dir-size", self.kv_cache_dir_size.is_some()),
            ("--kv-write-policy", self.kv_write_policy.is_some()),
            ("--kv-prefetch-policy", self.kv_prefetch_policy.is_some()),
        ]
    }

    /// Adds all tiers that are asked for.
    ///
    /// # Errors
    /// If the key of namespaces cannot be read, or a flag of the disk tier is set but no directory.
    pub(super) fn apply(&self, mut builder: EngineBuilder) -> anyhow::Result<EngineBuilder> {
        let set = self.of_directory().into_iter().find(|&(_, is_set)| is_set);
        if let Some(directory) = &self.kv_cache_dir {
            let size = self.kv_cache_dir_size.unwrap_or(DiskSize::DEFAULT);
            builder = self.with_disk(builder, directory, size);
        } else if let Some((flag, _)) = set {
            bail!("expected --kv-cache-dir with {flag}, which has no effect without a directory");
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: bytes and multiples of the KV pool are parsed, and anything else is refused.
    #[test]
    fn sizes_of_the_disk_tier_are_parsed() {
        for (text, size) in [
            ("1048576", DiskSize::Bytes(1 << 20)),
            ("20G", DiskSize::Bytes(20 << 30)),
            ("4x", DiskSize::Ratio(4.0)),
            (" 0.5x ", DiskSize::Ratio(0.5)),
            (".25X", DiskSize::Ratio(0.25)),
            ("1000x", DiskSize::Ratio(1000.0)),
        ] {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
        let bad = ["", "x", "0x", "-0x", "-1x", "1000.1x", "NaNx", "infx", "0x10", "4xx", "4Gx"];
        for text in bad {
            let refused = text.parse::<DiskSize>().expect_err(text);
            assert!(refused.contains("4x") && refused.contains(&format!("`{text}`")), "{refused}");
        }
    }
}
