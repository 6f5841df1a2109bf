//! Why a model of a set cannot be used.

use crate::Error;

/// Why a model of a [`ModelSet`](crate::ModelSet) cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelSetError {
    /// No model has this name.
    #[error("there is no model `{name}`: expected one of {}", quoted(known))]
    Unknown {
        /// The name.
        name: String,
        /// The names of all models.
        known: Vec<String>,
    },
    /// The model could not be loaded. The next request for it tries again.
    #[error("the model `{name}` cannot be loaded: {error}")]
    Load {
        /// The name of the model.
        name: String,
        /// Why.
        error: Box<Error>,
    },
    /// The model does not fit into the memory of the set, even if every model leaves that may.
    #[error(
        "the model `{name}` does not fit: it needs {needed} bytes, and {available} of {budget} bytes \
         are not taken by pinned models"
    )]
    TooLarge {
        /// The name of the model.
        name: String,
        /// The memory that it needs, in bytes.
        needed: u64,
        /// The memory that pinned models leave, in bytes.
        available: u64,
        /// The memory of all models, in bytes.
        budget: u64,
    },
    /// The set was shut down.
    #[error("the models have been shut down")]
    Stopped,
}

fn quoted(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
