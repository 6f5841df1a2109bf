//! [`MinTokens`]: keeps an answer from ending too early.

use crate::{LogitsProcessor, SamplingError, SharedProcessor};

/// Excludes the tokens that end an answer until it has a number of tokens. An answer that cannot go
/// on, because its grammar is complete, may end all the same.
#[derive(Clone, Debug)]
pub(crate) struct MinTokens {
    /// Number of tokens before which no end is allowed.
    pub(crate) count: usize,
    /// The tokens that end the answer.
    pub(crate) ends: Vec<u32>,
    /// The request's own processor, which runs first.
    pub(crate) inner: Option<SharedProcessor>,
}

impl LogitsProcessor for MinTokens {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        if let Some(inner) = &self.inner {
            inner.process(output, logits)?;
        }
        if output.len() >= self.count {
            return Ok(());
        }
        let is_end = |token: usize| self.ends.iter().any(|&end| end as usize == token);
        let mut others = logits.iter().enumerate();
        if others.any(|(token, &logit)| logit != f32::NEG_INFINITY && !is_end(token)) {
            for &end in &self.ends {
                if let Some(logit) = logits.get_mut(end as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    fn prepare(&self, output: &[u32]) {
        if let Some(inner) = &self.inner {
            inner.prepare(output);
        }
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        self.inner.as_ref().is_none_or(|inner| inner.is_ready(output))
    }

    fn for_sequence(&self) -> Option<SharedProcessor> {
        let inner = self.inner.as_ref()?.for_sequence()?;
        Some(SharedProcessor::new(MinTokens { inner: Some(inner), ..self.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: ends are excluded until the answer is long enough, and the request's own processor
    /// runs all the time. If nothing but an end is left, it is allowed.
    #[test]
    fn ends_are_excluded_at_first() {
        struct Zero;
        impl LogitsProcessor for Zero {
            fn process(&self, _output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
                logits[0] = 0.0;
                Ok(())
            }
        }
        let inner = Some(SharedProcessor::new(Zero));
        let mut processor = MinTokens { count: 2, ends: vec![1, 99], inner };
        for (output, end) in
            [(&[][..], f32::NEG_INFINITY), (&[5], f32::NEG_INFINITY), (&[5, 5], 3.0)]
        {
            let mut logits = [1.0, 3.0, 2.0];
            processor.process(output, &mut logits).expect("nothing can fail");
            assert_eq!(logits, [0.0, end, 2.0]);
        }
        processor.inner = None;
        let mut logits = [f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY];
        processor.process(&[], &mut logits).expect("nothing can fail");
        assert_eq!(logits[1], 3.0);
    }
}
