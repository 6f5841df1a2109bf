//! Adapters: small changes of a model's weights, such as LoRA, which each slice of a batch may
//! choose.
//!
//! 1. A backend that supports adapters returns an [`AdapterLoader`]
//!    ([`Backend::adapters`](crate::Backend::adapters)). The engine gets it once, on the
//!    executor thread, and calls it on other threads while steps are computed.
//! 2. The loader reads an adapter's files and returns an [`Adapter`] that is ready to be used.
//! 3. A request holds a clone from its submission to its end, and its slices have one each
//!    ([`SequenceSlice::adapter`](crate::SequenceSlice::adapter)). So nothing has to be registered
//!    with the backend, and nothing can be unloaded during a step.
//! 4. The memory is released when the last clone is dropped.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// An adapter in memory. Clones share it.
#[derive(Clone)]
pub struct Adapter {
    parts: Arc<Parts>,
}

struct Parts {
    fingerprint: [u8; 32],
    bytes: u64,
    rank: usize,
    weights: Box<dyn Any + Send + Sync>,
}

impl Adapter {
    /// An adapter with the weights `weights`, in the form that the backend uses them in.
    ///
    /// `fingerprint` is a hash of everything that the adapter changes in answers, so adapters with
    /// equal fingerprints compute equal KV. `bytes` is the size of the weights in memory, and
    /// `rank` the largest rank of its matrices.
    pub fn new(
        fingerprint: [u8; 32],
        bytes: u64,
        rank: usize,
        weights: impl Any + Send + Sync,
    ) -> Self {
        Self { parts: Arc::new(Parts { fingerprint, bytes, rank, weights: Box::new(weights) }) }
    }

    /// The weights, if they are of the type `W`: an adapter of another backend has another type.
    #[must_use]
    pub fn weights<W: Any>(&self) -> Option<&W> {
        self.parts.weights.downcast_ref()
    }

    /// A hash of everything that the adapter changes in answers.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        self.parts.fingerprint
    }

    /// Size of the weights in memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.bytes
    }

    /// The largest rank of its matrices.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.parts.rank
    }

    /// Number of clones, including this one.
    #[must_use]
    pub fn clones(&self) -> usize {
        Arc::strong_count(&self.parts)
    }
}

/// Two adapters are equal if they are clones of one another.
impl PartialEq for Adapter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.parts, &other.parts)
    }
}

impl Eq for Adapter {}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.parts.fingerprint.first_chunk().map_or(0, |id| u64::from_be_bytes(*id));
        write!(f, "Adapter({start:016x}, rank {}, {} bytes)", self.parts.rank, self.parts.bytes)
    }
}

/// Reads adapters for the model of a backend.
pub trait AdapterLoader: fmt::Debug + Send + Sync {
    /// Reads the adapter at `path`, a file or a directory, and brings it into the form that steps
    /// use. Blocks the calling thread, and may be called on several threads at the same time.
    ///
    /// The files are read completely before this returns, so they may be overwritten afterward.
    ///
    /// # Errors
    /// [`AdapterLoadError`]. Files of more than `bytes_max` bytes are refused before they are read,
    /// and so are adapters that would take more memory.
    fn load(&self, path: &Path, bytes_max: u64) -> Result<Adapter, AdapterLoadError>;
}

/// Why an adapter cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdapterLoadError {
    /// There is no adapter at this path.
    #[error("{0}")]
    NotFound(String),
    /// The files cannot be read, are malformed, do not fit the model, or have something that is not
    /// supported. The message names the file and the tensor or the key.
    #[error("{0}")]
    Invalid(String),
    /// The files, or the weights in memory, are larger than the maximum.
    #[error("{0}")]
    TooLarge(String),
}
