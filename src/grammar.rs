//! [`GrammarProcessor`]: keeps an answer to its grammar.

use std::sync::Arc;

use stolon_text::{GrammarError, GrammarState};

use crate::{LogitsProcessor, SamplingError, SharedProcessor};

/// Excludes the tokens that do not continue a grammar. The allowed tokens are computed by another
/// thread, from the moment at which a token was chosen.
#[derive(Clone, Debug)]
pub(crate) struct GrammarProcessor {
    /// The sequence as the grammar sees it.
    state: Arc<GrammarState>,
    /// The tokens that end the answer.
    ends: Arc<[u32]>,
    /// The request's own processor, which runs first.
    inner: Option<SharedProcessor>,
}

impl GrammarProcessor {
    pub(crate) fn new(
        state: GrammarState,
        ends: Arc<[u32]>,
        inner: Option<SharedProcessor>,
    ) -> GrammarProcessor {
        GrammarProcessor { state: Arc::new(state), ends, inner }
    }
}

impl LogitsProcessor for GrammarProcessor {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(inner) = &self.inner {
            inner.process(output, logits)?;
        }
        let failed = |error: GrammarError| SamplingError::ProcessorFailed { reason: error.reason };
        self.state.mask(output).map_err(failed)?.apply(logits, &self.ends);
        Ok(())
    }

    fn prepare(&self, output: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare(output);
        }
        // After an end nothing follows.
        if output.last().is_none_or(|last| !self.ends.contains(last)) {
            self.state.begin(output);
        }
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        let inner = self.inner.as_ref().is_none_or(|inner| inner.is_ready(output));
        inner && self.state.is_ready(output)
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        let inner = self.inner.as_ref();
        let inner = inner.map(|inner| inner.for_sequence().unwrap_or_else(|| inner.clone()));
        let ends = Arc::clone(&self.ends);
        Some(SharedProcessor::new(GrammarProcessor::new(self.state.restarted(), ends, inner)))
    }
}
