//! [`MinTokens`]: keeps an answer from ending too early.

use crate::{LogitsProcessor, SharedProcessor};

/// Excludes the tokens that end an answer until it has a number of tokens.
#[derive(Debug)]
pub(crate) struct MinTokens {
    /// Number of tokens before which no end is allowed.
    pub(crate) count: usize,
    /// The tokens that end the answer.
    pub(crate) ends: Vec<u32>,
    /// The request's own processor, which runs first.
    pub(crate) inner: Option<SharedProcessor>,
}

impl LogitsProcessor for MinTokens {
    fn process(&self, output: &[u32], logits: &mut [f32]) {
        if let Some(inner) = &self.inner {
            inner.process(output, logits);
        }
        if output.len() < self.count {
            for &end in &self.ends {
                if let Some(logit) = logits.get_mut(end as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: ends are excluded until the answer is long enough, and the request's own processor
    /// runs all the time.
    #[test]
    fn ends_are_excluded_at_first() {
        struct Zero;
        impl LogitsProcessor for Zero {
            fn process(&self, _output: &[u32], logits: &mut [f32]) {
                logits[0] = 0.0;
            }
        }
        let inner = Some(SharedProcessor::new(Zero));
        let processor = MinTokens { count: 2, ends: vec![1, 99], inner };
        for (output, end) in
            [(&[][..], f32::NEG_INFINITY), (&[5], f32::NEG_INFINITY), (&[5, 5], 3.0)]
        {
            let mut logits = [1.0, 3.0, 2.0];
            processor.process(output, &mut logits);
            assert_eq!(logits, [0.0, end, 2.0]);
        }
    }
}
