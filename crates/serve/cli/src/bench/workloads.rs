//! The named workloads of `stolon bench prefix`: one with a shared prefix, and three in which nothing
//! is shared, to show that prefix caching costs nothing where it cannot help.

use clap::ValueEnum;

use stolon_loadgen::workload::Arrivals;

/// A workload with fixed numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum WorkloadName {
    /// 48 prompts that share 1,024 tokens
    #[value(alias = "prefix_caching")]
    PrefixCaching,
    /// Nothing shared: 64 short prompts and answers, so that requests join and leave a running
    /// batch all the time
    #[value(alias = "continuous_batching")]
    ContinuousBatching,
    /// Nothing shared: 48 prompts from 16 to 1,024 tokens, so that sequences of very different
    /// numbers of KV blocks decode in one batch
    #[value(alias = "paged_attention")]
    PagedAttention,
    /// Nothing shared: 24 prompts from 1,024 to 1,536 tokens, which are computed in chunks while
    /// others decode
    #[value(alias = "chunked_prefill")]
    ChunkedPrefill,
}

/// The numbers of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Number of requests.
    pub(super) requests: u32,
    /// Tokens that all prompts share.
    pub(super) shared: usize,
    /// Smallest and largest number of tokens that a prompt does not share.
    pub(super) unique: (usize, usize),
    /// Tokens to generate per request.
    pub(super) output_tokens: u32,
    /// When requests arrive.
    pub(super) rate: Arrivals,
}

impl WorkloadName {
    pub(super) fn shape(self) -> Shape {
        let shape = |requests, shared, unique, output_tokens, rate| Shape {
            requests,
            shared,
            unique,
            output_tokens,
            rate,
        };
        let evenly = Arrivals::PerSecond;
        match self {
            Self::PrefixCaching => shape(48, 1_024, (32, 128), 32, evenly(8.0)),
            Self::ContinuousBatching => shape(64, 0, (32, 256), 64, evenly(16.0)),
            Self::PagedAttention => shape(48, 0, (16, 1_024), 64, Arrivals::AtOnce),
            Self::ChunkedPrefill => shape(24, 0, (1_024, 1_536), 32, evenly(8.0)),
        }
    }
}
