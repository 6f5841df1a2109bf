//! [`Suppressed`]: keeps a model from generating the tokens that its files exclude.

use std::sync::Arc;

use stolon_checkpoint::SuppressedTokens;

use crate::after::{TokenRule, exclude};

/// Excludes the tokens that the model's files say it must not generate. If nothing else is left,
/// because a grammar allows no other token, they are allowed all the same.
#[derive(Clone, Debug)]
pub(crate) struct Suppressed {
    pub(crate) tokens: Arc<SuppressedTokens>,
    /// The prompt.
    pub(crate) prompt: Arc<Vec<u32>>,
}

impl Suppressed {
    /// Calls `found` with each token that must not follow `output`.
    fn each(&self, output: &[u32], mut found: impl FnMut(u32)) {
        let tokens = &*self.tokens;
        tokens.always.iter().copied().for_each(&mut found);
        if output.is_empty() {
            tokens.at_begin.iter().copied().for_each(&mut found);
        }
        for sequence in &tokens.sequences {
            if let Some((last, before)) = sequence.split_last()
                && self.ends_with(output, before)
            {
                found(*last);
            }
        }
        if tokens.no_repeat_ngram > 0 {
            self.each_repeated(output, tokens.no_repeat_ngram, found);
        }
    }

    /// Calls `found` with each token after which the last `size` tokens occur for a second time.
    fn each_repeated(&self, output: &[u32], size: usize, mut found: impl FnMut(u32)) {
        let text = [self.prompt.as_slice(), output].concat();
        let Some(start) = (text.len() + 1).checked_sub(size) else { return };
        let last = &text[start..];
        for window in text.windows(size) {
            if let Some((next, before)) = window.split_last()
                && before == last
            {
                found(*next);
            }
        }
    }

    /// Whether the prompt followed by `output` ends with `tokens`.
    fn ends_with(&self, output: &[u32], tokens: &[u32]) -> bool {
        let mut text = output.iter().rev().chain(self.prompt.iter().rev());
        tokens.iter().rev().all(|token| text.next() == Some(token))
    }
}

impl TokenRule for Suppressed {
    fn apply(&self, output: &[u32], logits: &mut [f32]) {
        let mut before = Vec::new();
        self.each(output, |token| {
            let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
            if logit != f32::NEG_INFINITY {
                before.push((token, logit));
                exclude(&[token], logits);
            }
        });
        if logits.iter().all(|logit| *logit == f32::NEG_INFINITY) {
            before.into_iter().for_each(|(token, logit)| logits[token as usize] = logit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens that may follow `output` after the prompt `1, 2, 3, 1, 2` in a vocabulary of 8.
    fn allowed(tokens: SuppressedTokens, output: &[u32]) -> Vec<usize> {
        let rule = Suppressed { tokens: Arc::new(tokens), prompt: Arc::new(vec![1, 2, 3, 1, 2]) };
        let mut logits = [1.0; 8];
        rule.apply(output, &mut logits);
        (0..8).filter(|&token| logits[token] == 1.0).collect()
    }

    /// Goal: single tokens, tokens at the begin of an answer, the ends of sequences that begin in
    /// the prompt, and repeated sequences are excluded, and nothing else.
    #[test]
    fn tokens_are_excluded() {
        let with = |change: fn(&mut SuppressedTokens)| {
            let mut tokens = SuppressedTokens::default();
            change(&mut tokens);
            tokens
        };
        let all: Vec<usize> = (0..8).collect();
        let without = |token: usize| (0..8).filter(|&other| other != token).collect::<Vec<_>>();
        assert_eq!(allowed(with(|t| t.always = vec![5, 99]), &[5]), without(5));
        assert_eq!(allowed(with(|t| t.at_begin = vec![5]), &[]), without(5));
        assert_eq!(allowed(with(|t| t.at_begin = vec![5]), &[0]), all);
        let sequence = with(|t| t.sequences = vec![vec![1, 2, 4, 6], vec![3; 20]]);
        assert_eq!(allowed(sequence.clone(), &[4]), without(6));
        assert_eq!(allowed(sequence, &[0, 4]), all);
        // `1, 2, 3` and `3, 1, 2` are in the prompt.
        let trigram = with(|t| t.no_repeat_ngram = 3);
        assert_eq!(allowed(trigram.clone(), &[]), without(3));
        assert_eq!(allowed(trigram.clone(), &[4, 3, 1]), without(2));
        assert_eq!(allowed(trigram, &[4]), all);
        let unigram = allowed(with(|t| t.no_repeat_ngram = 1), &[7]);
        assert_eq!(unigram, [0, 4, 5, 6]);
        assert_eq!(allowed(with(|t| t.no_repeat_ngram = 50), &[]), all);
    }

    /// Goal: if a grammar allows only an excluded token, the answer continues with it.
    #[test]
    fn the_last_token_that_is_left_is_allowed() {
        let tokens = SuppressedTokens { always: vec![0, 1], ..SuppressedTokens::default() };
        let rule = Suppressed { tokens: Arc::new(tokens), prompt: Arc::default() };
        let mut logits = [f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY];
        rule.apply(&[], &mut logits);
        assert_eq!(logits[1], 2.0);
    }
}
