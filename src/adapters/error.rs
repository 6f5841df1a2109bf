//! Why an adapter cannot be loaded or used.

use std::path::PathBuf;

use stolon_backend::AdapterLoadError;

/// Why an adapter cannot be loaded, unloaded or used by a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// The backend does not support adapters.
    #[error("this backend does not support LoRA adapters")]
    Unsupported,
    /// No adapter of this name is loaded.
    #[error("no adapter `{name}` is loaded")]
    Unknown {
        /// The name.
        name: String,
    },
    /// An adapter of this name is loaded already.
    #[error("an adapter `{name}` is loaded already")]
    Exists {
        /// The name.
        name: String,
    },
    /// No adapter can have this name.
    #[error(
        "the name of an adapter: expected 1 to 256 bytes without control characters, and not \
         `{model}`, the name of the model; got `{got}`"
    )]
    InvalidName {
        /// The name.
        got: String,
        /// The name of the model.
        model: String,
    },
    /// As many adapters as possible are loaded.
    #[error("expected at most {max} adapters, got one more")]
    TooMany {
        /// Maximum number of adapters.
        max: usize,
    },
    /// The files cannot be used.
    #[error("cannot load the adapter `{name}`: {reason}")]
    Load {
        /// The name.
        name: String,
        /// The problem with the files.
        reason: AdapterLoadError,
    },
    /// The adapter had left the memory, and its files are not the same any longer. It has to be
    /// loaded again, so that a name changes its answers only on request.
    #[error(
        "the files of the adapter `{name}` in {} have changed since it was loaded: load it again",
        path.display()
    )]
    Changed {
        /// The name.
        name: String,
        /// The directory or file.
        path: PathBuf,
    },
    /// The adapters in use leave too little memory. Retry when requests have ended.
    #[error(
        "the adapter `{name}` needs {needed} bytes, and adapters in use take {in_use} of {memory} \
         bytes"
    )]
    OutOfMemory {
        /// The name.
        name: String,
        /// Size of its weights in bytes.
        needed: u64,
        /// Size of the weights that requests use, in bytes.
        in_use: u64,
        /// The maximum size of all weights in bytes.
        memory: u64,
    },
}
