//! What can be wrong with a model on its way from disk (or the hub) to a running backend.
//!
//! Every message names the file, and the tensor or key in it, with what was expected and what
//! came, so that nobody has to open a debugger to learn which download is broken.

use std::path::PathBuf;

use crate::kv_store::KvStoreError;
use stolon_kernels::KernelError;

/// Why a model could not be found, read or understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text given as a model is no directory, no `.gguf` file and no hub id.
    #[error(
        "`{given}` is no model: expected a directory, a .gguf file, a hub id \
         (org/name or org/name@revision) or random:PRESET; {reason}"
    )]
    UnknownSource {
        /// What was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file could not be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that a model needs is not there.
    #[error("{}: missing file: expected {expected}", directory.display())]
    MissingFile {
        /// Where it was looked for.
        directory: PathBuf,
        /// The names that would have done.
        expected: String,
    },
    /// A file's content breaks its own format.
    #[error("{file}: malformed: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// Where, what was expected, what came.
        reason: String,
    },
    /// A file ends before what its header promises.
    #[error("{file}: truncated: {what} needs {expected} bytes, the file has {got}")]
    Truncated {
        /// The file.
        file: String,
        /// The part that does not fit.
        what: String,
        /// Bytes needed, counted from the file's start.
        expected: u64,
        /// Bytes there.
        got: u64,
    },
    /// A key of a configuration is missing or its value is impossible.
    #[error("{file}: key `{key}`: expected {expected}, got {got}")]
    InvalidKey {
        /// The file.
        file: String,
        /// The key, dotted where nested.
        key: String,
        /// What would have done.
        expected: String,
        /// What stood there; `nothing` when it is missing.
        got: String,
    },
    /// The architecture is none that the decoder knows.
    #[error("{file}: unknown architecture {got}: expected one of {expected}")]
    UnknownArchitecture {
        /// The file.
        file: String,
        /// The name found.
        got: String,
        /// The names known.
        expected: String,
    },
    /// A valid option that the decoder does not implement; ignoring it would change the output.
    #[error("{file}: key `{key}`: {got} is not supported: expected {expected}")]
    Unsupported {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// Its value.
        got: String,
        /// The values that are supported.
        expected: String,
    },
    /// A tensor that the configuration asks for is not in the weights.
    #[error("{file}: missing tensor `{tensor}`: expected shape {expected:?}, got nothing")]
    MissingTensor {
        /// The file or index.
        file: String,
        /// The tensor's name as Hugging Face calls it.
        tensor: String,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
    },
    /// A tensor's shape is not what the configuration asks for.
    #[error("{file}: tensor `{tensor}`: expected shape {expected:?}, got {got:?}")]
    WrongShape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape the configuration asks for.
        expected: Vec<usize>,
        /// The shape found.
        got: Vec<usize>,
    },
    /// A tensor's element type is none that the kernels read.
    #[error("{file}: tensor `{tensor}`: expected type {expected}, got {got}")]
    WrongType {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The types that are read.
        expected: String,
        /// The type found.
        got: String,
    },
    /// The hub refused or could not be reached.
    #[error("hub: {repo}@{revision}: {file}: {reason}")]
    Hub {
        /// The repository.
        repo: String,
        /// The revision asked for.
        revision: String,
        /// The file asked for.
        file: String,
        /// What came instead, and what may help.
        reason: String,
    },
    /// A tensor's bytes cannot be packed for the kernels.
    #[error("tensor `{tensor}`: {source}")]
    Unpackable {
        /// The tensor.
        tensor: String,
        /// What does not fit.
        source: KernelError,
    },
    /// The KV store asked for cannot be had.
    #[error(transparent)]
    KvStore(#[from] KvStoreError),
    /// An option given by the caller is out of range.
    #[error("{name}: expected {expected}, got {got}")]
    InvalidOption {
        /// The option.
        name: String,
        /// What would have done.
        expected: String,
        /// What was given.
        got: String,
    },
}

impl ModelError {
    /// A [`ModelError::Malformed`].
    pub(crate) fn malformed(file: impl Into<String>, reason: impl ToString) -> Self {
        Self::Malformed { file: file.into(), reason: reason.to_string() }
    }

    /// A [`ModelError::InvalidKey`].
    pub(crate) fn key(file: &str, key: &str, expected: impl ToString, got: impl ToString) -> Self {
        Self::InvalidKey {
            file: file.into(),
            key: key.into(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }

    /// A [`ModelError::Unsupported`].
    pub(crate) fn unsupported(
        file: &str,
        key: &str,
        expected: impl ToString,
        got: impl ToString,
    ) -> Self {
        Self::Unsupported {
            file: file.into(),
            key: key.into(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }
}
