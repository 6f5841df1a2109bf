//! [`ObjectError`]: why an object store cannot be used.

use std::time::Duration;

/// Why an object store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectError {
    /// The URL is not the URL of a store.
    #[error(
        "expected the URL of an object store, such as s3://bucket/folder, gs://, az:// or file://, \
         got `{url}`: {reason}"
    )]
    Url {
        /// The URL.
        url: String,
        /// The problem with it, or with the settings of its store.
        reason: String,
    },
    /// This build has no object stores.
    #[error("expected a build with the feature `object-store`, got the object store `{0}`")]
    Unsupported(String),
    /// The store has answered with an error.
    #[error("the object store: {0}")]
    Store(String),
    /// The store does not have this object.
    #[error("the object store does not have `{0}`")]
    Missing(String),
    /// The store did not answer in time.
    #[error("the object store has not answered within {} s", .0.as_secs())]
    Timeout(Duration),
    /// An object has another size than its record.
    #[error("the object `{object}`: expected {expected} bytes, got {got}")]
    Size {
        /// Its name.
        object: String,
        /// Bytes of the record.
        expected: usize,
        /// Bytes of the object.
        got: u64,
    },
}

#[cfg(feature = "object-store")]
impl From<object_store::Error> for ObjectError {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { path, .. } => ObjectError::Missing(path),
            error => ObjectError::Store(error.to_string()),
        }
    }
}
