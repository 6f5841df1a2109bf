//! Why the engine could not be started, or could not complete a request.

use std::borrow::Cow;

use stolon_model::ModelError;
use stolon_scheduler::EngineError;
use stolon_text::{ChatTemplateError, EmptyStopString, TokenizerError};

/// Every error of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The running engine refused or could not complete a request.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model could not be loaded, or the memory of its KV cache could not be allocated.
    #[error("cannot load the model: {0}")]
    Load(#[from] ModelError),
    /// The chat template rejects the conversation, or the model has none.
    #[error(transparent)]
    ChatTemplate(#[from] ChatTemplateError),
    /// The model's tokenizer could not be read, or the text could not be tokenised.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A request uses text, but the engine has no tokenizer: it runs on a custom backend, or the
    /// library was built without the feature `text`.
    #[error("this engine has no tokenizer: expected token ids, got text")]
    NoTokenizer,
}

impl Error {
    /// An [`EngineError::InvalidParameter`].
    pub(crate) fn invalid(
        name: impl Into<Cow<'static, str>>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        EngineError::invalid(name, expected, got).into()
    }
}

impl From<EmptyStopString> for Error {
    fn from(_: EmptyStopString) -> Error {
        Error::invalid("stop", "strings of at least one character", "an empty string")
    }
}
