//! Errors of loading a model from disk or from the hub, and of creating a backend for it.
//!
//! Every message names the file and the tensor or key in it, with the expected and the actual
//! value, so that users can find a broken download without a debugger. The message includes the
//! message of the error that caused it. `source()` therefore does not return this error.

use std::path::PathBuf;

use stolon_kernels::KernelError;

/// The reason why a model could not be found, read or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The string given as a model is not a directory, a `.gguf` file, a hub id or a preset.
    #[error(
        "`{given}` is not a model: expected a directory, a .gguf file, a hub id \
         (org/name or org/name@revision) or random:PRESET; {reason}"
    )]
    UnknownSource {
        /// The given string.
        given: String,
        /// The reason why it is not a model.
        reason: String,
    },
    /// A file could not be opened or read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// A file is larger than a file of its kind can be.
    #[error("{file}: expected at most {bytes_max} bytes, got more")]
    TooLarge {
        /// The file.
        file: String,
        /// Maximum size of such a file in bytes.
        bytes_max: u64,
    },
    /// The model does not fit in memory.
    #[error("{what}: {expected} bytes of memory are needed, and {free} are free")]
    OutOfMemory {
        /// The part that needs the memory.
        what: String,
        /// The needed number of bytes.
        expected: u64,
        /// The number of bytes that are free.
        free: u64,
    },
    /// A file that a model needs is missing.
    #[error("{}: missing file: expected {expected}", directory.display())]
    MissingFile {
        /// The directory that was searched.
        directory: PathBuf,
        /// The accepted file names.
        expected: String,
    },
    /// The content of a file does not conform to its format.
    #[error("{file}: malformed: {reason}")]
    Malformed {
        /// The file.
        file: String,
        /// The location, the expected and the actual content.
        reason: String,
    },
    /// A file is shorter than its header says.
    #[error("{file}: truncated: {what} needs {expected} bytes, the file has {got}")]
    Truncated {
        /// The file.
        file: String,
        /// The part that is missing or incomplete.
        what: String,
        /// Minimum length of the file in bytes for this part to be complete.
        expected: u64,
        /// Actual length of the file in bytes.
        got: u64,
    },
    /// A key of a configuration is missing or has an invalid value.
    #[error("{file}: key `{key}`: expected {expected}, got {got}")]
    InvalidKey {
        /// The file.
        file: String,
        /// The key; the names of nested objects are separated by dots.
        key: String,
        /// The accepted values.
        expected: String,
        /// The actual value; `nothing` if the key is missing.
        got: String,
    },
    /// The decoder does not support the architecture.
    #[error("{file}: unknown architecture {got}: expected one of {expected}")]
    UnknownArchitecture {
        /// The file.
        file: String,
        /// The architecture's name in the file.
        got: String,
        /// The supported names.
        expected: String,
    },
    /// A valid option that is not implemented and cannot be ignored without changing the output.
    #[error("{file}: key `{key}`: {got} is not supported: expected {expected}")]
    Unsupported {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The unsupported value.
        got: String,
        /// The values that are supported.
        expected: String,
    },
    /// A tensor that the configuration requires is not in the weights.
    #[error("{file}: missing tensor `{tensor}`: expected shape {expected:?}, got nothing")]
    MissingTensor {
        /// The file or index.
        file: String,
        /// The tensor's Hugging Face name.
        tensor: String,
        /// The shape that the configuration requires.
        expected: Vec<usize>,
    },
    /// A tensor's shape differs from the one that the configuration requires.
    #[error("{file}: tensor `{tensor}`: expected shape {expected:?}, got {got:?}")]
    WrongShape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that the configuration requires.
        expected: Vec<usize>,
        /// The tensor's shape in the file.
        got: Vec<usize>,
    },
    /// The kernels do not support a tensor's element type.
    #[error("{file}: tensor `{tensor}`: expected type {expected}, got {got}")]
    WrongType {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The supported types.
        expected: String,
        /// The tensor's type in the file.
        got: String,
    },
    /// An adapter has a tensor for a projection that adapters cannot change.
    #[error(
        "{file}: tensor `{tensor}` is not supported: expected the matrices lora_A and lora_B of a \
         projection of this model, of the embedding or of the output matrix"
    )]
    NotAdaptable {
        /// The file.
        file: String,
        /// The tensor's name in the file.
        tensor: String,
    },
    /// The hub refused a request or could not be reached.
    #[error("hub: {repo}@{revision}: {file}: {reason}")]
    Hub {
        /// The repository.
        repo: String,
        /// The requested revision.
        revision: String,
        /// The requested file.
        file: String,
        /// The error, with advice that may help.
        reason: String,
    },
    /// A tensor's bytes cannot be packed for the kernels.
    #[error("tensor `{tensor}`: {error}")]
    Unpackable {
        /// The tensor.
        tensor: String,
        /// The error of the kernels.
        error: KernelError,
    },
    /// The KV store could not be created.
    #[error(transparent)]
    KvStore(#[from] KvStoreError),
    /// An option given by the caller is out of range.
    #[error("{name}: expected {expected}, got {got}")]
    InvalidOption {
        /// The option's name.
        name: String,
        /// The accepted values.
        expected: String,
        /// The given value.
        got: String,
    },
}

/// The reason why a KV store could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvStoreError {
    /// The block size is not supported.
    #[error("block size: expected a power of two from 1 to 256, got {got}")]
    BlockSize {
        /// The requested block size.
        got: usize,
    },
    /// The budget is smaller than one block.
    #[error("KV memory: expected at least {block_bytes} bytes (one block), got {budget}")]
    BudgetTooSmall {
        /// Size of one block in bytes, over all layers.
        block_bytes: usize,
        /// The budget in bytes.
        budget: u64,
    },
    /// The number of blocks is 0 or does not fit in a block id.
    #[error("KV blocks: expected 1 to {max}, got {got}", max = u32::MAX)]
    BlockCount {
        /// The requested number of blocks.
        got: usize,
    },
    /// There is not enough memory, or the operating system refused it.
    #[error(
        "KV memory: {expected} bytes are needed for {block_count} blocks of {block_bytes} bytes, \
         and {free} are free"
    )]
    OutOfMemory {
        /// The requested number of bytes.
        expected: u64,
        /// The requested number of blocks.
        block_count: usize,
        /// Size of one block in bytes.
        block_bytes: usize,
        /// Number of free bytes, without the bytes that the weights need.
        free: u64,
    },
}

impl ModelError {
    /// Creates a [`ModelError::Malformed`].
    pub(crate) fn malformed(file: impl Into<String>, reason: impl ToString) -> Self {
        Self::Malformed { file: file.into(), reason: quoted(&reason.to_string()) }
    }

    /// Creates a [`ModelError::InvalidKey`].
    pub fn key(file: &str, key: &str, expected: impl ToString, got: impl ToString) -> Self {
        Self::InvalidKey {
            file: file.into(),
            key: key.into(),
            expected: expected.to_string(),
            got: quoted(&got.to_string()),
        }
    }

    /// Creates a [`ModelError::InvalidOption`].
    pub fn option(name: &str, expected: impl ToString, got: impl ToString) -> Self {
        let [expected, got] = [expected.to_string(), got.to_string()];
        Self::InvalidOption { name: name.to_owned(), expected, got }
    }

    /// Creates a [`ModelError::InvalidOption`] for a value that is not one of `names`.
    pub(crate) fn not_one_of(option: &str, names: &[&str], got: &str) -> Self {
        Self::option(option, format!("one of {}", names.join(", ")), format!("`{got}`"))
    }

    /// Creates a [`ModelError::Unsupported`].
    pub fn unsupported(file: &str, key: &str, expected: impl ToString, got: impl ToString) -> Self {
        Self::Unsupported {
            file: file.into(),
            key: key.into(),
            expected: expected.to_string(),
            got: quoted(&got.to_string()),
        }
    }
}

/// Prepares a string that may be from a file or from the hub for an error message: control
/// characters are escaped, and it is truncated after 500 characters.
pub(crate) fn quoted(text: &str) -> String {
    const CHARS_MAX: usize = 500;
    let mut out = String::new();
    for (index, char) in text.chars().enumerate() {
        match char {
            _ if index == CHARS_MAX => return out + "...",
            char if char.is_control() => out.extend(char.escape_default()),
            char => out.push(char),
        }
    }
    out
}
