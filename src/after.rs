//! [`After`]: a rule about tokens that applies after a request's own processor.

use stolon_backend::RegionLogits;

use crate::{LogitsProcessor, SamplingError, SharedProcessor};

/// A rule that changes the logits of the next token.
pub(crate) trait TokenRule: Clone + Send + Sync + 'static {
    /// Changes the logits, one for each token, after the tokens of `output`.
    fn apply(&self, output: &[u32], logits: &mut [f32]);
}

/// A rule that applies after another processor.
#[derive(Clone, Debug)]
pub(crate) struct After<R> {
    /// The request's own processor, which runs first.
    pub(crate) inner: Option<SharedProcessor>,
    pub(crate) rule: R,
}

impl<R: TokenRule> LogitsProcessor for After<R> {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(inner) = &self.inner {
            inner.process(output, logits)?;
        }
        self.rule.apply(output, logits);
        Ok(())
    }

    fn replace(&self, output: &[u32], token: u32, regions: &RegionLogits<'_>) -> u32 {
        match &self.inner {
            Some(inner) => inner.replace(output, token, regions),
            None => token,
        }
    }

    fn prepare(&self, output: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare(output);
        }
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        self.inner.as_ref().is_none_or(|inner| inner.is_ready(output))
    }

    fn forced(&self, output: &[u32]) -> Vec<u32> {
        self.inner.as_ref().map_or_else(Vec::new, |inner| inner.forced(output))
    }

    fn prepare_ahead(&self, output: &[u32], proposals: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare_ahead(output, proposals);
        }
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        let inner = self.inner.as_ref()?.for_sequence()?;
        Some(SharedProcessor::new(After { inner: Some(inner), rule: self.rule.clone() }))
    }
}

/// Excludes tokens. Those that are not in the vocabulary are ignored.
pub(crate) fn exclude(tokens: &[u32], logits: &mut [f32]) {
    for &token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
