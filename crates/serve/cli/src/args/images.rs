//! The memory that images take, as flags.

use clap::Args;
use stolon::EngineBuilder;

use crate::memory::{parse_bytes, parse_bytes_or_zero};

/// The memory that images take. Only models that take images use it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct ImageArgs {
    /// Memory for the encoder's output for images that were used last, so that the same image behind
    /// another prompt is not encoded again; 0 for none
    ///
    /// Only models that take images use it. Images that are in the KV cache with their prompt need
    /// no such memory. Default 64M.
    #[arg(long, value_parser = parse_bytes_or_zero, value_name = "BYTES")]
    pub encoder_cache: Option<u64>,
    /// Maximum memory of the pixels of images that waiting requests hold; more are refused
    ///
    /// A tile of 512 x 512 pixels takes 768K. A request is accepted in any case if none waits.
    /// Default 1G.
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub max_queued_pixels: Option<u64>,
}

impl ImageArgs {
    /// Applies these flags to an engine builder.
    pub(super) fn apply(&self, mut builder: EngineBuilder) -> EngineBuilder {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        if let Some(size) = self.encoder_cache {
            builder = builder.encoder_cache_bytes(bytes(size));
        }
        if let Some(size) = self.max_queued_pixels {
            builder = builder.max_queued_pixel_bytes(bytes(size));
        }
        builder
    }
}
