//! Structured output: processors that keep an answer to its grammar.

use std::sync::Arc;

use stolon_text::{Grammar, GrammarCompiler, GrammarFailure, GrammarState, TextModel};

use crate::long_work::Client;
use crate::{LogitsProcessor, SamplingError, SharedProcessor};

/// Compiles the grammars of requests.
#[derive(Clone, Debug)]
pub(super) struct Grammars(GrammarCompiler);

impl Grammars {
    pub(super) fn new(model: &TextModel) -> Grammars {
        Grammars(GrammarCompiler::new(model.tokenizer().clone(), model.eos_token_ids()))
    }

    /// Prepares the part that all grammars share, so that no request waits for it.
    pub(super) fn prepare(&self) {
        if let Err(error) = self.0.prepare() {
            tracing::warn!(%error, "the vocabulary cannot be used for grammars now");
        }
    }

    /// A processor that keeps an answer to a client's `grammar` and runs after `inner`. The answer
    /// ends with one of `ends`.
    pub(super) fn processor(
        &self,
        grammar: &Grammar,
        ends: Arc<[u32]>,
        inner: Option<SharedProcessor>,
        client: Client,
    ) -> Result<SharedProcessor, GrammarFailure> {
        let compiled = self.0.compile_for(grammar, client.clone())?;
        let state = Arc::new(compiled.state_for(client));
        Ok(SharedProcessor::new(GrammarProcessor { state, ends, inner }))
    }
}

/// Excludes the tokens that do not continue a grammar. The allowed tokens are computed by another
/// thread, from the moment at which a token was chosen.
#[derive(Clone, Debug)]
struct GrammarProcessor {
    /// The state of the answer in the grammar.
    state: Arc<GrammarState>,
    /// The tokens that end the answer.
    ends: Arc<[u32]>,
    /// The request's own processor, which runs first.
    inner: Option<SharedProcessor>,
}

impl LogitsProcessor for GrammarProcessor {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(inner) = &self.inner {
            inner.process(output, logits)?;
        }
        let failed = |failure| match failure {
            GrammarFailure::Invalid(error) => {
                SamplingError::ProcessorFailed { reason: error.reason }
            }
            GrammarFailure::Busy(busy) => SamplingError::ProcessorBusy { reason: busy.reason },
        };
        self.state.mask(output).map_err(failed)?.apply(logits, &self.ends);
        Ok(())
    }

    fn prepare(&self, output: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare(output);
        }
        // After a token that ends the answer, nothing follows.
        if output.last().is_none_or(|last| !self.ends.contains(last)) {
            self.state.begin(output);
        }
    }

    fn forced(&self, output: &[u32]) -> Vec<u32> {
        self.state.forced(output)
    }

    fn prepare_ahead(&self, output: &[u32], proposals: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare_ahead(output, proposals);
        }
        self.state.begin_ahead(output, proposals);
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        let inner = self.inner.as_ref().is_none_or(|inner| inner.is_ready(output));
        inner && self.state.is_ready(output)
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        let inner = self.inner.as_ref();
        let inner = inner.map(|inner| inner.for_sequence().unwrap_or_else(|| inner.clone()));
        let (state, ends) = (Arc::new(self.state.restarted()), Arc::clone(&self.ends));
        Some(SharedProcessor::new(GrammarProcessor { state, ends, inner }))
    }
}
