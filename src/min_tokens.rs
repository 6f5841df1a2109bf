//! [`MinTokens`]: keeps an answer from ending too early.

use crate::after::{TokenRule, exclude};

/// Excludes the tokens that end an answer until it has a number of tokens. An answer that cannot
/// continue, because its grammar is complete, may end all the same.
#[derive(Clone, Debug)]
pub(crate) struct MinTokens {
    /// Number of tokens before which no end is allowed.
    pub(crate) count: usize,
    /// The tokens that end the answer.
    pub(crate) ends: Vec<u32>,
}

impl TokenRule for MinTokens {
    fn apply(&self, output: &[u32], logits: &mut [f32]) {
        if output.len() >= self.count {
            return;
        }
        let is_end = |token: usize| self.ends.iter().any(|&end| end as usize == token);
        let mut others = logits.iter().enumerate();
        if others.any(|(token, &logit)| logit != f32::NEG_INFINITY && !is_end(token)) {
            exclude(&self.ends, logits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::after::After;
    use crate::{LogitsProcessor, SamplingError, SharedProcessor};

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
        let mut processor = After { inner, rule: MinTokens { count: 2, ends: vec![1, 99] } };
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
