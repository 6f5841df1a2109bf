//! Progress bars on standard error for long work; nothing at all where standard output or
//! standard error is no terminal, so that logs and pipes stay clean.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `count` items, named by what is done.
pub(super) fn bar(count: usize, what: impl Into<String>) -> ProgressBar {
    let seen = io::stdout().is_terminal() && io::stderr().is_terminal();
    let target = if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(count as u64), target).with_message(what.into());
    match ProgressStyle::with_template("{msg:32} {wide_bar} {pos}/{len} {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
