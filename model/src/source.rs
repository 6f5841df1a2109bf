//! Where a model comes from: the text a user gives (`--model`), parsed.

use std::path::PathBuf;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelSource {
    /// A Hugging Face model directory.
    Directory(PathBuf),
    /// One GGUF file.
    Gguf(PathBuf),
    /// A repository on the hub, at a branch, tag or commit.
    Hub {
        /// `org/name`, or `name` for the few repositories without an owner.
        id: String,
        /// `main` unless given.
        revision: String,
    },
    /// The model that ships with the crate, behind the feature `demo-model`.
    #[cfg(feature = "demo-model")]
    Demo,
    /// Random weights in a real model's shape, for benchmarks and tests; text is plain bytes.
    Random {
        /// Name of the shape, e.g. `100m`; smallest first in the documentation of the presets.
        preset: String,
        /// The same seed gives the same weights.
        seed: u64,
    },
}
