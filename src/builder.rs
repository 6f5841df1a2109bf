//! Configures and starts an engine.

use crate::{AdmissionPolicy, Engine, Error, ModelSource};

/// A model as a caller names it: text to be parsed when the engine is built, or a source.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelArg {
    /// A model directory, a `.gguf` file, a hub id or `random:PRESET`.
    Text(String),
    /// A source that needs no parsing.
    Source(ModelSource),
}

impl From<&str> for ModelArg {
    fn from(text: &str) -> ModelArg {
        ModelArg::Text(text.to_owned())
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

/// Settings of an engine to be started; see each setter for its default.
#[derive(Debug)]
pub struct EngineBuilder {
    model: Option<ModelArg>,
}

impl EngineBuilder {
    pub(crate) fn new() -> EngineBuilder {
        EngineBuilder { model: None }
    }

    /// The model: a [`ModelSource`], or text: a model directory, a `.gguf` file, a hub id
    /// (`org/name`, `org/name@revision`), or `random:PRESET`.
    pub fn model(mut self, model: impl Into<ModelArg>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Bytes for the KV cache. Default: a quarter of the memory that is free after the model is
    /// loaded, at most what 64 requests of the model's full context need.
    pub fn kv_memory(self, bytes: u64) -> Self {
        let _ = bytes;
        self
    }

    /// KV blocks, instead of bytes.
    pub fn num_blocks(self, count: usize) -> Self {
        let _ = count;
        self
    }

    /// Positions a KV block holds: a power of two from 1 to 256. Default 16.
    pub fn block_size(self, positions: usize) -> Self {
        let _ = positions;
        self
    }

    /// Most tokens one forward pass computes, prompt chunks and decodes together. Default 512.
    pub fn max_batched_tokens(self, tokens: usize) -> Self {
        let _ = tokens;
        self
    }

    /// Most requests that run at the same time. Default 32.
    pub fn max_running(self, requests: usize) -> Self {
        let _ = requests;
        self
    }

    /// Most requests that wait; more are refused with [`Error::Overloaded`]. Default 1,024.
    pub fn max_queued_requests(self, requests: usize) -> Self {
        let _ = requests;
        self
    }

    /// Most uncached prompt tokens that wait; more are refused with [`Error::Overloaded`],
    /// unless nothing waits. Default 1,048,576.
    pub fn max_queued_tokens(self, tokens: usize) -> Self {
        let _ = tokens;
        self
    }

    /// Keeps computed prompts and answers for requests that start the same way. Default on.
    pub fn prefix_caching(self, on: bool) -> Self {
        let _ = on;
        self
    }

    /// Which waiting request runs next. Default [`AdmissionPolicy::Cost`].
    pub fn admission(self, policy: AdmissionPolicy) -> Self {
        let _ = policy;
        self
    }

    /// Charges a request's whole prompt and its whole `max_tokens` before it runs, as if
    /// nothing were cached: a baseline to compare with. Default off.
    pub fn conservative_admission(self, on: bool) -> Self {
        let _ = on;
        self
    }

    /// Threads that compute. Default: the machine's physical cores.
    pub fn threads(self, count: usize) -> Self {
        let _ = count;
        self
    }

    /// Loads the model and starts the engine on the current tokio runtime. The log (`tracing`,
    /// level info) says how many KV blocks it took and why.
    ///
    /// # Errors
    /// [`Error::Load`], [`Error::InvalidParameter`], [`Error::OutOfMemory`].
    pub async fn build(self) -> Result<Engine, Error> {
        Err(Error::EngineStopped)
    }
}
