//! Why the engine could not be started, or could not complete a request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use stolon_checkpoint::ModelError;
use stolon_scheduler::{EngineError, SessionError};
use stolon_text::{
    Busy, ChatTemplateError, GrammarError, GrammarFailure, MAX_STOP_BYTES, MAX_STOP_STRINGS,
    StopStringsError, TokenizerError,
};

use crate::AdapterError;

/// Every error of the library.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The running engine refused or could not complete a request.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model could not be loaded, or the memory of its KV cache could not be allocated.
    #[error("cannot load the model: {0}")]
    Load(Arc<ModelError>),
    /// The chat template rejects the conversation, or the model has none.
    #[error(transparent)]
    ChatTemplate(ChatTemplateError),
    /// The model's tokenizer could not be read, or the text could not be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The request's grammar is invalid, not supported or too large, or the library was built
    /// without the feature `grammar`.
    #[error("grammar: {0}")]
    Grammar(#[from] GrammarError),
    /// The machine is too busy to compile the request's grammar or to render its conversation now.
    /// The request may be sent again.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// The answer is not a value of the Rust type that was requested: it was cut off, or the type
    /// has a rule that its schema cannot express.
    #[cfg(feature = "schema")]
    #[error("the answer is not of the type that was requested: {reason}")]
    NotOfType {
        /// Why the answer is not a value of the type.
        reason: String,
        /// The text of the answer.
        text: String,
    },
    /// An image of a request cannot be decoded, or is not accepted by the model.
    #[error("image {number}: {reason}")]
    Image {
        /// The number of the image in the request, from 1.
        number: usize,
        /// The expected and the received value.
        reason: String,
    },
    /// A request uses text, but the engine has no tokenizer: the model comes without one, the
    /// engine runs on a custom backend, or the library was built without the feature `text`.
    #[error("this engine has no tokenizer: expected token ids, got text")]
    NoTokenizer,
    /// The model was not trained to fill a gap in a text.
    #[error(
        "this model cannot fill in the middle: expected a tokenizer with tokens for it, such as \
         `<|fim_prefix|>`, `<|fim_suffix|>` and `<|fim_middle|>`"
    )]
    NoInfill,
    /// The model is not meant for embeddings.
    #[error(
        "the model `{model}` is not meant for embeddings: expected a model with `modules.json` and \
         `1_Pooling/config.json` of sentence-transformers, or a GGUF file with `pooling_type`"
    )]
    NotForEmbeddings {
        /// The model's name.
        model: String,
    },
    /// The model makes embeddings only: it has no output matrix.
    #[error(
        "the model `{model}` cannot generate text: it has no output matrix and is for embeddings \
         only"
    )]
    EmbeddingsOnly {
        /// The model's name.
        model: String,
    },
    /// The model computes scores only.
    #[error("the model `{model}` cannot generate text: it computes scores of texts only")]
    ScoresOnly {
        /// The model's name.
        model: String,
    },
    /// The model computes no scores, or not one score for each pair of texts.
    #[error(
        "the model `{model}` cannot score texts: expected a classifier (such as \
         BertForSequenceClassification), and for reranking one with a single label, or a language \
         model with `rerank_tokens`"
    )]
    NotForScores {
        /// The model's name.
        model: String,
    },
    /// An adapter cannot be loaded or used.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The tiers cannot be used, or a prefix cannot be exported or imported.
    #[cfg(feature = "tiers")]
    #[error(transparent)]
    Tier(#[from] stolon_tiers::TierError),
}

impl Error {
    /// When the same request may be sent to the same engine again; see
    /// [`EngineError::retry_after`].
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Error::Engine(error) => error.retry_after(),
            Error::Adapter(AdapterError::OutOfMemory { .. }) | Error::Busy(_) => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    /// Whether the same request may succeed later on the same engine.
    ///
    /// ```
    /// use stolon::{Engine, Error, Request, TokenStream};
    ///
    /// /// Submits a request; if the engine is busy or restarts, a second time.
    /// async fn submit(engine: &Engine, request: Request) -> Result<TokenStream, Error> {
    ///     match engine.generate(request.clone()).await {
    ///         Err(error) if error.is_retryable() => {
    ///             tokio::time::sleep(error.retry_after().unwrap_or_default()).await;
    ///             engine.generate(request).await
    ///         }
    ///         result => result,
    ///     }
    /// }
    /// # drop(submit);
    /// ```
    pub fn is_retryable(&self) -> bool {
        self.retry_after().is_some()
    }

    /// An [`EngineError::InvalidParameter`].
    pub(crate) fn invalid(
        name: impl Into<Cow<'static, str>>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        EngineError::invalid(name, expected, got).into()
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Error {
        Error::Load(Arc::new(error))
    }
}

impl From<ChatTemplateError> for Error {
    fn from(error: ChatTemplateError) -> Error {
        match error {
            ChatTemplateError::Busy(busy) => Error::Busy(busy),
            error => Error::ChatTemplate(error),
        }
    }
}

impl From<GrammarFailure> for Error {
    fn from(failure: GrammarFailure) -> Error {
        match failure {
            GrammarFailure::Invalid(error) => Error::Grammar(error),
            GrammarFailure::Busy(busy) => Error::Busy(busy),
        }
    }
}

impl From<SessionError> for Error {
    fn from(error: SessionError) -> Error {
        EngineError::from(error).into()
    }
}

impl From<StopStringsError> for Error {
    fn from(error: StopStringsError) -> Error {
        let (expected, got) = match error {
            StopStringsError::Empty => {
                ("strings of at least one character".to_owned(), "an empty string")
            }
            StopStringsError::TooMany => (format!("at most {MAX_STOP_STRINGS} strings"), "more"),
            _ => (format!("strings of at most {MAX_STOP_BYTES} bytes in all"), "more"),
        };
        Error::invalid("stop", expected, got)
    }
}
