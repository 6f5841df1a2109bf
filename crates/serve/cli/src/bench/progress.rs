//! Progress bars on standard error. Nothing is drawn unless both standard output and standard error
//! are terminals, so that logs and pipes contain only results.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar for `count` items with the label `what`.
pub(crate) fn bar(count: usize, what: impl Into<String>) -> ProgressBar {
    let visible = io::stdout().is_terminal() && io::stderr().is_terminal();
    let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(count as u64), target).with_message(what.into());
    match ProgressStyle::with_template("{msg:32} {wide_bar} {pos}/{len} {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
