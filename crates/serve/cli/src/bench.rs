//! `stolon bench`: measurements of a whole engine, with the load generator of `stolon-loadgen`.

use clap::Subcommand;

mod load;
mod prefix;
mod progress;
mod serve;
mod soak;
mod tiers;
mod workloads;

pub(crate) use progress::bar;
pub(crate) use serve::trusting;

/// The available measurements.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Compare prefix caching off and on, with prompts that share a long prefix
    ///
    /// Reports time to first token, time between tokens, latency and throughput for both settings,
    /// and the fraction of prompt tokens that came from the cache.
    Prefix(prefix::PrefixArgs),
    /// Measure the engine's capacity, then its behavior below, at and above it
    ///
    /// First the same requests run one at a time and with many clients at once; the second gives
    /// the capacity. Then requests arrive at fixed multiples of the capacity, and the number of
    /// refused requests, the latency and the throughput are reported.
    Load(load::LoadArgs),
    /// Measure any server with an OpenAI-compatible API
    ///
    /// Sends requests at a given rate, whether or not earlier ones have been answered, or from a
    /// given number of clients. Reports time to first token, time per output token, latency and
    /// throughput, prompt tokens that came from the server's prefix cache, and errors by kind.
    Serve(Box<serve::BenchServeArgs>),
    /// Run thousands of requests of mixed lengths, cancel some, and check for leaks
    ///
    /// Fails if a KV block is not accounted for at the end. Reports resident memory over time
    /// (Linux only).
    Soak(soak::SoakArgs),
    /// Measure conversations that do not fit in the KV pool, without and with a disk tier
    ///
    /// Many conversations are interleaved. Together they are several times larger than the pool, so
    /// that each turn finds its history evicted. Then the time to first token of one prefix is
    /// measured cold, warm, and after a restart of the engine.
    Tiers(Box<tiers::TiersArgs>),
}

impl BenchCommand {
    /// Runs the measurement.
    ///
    /// # Errors
    /// Any error of the engine, a server that answers no request, and a failed check of the soak
    /// test.
    pub async fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Prefix(args) => args.run().await,
            Self::Load(args) => args.run().await,
            Self::Serve(args) => args.run().await,
            Self::Soak(args) => args.run().await,
            Self::Tiers(args) => args.run().await,
        }
    }
}
