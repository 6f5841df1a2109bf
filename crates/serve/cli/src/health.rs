//! `stolon health`: whether a server is ready, as the health check of a container without a shell.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::{cache, terminal};

/// Arguments of `stolon health`.
#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Address of the server
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "STOLON_URL")]
    url: String,
    /// PEM file with the certificates of the authorities to trust, instead of the public ones, for
    /// a server with https
    #[arg(long, value_name = "FILE", env = "STOLON_CACERT")]
    cacert: Option<PathBuf>,
    /// Seconds after which a server that has not answered counts as not ready
    #[arg(long, value_name = "SECONDS", default_value_t = 5,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

impl HealthArgs {
    /// Asks the server's `/ready` and prints the reply. The exit status is 1 if it is not ready.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        // The HTTP client blocks.
        tokio::task::spawn_blocking(move || self.run_blocking()).await?
    }

    fn run_blocking(&self) -> anyhow::Result<ExitCode> {
        let Self { url, cacert, timeout } = self;
        let agent = cache::agent(cacert.as_deref(), |config| {
            config.timeout_global(Some(Duration::from_secs(*timeout)))
        })?;
        let url = format!("{}/ready", url.trim_end_matches('/'));
        let mut reply = agent.get(&url).call().map_err(|error| cache::unreachable(&url, error))?;
        let text = reply.body_mut().read_to_string()?;
        terminal::line(text.trim_end())?;
        Ok(if reply.status().is_success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
