//! Errors of tokenizers, chat templates and stop strings.

use std::path::PathBuf;

use crate::stop_strings::{MAX_STOP_BYTES, MAX_STOP_STRINGS};

/// The machine had no processor time or no thread for some work of a request. It is not the fault
/// of the request, which may succeed when it is sent again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server is too busy: {reason}; try again")]
pub struct Busy {
    /// The work that was not done.
    pub reason: String,
}

#[cfg(feature = "tokenizer")]
impl Busy {
    pub(crate) fn new(reason: impl Into<String>) -> Busy {
        Busy { reason: reason.into() }
    }
}

/// Why a tokenizer could not be created from a model's files, or a text could not be tokenized.
///
/// Messages about files name the file, what was expected and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The model came without a tokenizer.
    #[error("{}: missing file: expected tokenizer.json", directory.display())]
    Missing {
        /// The directory that was searched.
        directory: PathBuf,
    },
    /// The file's content does not follow its own format.
    #[error("{file}: malformed: {reason}")]
    Malformed {
        /// Name of the file.
        file: String,
        /// What was expected and what was found.
        reason: String,
    },
    /// A metadata key is missing, or its value is impossible.
    #[error("{file}: key `{key}`: expected {expected}, got {got}")]
    InvalidKey {
        /// Name of the file.
        file: String,
        /// The key.
        key: String,
        /// What is accepted.
        expected: String,
        /// What was found; `nothing` if the key is missing.
        got: String,
    },
    /// The tokenizer is valid but of a kind that is not implemented.
    #[error("{file}: key `{key}`: {got} is not supported: expected {expected}")]
    Unsupported {
        /// Name of the file.
        file: String,
        /// The key that has the unsupported value.
        key: String,
        /// The unsupported value.
        got: String,
        /// The values that are implemented.
        expected: String,
    },
    /// The vocabulary cannot represent the text and has no token for unknown characters.
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
}

#[cfg(feature = "tokenizer")]
impl TokenizerError {
    pub(crate) fn malformed(file: &str, reason: impl ToString) -> TokenizerError {
        TokenizerError::Malformed { file: file.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn key(
        file: &str,
        key: &str,
        expected: impl ToString,
        got: impl ToString,
    ) -> TokenizerError {
        TokenizerError::InvalidKey {
            file: file.to_owned(),
            key: key.to_owned(),
            expected: expected.to_string(),
            got: got.to_string(),
        }
    }

    pub(crate) fn unsupported(
        file: &str,
        key: &str,
        expected: impl ToString,
        got: impl ToString,
    ) -> TokenizerError {
        TokenizerError::Unsupported {
            file: file.to_owned(),
            key: key.to_owned(),
            got: got.to_string(),
            expected: expected.to_string(),
        }
    }
}

/// Why a conversation could not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// The model has no chat template. It can only continue text.
    #[error("the model has no chat template, so it can only continue text")]
    Missing,
    /// The model has no template with the requested name.
    #[error("expected one of the chat templates {available}, got `{name}`")]
    UnknownName {
        /// The requested name.
        name: String,
        /// The names of the model's templates, separated by `, `.
        available: String,
    },
    /// A template is not valid Jinja.
    #[error("the chat template `{name}` is malformed: {reason}")]
    Malformed {
        /// The template's name.
        name: String,
        /// The location and cause of the syntax error.
        reason: String,
    },
    /// The template rejected the conversation with `raise_exception`, for example because roles do
    /// not alternate.
    #[error("the chat template rejected the conversation: {message}")]
    Raised {
        /// The message that the template passed to `raise_exception`.
        message: String,
    },
    /// The template failed while it rendered the conversation.
    #[error("the chat template failed: {reason}")]
    Failed {
        /// The location and cause of the failure.
        reason: String,
    },
    /// The conversation exceeds a limit: 16 MiB of text, 500,000 values, or 100 levels of nested
    /// values. Tools, documents and variables are counted too.
    #[error("the conversation is too large: expected at most {limit} {what}")]
    TooLarge {
        /// The counted quantity.
        what: &'static str,
        /// The maximum.
        limit: usize,
    },
    /// A message has a content part that is not text, but the template supports only text.
    #[error(
        "expected content of type text, got {got}: the model's chat template supports only text"
    )]
    UnsupportedPart {
        /// The `type` of the part, such as `image_url`.
        got: String,
    },
    /// The machine is too busy to render the conversation now.
    #[error(transparent)]
    Busy(#[from] Busy),
}

/// Why a list of stop strings was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopStringsError {
    /// A stop string is empty. It would end every text before its first character.
    #[error("invalid stop: expected strings of at least one character, got an empty string")]
    Empty,
    /// There are more than [`MAX_STOP_STRINGS`].
    #[error("invalid stop: expected at most {MAX_STOP_STRINGS} strings")]
    TooMany,
    /// The strings have more than [`MAX_STOP_BYTES`] together.
    #[error("invalid stop: expected strings of at most {MAX_STOP_BYTES} bytes in all")]
    TooLong,
}
