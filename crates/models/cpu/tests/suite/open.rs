//! How the tests open backends.

use stolon_backend::Backend;
use stolon_checkpoint::LoadedModel;

/// Opens a backend of a model with a KV store of at least 1,024 positions, or returns the message
/// of the error.
pub(crate) type Open<'a> = Box<dyn Fn(LoadedModel, Sizes) -> Result<Box<dyn Backend>, String> + 'a>;

/// Sizes on which no result depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Positions per KV block.
    pub(crate) block_size: usize,
    /// Number of threads that compute.
    pub(crate) threads: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { block_size: 16, threads: 1 }
    }
}
