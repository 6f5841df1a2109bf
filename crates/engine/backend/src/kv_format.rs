//! [`KvFormat`] says what the bytes of a KV block mean.

use std::fmt;
use std::sync::{Arc, LazyLock};

/// What the bytes of a KV block mean. See [`Backend::kv_format`](crate::Backend::kv_format).
#[derive(Clone)]
pub struct KvFormat {
    description: String,
    fingerprint: Arc<LazyLock<Result<[u8; 32], String>, Compute>>,
}

type Compute = Box<dyn FnOnce() -> Result<[u8; 32], String> + Send>;

impl KvFormat {
    /// The format with this description for people, in one line: `llama, bf16, ...`. `fingerprint`
    /// computes a hash of everything, besides tokens and namespace, that the bytes of a block depend
    /// on: the weights, the architecture, the element type and the layout of keys and values, the
    /// block size, and the way of computing them. It is called at most once, where KV leaves the pool
    /// for the first time: a hash of all weights takes seconds, and most engines need none.
    pub fn new(
        description: impl Into<String>,
        fingerprint: impl FnOnce() -> Result<[u8; 32], String> + Send + 'static,
    ) -> Self {
        let compute: Compute = Box::new(fingerprint);
        Self { description: description.into(), fingerprint: Arc::new(LazyLock::new(compute)) }
    }

    /// The format for people, in one line.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The hash of the format. Two backends with equal fingerprints compute equal bytes for equal
    /// prefixes. The first call computes it, and blocks.
    ///
    /// # Errors
    /// The reason why it cannot be computed, such as a file that was changed meanwhile.
    pub fn fingerprint(&self) -> Result<[u8; 32], String> {
        (**self.fingerprint).clone()
    }
}

impl fmt::Debug for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvFormat({})", self.description)
    }
}
