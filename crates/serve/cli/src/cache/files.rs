//! `stolon cache export` and `stolon cache import`: cached prefixes as files.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use stolon_tiers::write_atomically;

use super::{Client, failure, unreachable};
use crate::text_file;

impl Client<'_> {
    /// Writes the KV of a prompt to a file, and returns its size in bytes.
    pub(super) fn export(&self, path: &Path, body: String) -> anyhow::Result<u64> {
        let url = self.route("export");
        let request = self.agent.post(&url).header("content-type", "application/json");
        let sent = self.with_key(request).send(body);
        let mut reply = sent.map_err(|error| unreachable(&url, error))?;
        if !reply.status().is_success() {
            return Err(failure(&mut reply));
        }
        let size = reply.body().content_length();
        let bar = bar(size, "exporting");
        let mut from = bar.wrap_read(reply.body_mut().with_config().limit(u64::MAX).reader());
        let mut written = 0;
        let write = |file: &mut File| {
            written = io::copy(&mut from, file)?;
            match size {
                Some(size) if size != written => Err(io::Error::other(format!(
                    "the reply was cut off: expected {size} bytes, got {written}"
                ))),
                _ => Ok(()),
            }
        };
        write_atomically(path, write)
            .with_context(|| format!("cannot write {}", path.display()))?;
        bar.finish_and_clear();
        Ok(written)
    }

    /// Sends an exported file to the server, and returns its reply.
    pub(super) fn import(&self, path: &Path) -> anyhow::Result<String> {
        let metadata = text_file::regular(path)?;
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let bar = bar(Some(metadata.len()), "importing");
        let url = self.route("import");
        let request = self
            .agent
            .post(&url)
            .header("content-type", "application/octet-stream")
            .header("content-length", metadata.len().to_string());
        let mut from = bar.wrap_read(file.take(metadata.len()));
        let sent = self.with_key(request).send(ureq::SendBody::from_reader(&mut from));
        let mut reply = sent.map_err(|error| unreachable(&url, error))?;
        bar.finish_and_clear();
        if !reply.status().is_success() {
            return Err(failure(&mut reply));
        }
        reply.body_mut().read_to_string().context("the reply was cut off")
    }
}

/// A progress bar on standard error, if it is a terminal.
fn bar(size: Option<u64>, message: &'static str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(size, ProgressDrawTarget::stderr());
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = match ProgressStyle::with_template(style) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    };
    bar.with_message(message)
}
