//! The progress bar of downloads from the hub, on standard error.

use std::io::{self, IsTerminal};
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use stolon::{DownloadProgress, EngineBuilder};

/// Lets the engine show a bar for each file that it downloads, if standard error is a terminal.
/// Otherwise the engine logs the progress.
pub(crate) fn with_bars(builder: EngineBuilder) -> EngineBuilder {
    if !io::stderr().is_terminal() {
        return builder;
    }
    let bars = Bars::default();
    builder.download_progress(move |progress| bars.update(progress))
}

/// The bar of the file that is being downloaded. Files are downloaded one after another.
#[derive(Debug, Default)]
struct Bars {
    current: Mutex<Option<(String, ProgressBar)>>,
}

impl Bars {
    /// Shows the progress of a file.
    fn update(&self, progress: &DownloadProgress<'_>) {
        // A poisoned lock would mean that drawing panicked before; the bar can still be used.
        let mut current = self.current.lock().unwrap_or_else(|error| error.into_inner());
        if current.as_ref().is_none_or(|(file, _)| file != progress.file) {
            *current = Some((progress.file.to_owned(), bar(progress)));
        }
        let Some((_, bar)) = current.as_ref() else { return };
        bar.set_position(progress.bytes);
        if progress.done {
            bar.finish();
            *current = None;
        }
    }
}

fn bar(progress: &DownloadProgress<'_>) -> ProgressBar {
    let mut bar = ProgressBar::with_draw_target(progress.size, ProgressDrawTarget::stderr())
        .with_message(progress.file.to_owned())
        .with_position(progress.bytes);
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar = bar.with_style(style);
    }
    // What an earlier download has left does not count for the speed: the first drawing notes the
    // position, and the speed is measured from there.
    bar.tick();
    bar.reset_eta();
    bar
}
