//! The engine's errors as exceptions of `stolon.errors`.

use std::fmt::{self, Display};
use std::time::Duration;

use pyo3::prelude::*;
use stolon::{EngineError, Error};

/// An exception of `stolon.errors` by the name of its class. `retry_after` is in seconds.
pub(crate) fn raise(
    py: Python<'_>,
    class: &str,
    message: String,
    retry_after: Option<f64>,
) -> PyErr {
    let made = py
        .import("stolon.errors")
        .and_then(|errors| errors.getattr(class))
        .and_then(|class| class.call1((message, retry_after)));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// An argument has an impossible value. The message names it.
    Invalid(String),
    /// The engine's error.
    Engine(Error),
    /// The error of a prompt of several, with the index of the prompt.
    Prompt(usize, Box<Failure>),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Engine(error.into())
    }
}

impl Failure {
    /// An argument `name` that should have been something else.
    pub(crate) fn invalid(name: &str, expected: &str, got: impl Display) -> Failure {
        Failure::Invalid(format!("{name}: expected {expected}, got {got}"))
    }

    /// When to try again, if the engine's queue is full or the machine is too busy.
    pub(crate) fn busy(&self) -> Option<Duration> {
        match self {
            Failure::Engine(
                error @ (Error::Busy(_)
                | Error::Engine(
                    EngineError::Overloaded { .. }
                    | EngineError::ImagesOverloaded { .. }
                    | EngineError::ProcessorBusy { .. },
                )),
            ) => error.retry_after(),
            _ => None,
        }
    }

    fn exception(&self, py: Python<'_>) -> PyErr {
        let retry_after = match self.cause() {
            Failure::Engine(error) => error.retry_after().map(|time| time.as_secs_f64()),
            _ => None,
        };
        let class = match self.cause() {
            Failure::Engine(error) => class_of(error),
            _ => "InvalidValueError",
        };
        raise(py, class, self.to_string(), retry_after)
    }

    fn cause(&self) -> &Failure {
        match self {
            Failure::Prompt(_, cause) => cause,
            other => other,
        }
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        Python::attach(|py| failure.exception(py))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Invalid(message) => f.write_str(message),
            Failure::Engine(error) => error.fmt(f),
            Failure::Prompt(index, cause) => write!(f, "prompts[{index}]: {cause}"),
        }
    }
}

/// The name of the class of an error's exception.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Engine(error) => class_of_engine(error),
        Error::Load(_) => "ModelLoadError",
        Error::NoTokenizer
        | Error::NoInfill
        | Error::NotForEmbeddings { .. }
        | Error::NotForScores { .. }
        | Error::EmbeddingsOnly { .. } => "NotSupportedError",
        error if error.is_retryable() => "OverloadedError",
        Error::Tier(_) => "RequestFailedError",
        _ => "InvalidValueError",
    }
}

fn class_of_engine(error: &EngineError) -> &'static str {
    match error {
        EngineError::QueueTimeout { .. } | EngineError::Timeout { .. } => "DeadlineError",
        EngineError::StartFailed { .. } => "ModelLoadError",
        EngineError::Draining | EngineError::Stopped | EngineError::GaveUp { .. } => {
            "EngineStoppedError"
        }
        EngineError::StepFailed { .. }
        | EngineError::InvalidEmbedding { .. }
        | EngineError::InvalidLogits { .. }
        | EngineError::LogitsProcessor { .. }
        | EngineError::Interrupted { .. }
        | EngineError::BackendHung { .. }
        | EngineError::Audit(_) => "RequestFailedError",
        error if error.is_retryable() => "OverloadedError",
        _ => "InvalidValueError",
    }
}
