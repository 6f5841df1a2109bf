//! Downloads from the hub (feature `hub`).

use stolon_checkpoint::{DownloadProgress, ProgressCallback};

use crate::EngineBuilder;

impl EngineBuilder {
    /// Calls `callback` with the progress of each file that is downloaded from the hub, several
    /// times a second. Default: none, and progress is logged every five seconds.
    ///
    /// ```no_run
    /// let builder = stolon::Engine::builder().model("Qwen/Qwen3-0.6B").download_progress(|file| {
    ///     eprintln!("{}: {} bytes of {:?}", file.file, file.bytes, file.size);
    /// });
    /// # drop(builder);
    /// ```
    pub fn download_progress(
        mut self,
        callback: impl Fn(&DownloadProgress<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.load_options.hub.progress = Some(ProgressCallback::new(callback));
        self
    }
}
