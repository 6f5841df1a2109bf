//! The progress bars of downloads from the hub, and a spinner while a model is loaded, on standard
//! error.

use std::io::{self, IsTerminal};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use stolon::{DownloadProgress, EngineBuilder};

/// Draws the bars, one per line.
static LINES: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Shows a spinner with `message` until the bar is cleared. If standard error is not a terminal,
/// nothing is shown.
pub(crate) fn spinner(message: String) -> ProgressBar {
    let spinner = LINES.add(ProgressBar::new_spinner()).with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

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
    let mut bar = LINES
        .add(progress.size.map_or_else(ProgressBar::no_length, ProgressBar::new))
        .with_message(progress.file.to_owned())
        .with_position(progress.bytes);
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar = bar.with_style(style);
    }
    // Bytes of an earlier download do not count for the speed: the first drawing notes the
    // position, and the speed is measured from there.
    bar.tick();
    bar.reset_eta();
    bar
}
