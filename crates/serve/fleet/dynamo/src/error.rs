//! Errors of the engine as Dynamo's. Dynamo sends a request to another worker if the error says
//! that this worker cannot be reached, has stopped, or has broken off the answer.

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use stolon::{EngineError, Error};

/// An error with this category and message.
pub(crate) fn error(category: BackendError, message: impl ToString) -> DynamoError {
    let builder = DynamoError::builder().error_type(ErrorType::Backend(category));
    builder.message(message.to_string()).build()
}

/// The request has an option with a value that is not supported.
pub(crate) fn unsupported(name: &str, expected: &str, got: impl ToString) -> DynamoError {
    let message = format!("`{name}`: expected {expected}, got {}", got.to_string());
    error(BackendError::InvalidArgument, message)
}

/// The engine's error.
pub(crate) fn of_engine(cause: &Error) -> DynamoError {
    error(category(cause), cause)
}

fn category(cause: &Error) -> BackendError {
    let Error::Engine(cause) = cause else { return BackendError::InvalidArgument };
    match cause {
        EngineError::EmptyPrompt
        | EngineError::PromptTooLong { .. }
        | EngineError::TokenOutOfRange { .. }
        | EngineError::InvalidParameter { .. } => BackendError::InvalidArgument,
        // Another worker may have room.
        EngineError::Overloaded { .. } | EngineError::QuotaExceeded { .. } => {
            BackendError::CannotConnect
        }
        EngineError::QueueTimeout { .. }
        | EngineError::Timeout { .. }
        | EngineError::BackendHung { .. } => BackendError::ResponseTimeout,
        EngineError::Interrupted { .. } => BackendError::StreamIncomplete,
        EngineError::Draining | EngineError::Stopped | EngineError::GaveUp { .. } => {
            BackendError::EngineShutdown
        }
        _ => BackendError::Unknown,
    }
}
