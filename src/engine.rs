//! The handle an embedding program holds.

use crate::stats::AuditReport;
use crate::{ChatMessage, EngineBuilder, EngineStats, Error, ModelInfo, Request, TokenStream};

/// A running engine. Clones share it; the last one dropped, together with the last stream,
/// shuts it down.
#[derive(Clone, Debug)]
pub struct Engine {
    info: std::sync::Arc<ModelInfo>,
}

impl Engine {
    /// Starts configuring an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::new()
    }

    /// Lets a request in and returns its events.
    ///
    /// Tokenises, checks and counts the uncached part in the calling task, without waiting; so
    /// an engine that is full says so at once.
    ///
    /// # Errors
    /// Every way a request can be wrong, [`Error::Overloaded`] and [`Error::EngineStopped`].
    pub fn generate(&self, request: Request) -> Result<TokenStream, Error> {
        let _ = request;
        Err(Error::EngineStopped)
    }

    /// How many of the request's prompt tokens are in the cache now: lock-free, and without any
    /// effect on the cache. A hint: it may change before the request runs.
    ///
    /// # Errors
    /// Those of tokenising and rendering the prompt.
    pub fn query_match_len(&self, request: &Request) -> Result<usize, Error> {
        let _ = request;
        Ok(0)
    }

    /// The prompt's tokens, as [`Engine::generate`] would compute them.
    ///
    /// # Errors
    /// Those of tokenising and rendering the prompt.
    pub fn prompt_tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        let _ = request;
        Ok(Vec::new())
    }

    /// Counts and gauges, without waiting.
    pub fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    /// What the engine runs.
    pub fn model_info(&self) -> &ModelInfo {
        &self.info
    }

    /// Checks all bookkeeping: blocks, tree, leases.
    ///
    /// # Errors
    /// [`Error::Audit`] with what is wrong, [`Error::EngineStopped`].
    pub async fn audit(&self) -> Result<AuditReport, Error> {
        Ok(AuditReport::default())
    }

    /// Empties the prefix cache, except what running requests use.
    ///
    /// # Errors
    /// [`Error::EngineStopped`].
    pub async fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Stops the engine: running requests end with [`Error::EngineStopped`], and the model's
    /// memory is given back before this returns.
    pub async fn shutdown(&self) {}

    /// Token ids of a text, with the tokens the model wants around a text if `add_special`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::Tokenizer`].
    pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let _ = (text, add_special);
        Ok(Vec::new())
    }

    /// Text of token ids; special tokens are left out if `skip_special`.
    ///
    /// # Errors
    /// [`Error::NoTokenizer`], [`Error::Tokenizer`].
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let _ = (ids, skip_special);
        Ok(String::new())
    }

    /// The prompt text of a conversation, rendered with the model's chat template, up to where
    /// the assistant is to answer.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, Error> {
        let _ = (messages, tools);
        Ok(String::new())
    }
}
