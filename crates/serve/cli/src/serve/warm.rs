//! `--warm FILE`: prompts that are computed before the server answers requests.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use stolon::Engine;
use stolon_http::{RouterOptions, WarmUp};

use super::Served;
use crate::{terminal, text_file};

/// Maximum number of requests in the file.
const LINES_MAX: usize = 4096;

/// The prompts that are computed at start.
#[derive(Debug, Args)]
pub(super) struct WarmArgs {
    /// File with requests whose prompts are computed before the server is ready: JSON lines
    ///
    /// Each line is the body of a request to /v1/chat/completions, with its messages and tools, or
    /// to /v1/completions, with a prompt. What concerns the answer has no effect. With --tenant-by,
    /// `tenant` names the tenant whose clients send the prompt. With --kv-cache-dir, KV that is
    /// stored there is read, not computed. The file has at most 4,096
    /// requests and 64 MiB. A line that is not a request, or whose prompt does not fit, is an
    /// error, and the server does not start.
    #[arg(long, value_name = "FILE")]
    warm: Option<PathBuf>,
}

/// The requests of the file.
#[derive(Debug, Default)]
pub(super) struct Requests {
    file: PathBuf,
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    /// Number of the line, from 1.
    number: usize,
    request: String,
    /// The name of the model, if the request has one.
    model: Option<String>,
}

impl WarmArgs {
    /// Reads the file and checks the form of its requests.
    pub(super) fn read(&self) -> anyhow::Result<Requests> {
        let Some(file) = &self.warm else { return Ok(Requests::default()) };
        let text = text_file::read(file, text_file::MAX_BYTES)?;
        let numbered = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let line = |(number, line): (usize, &str)| {
            let model = WarmUp::check(line.as_bytes());
            let model = model.map_err(|error| anyhow!("{}:{number}: {error}", file.display()))?;
            Ok(Line { number, request: line.to_owned(), model })
        };
        let lines = numbered.take(LINES_MAX + 1).map(line).collect::<anyhow::Result<Vec<_>>>()?;
        let shown = file.display();
        ensure!(lines.len() <= LINES_MAX, "{shown}: expected at most {LINES_MAX} requests");
        ensure!(
            !lines.is_empty(),
            "{shown}: expected at least one request, a JSON object per line"
        );
        Ok(Requests { file: file.clone(), lines })
    }
}

impl Requests {
    /// Computes the prompts, one after another.
    pub(super) async fn compute(
        &self,
        served: &Served,
        options: &RouterOptions,
    ) -> anyhow::Result<()> {
        let Requests { file, lines } = self;
        if lines.is_empty() {
            return Ok(());
        }
        terminal::note(format!("computing {} prompts of {}", lines.len(), file.display()));
        let (begun, mut tokens) = (Instant::now(), 0);
        for Line { number, request, model } in lines {
            let line = || format!("{}:{number}", file.display());
            let request = request.as_bytes();
            let computed = match served {
                Served::One(engine) => {
                    WarmUp::new(engine.clone(), options.clone()).compute(request).await
                }
                Served::Several(models) => {
                    let first = models.names().next().unwrap_or_default();
                    let lease = models.get(model.as_deref().unwrap_or(first)).await;
                    // It keeps the model loaded.
                    let lease = lease.with_context(line)?;
                    WarmUp::new(Engine::clone(&lease), options.clone()).compute(request).await
                }
            };
            tokens += computed.map_err(|error| anyhow!("{}: {error}", line()))?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        terminal::note(format!("{tokens} tokens are cached, after {seconds:.1} s"));
        Ok(())
    }
}
