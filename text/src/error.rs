//! What can go wrong between a caller's words and token ids.

use std::path::PathBuf;

/// Why a tokenizer could not be made from a model's files, or a text not be tokenised.
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
        /// The key that says so.
        key: String,
        /// Its value.
        got: String,
        /// The values that are implemented.
        expected: String,
    },
    /// The vocabulary cannot represent the text and has no token for unknown characters.
    #[error("cannot tokenise the text: {0}")]
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
pub enum ChatTemplateError {
    /// The model has no chat template: it continues text only.
    #[error("expected a chat template, but the model came with none")]
    Missing,
    /// The model has no template of that name.
    #[error("expected one of the chat templates {available}, got `{name}`")]
    UnknownName {
        /// The name asked for.
        name: String,
        /// The names there are.
        available: String,
    },
    /// A template is no valid Jinja.
    #[error("the chat template `{name}` is malformed: {reason}")]
    Malformed {
        /// The template's name.
        name: String,
        /// Where and why.
        reason: String,
    },
    /// The template refused the conversation: it is not of a form the model knows.
    #[error("the chat template refuses the conversation: {message}")]
    Raised {
        /// The template's own words.
        message: String,
    },
    /// The template failed on the conversation.
    #[error("the chat template failed: {reason}")]
    Failed {
        /// Where and why.
        reason: String,
    },
    /// A message has a part that is no text, and the template takes text alone.
    #[error("expected content of type text, got {got}: the model's chat template takes text only")]
    UnsupportedPart {
        /// The part's type.
        got: String,
    },
}

/// A stop string is empty. It would end every text before its first character.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stop: expected strings of at least one character, got an empty string")]
pub struct EmptyStopString;
