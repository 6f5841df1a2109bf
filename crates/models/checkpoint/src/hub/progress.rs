//! Reports the progress of downloads to a callback of the caller, or to the log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::HubOptions;

/// Time between two log messages about the progress of a download.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// The progress of the download of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DownloadProgress<'a> {
    /// The repository, `org/name`.
    pub repo: &'a str,
    /// The file in the repository.
    pub file: &'a str,
    /// Number of bytes on disk, including the bytes of an earlier, interrupted download.
    pub bytes: u64,
    /// Size of the file in bytes, if the hub has sent it.
    pub size: Option<u64>,
    /// Whether the file is complete and its hash, if the hub has sent one, is correct.
    pub done: bool,
}

/// A function that is called with the [`DownloadProgress`] of each file several times a second. It
/// delays the download while it runs.
#[derive(Clone)]
pub struct ProgressCallback(Arc<dyn Fn(&DownloadProgress<'_>) + Send + Sync>);

impl ProgressCallback {
    /// Wraps a function.
    pub fn new(callback: impl Fn(&DownloadProgress<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }
}

impl std::fmt::Debug for ProgressCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProgressCallback")
    }
}

/// Reports the progress of one file.
pub(super) struct Reporter<'a> {
    callback: Option<&'a ProgressCallback>,
    progress: DownloadProgress<'a>,
    next_log: Instant,
}

impl<'a> Reporter<'a> {
    pub(super) fn new(
        options: &'a HubOptions,
        repo: &'a str,
        file: &'a str,
        size: Option<u64>,
    ) -> Self {
        let progress = DownloadProgress { repo, file, bytes: 0, size, done: false };
        let next_log = Instant::now() + LOG_INTERVAL;
        Self { callback: options.progress.as_ref(), progress, next_log }
    }

    /// Reports that `bytes` bytes of the file are on disk.
    pub(super) fn report(&mut self, bytes: u64) {
        self.progress.bytes = bytes;
        match self.callback {
            Some(ProgressCallback(callback)) => callback(&self.progress),
            None => self.log(),
        }
    }

    /// Reports that the file is complete.
    pub(super) fn done(&mut self) {
        self.progress.done = true;
        if let Some(ProgressCallback(callback)) = self.callback {
            callback(&self.progress);
        }
    }

    fn log(&mut self) {
        if Instant::now() < self.next_log {
            return;
        }
        self.next_log = Instant::now() + LOG_INTERVAL;
        let DownloadProgress { repo, file, bytes, size, .. } = self.progress;
        let percent = size.map_or(0, |size| 100 * bytes / size.max(1));
        tracing::info!("downloading {repo}: {file}: {} MB, {percent} %", bytes / 1_000_000);
    }
}
