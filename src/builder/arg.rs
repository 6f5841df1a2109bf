//! [`ModelArg`]: where a model comes from, as callers write it.

use std::path::{Path, PathBuf};

use crate::{Error, ModelSource};

/// The argument of [`EngineBuilder::model`](crate::EngineBuilder::model): a string that is parsed
/// when the engine is built, or a parsed source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelArg {
    /// The path of a model directory or `.gguf` file, a hub id, `random:PRESET` or `demo`.
    Text(String),
    /// A parsed source.
    Source(ModelSource),
}

impl ModelArg {
    /// The parsed source.
    pub(crate) fn source(self) -> Result<ModelSource, Error> {
        match self {
            ModelArg::Source(source) => Ok(source),
            ModelArg::Text(text) => Ok(text.parse()?),
        }
    }
}

impl From<&str> for ModelArg {
    fn from(text: &str) -> ModelArg {
        ModelArg::Text(text.to_owned())
    }
}

impl From<&String> for ModelArg {
    fn from(text: &String) -> ModelArg {
        ModelArg::Text(text.clone())
    }
}

impl From<&Path> for ModelArg {
    /// See [`ModelSource::from`].
    fn from(path: &Path) -> ModelArg {
        ModelArg::Source(path.into())
    }
}

impl From<PathBuf> for ModelArg {
    /// See [`ModelSource::from`].
    fn from(path: PathBuf) -> ModelArg {
        ModelArg::Source(path.into())
    }
}

impl From<String> for ModelArg {
    fn from(text: String) -> ModelArg {
        ModelArg::Text(text)
    }
}

impl From<ModelSource> for ModelArg {
    fn from(source: ModelSource) -> ModelArg {
        ModelArg::Source(source)
    }
}
