//! `stolon bench`: measurements of a whole engine. What is measured and how it is summed up are
//! pure functions ([`workload`], [`metrics`]); [`runner`] sends the requests and notes the times.

use clap::Subcommand;

mod load;
pub mod metrics;
mod prefix;
mod progress;
pub mod runner;
mod soak;
pub mod workload;

/// The measurements there are.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Many requests with one long common beginning: prefix caching off against on
    Prefix(prefix::PrefixArgs),
    /// Many clients at once against one after another; then half, all and twice what can be served
    Load(load::LoadArgs),
    /// Thousands of requests of mixed lengths, some cancelled: memory stays flat, books balance
    Soak(soak::SoakArgs),
}

impl BenchCommand {
    /// Runs the measurement that was asked for.
    ///
    /// # Errors
    /// Whatever stops the engine, and a finding that must not be.
    pub async fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Prefix(args) => args.run().await,
            Self::Load(args) => args.run().await,
            Self::Soak(args) => args.run().await,
        }
    }
}
