//! [`TokenMask`]: the tokens that may come next.

use llguidance::toktrie::SimpleVob;

/// The tokens that may come next in a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    /// One bit per token of the vocabulary.
    allowed: SimpleVob,
    may_end: bool,
}

impl TokenMask {
    pub(super) fn new(allowed: SimpleVob, may_end: bool) -> Self {
        Self { allowed, may_end }
    }

    /// Whether the answer is complete, so that it may end here.
    #[must_use]
    pub fn may_end(&self) -> bool {
        self.may_end
    }

    /// Whether no more than `most` tokens may come next.
    pub(super) fn allows_at_most(&self, most: usize) -> bool {
        let mut left = most as u32;
        self.allowed.as_slice().iter().all(|word| {
            let count = word.count_ones();
            let fits = count <= left;
            left = left.saturating_sub(count);
            fits
        })
    }

    /// Whether a token may come next.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        (token as usize) < self.allowed.len() && self.allowed.is_allowed(token)
    }

    /// Sets the logits of all other tokens to minus infinity. `logits` is `[vocab_size]`; the
    /// vocabulary of the model may be larger than the one of its tokenizer. If the answer may end,
    /// the tokens `ends` are left as they are too.
    pub fn apply(&self, logits: &mut [f32], ends: &[u32]) {
        let ends = if self.may_end { ends } else { &[] };
        let kept: Vec<_> =
            ends.iter().filter_map(|&end| Some((end, *logits.get(end as usize)?))).collect();
        let words = self.allowed.as_slice();
        let (inside, outside) = logits.split_at_mut(logits.len().min(words.len() * 32));
        for (logits, &word) in inside.chunks_mut(32).zip(words) {
            match word {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
        outside.fill(f32::NEG_INFINITY);
        for (end, logit) in kept {
            logits[end as usize] = logit;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: `apply` excludes exactly the tokens that are not allowed, over whole words and parts
    /// of them, and beyond the vocabulary; ends are allowed only if the answer may end.
    #[test]
    fn exactly_the_other_tokens_are_excluded() {
        for may_end in [false, true] {
            let allowed = |token: u32| (32..64).contains(&token) || token % 7 == 3;
            let mut bits = SimpleVob::alloc(100);
            (0..100).filter(|&token| allowed(token)).for_each(|token| bits.allow_token(token));
            let mask = TokenMask::new(bits, may_end);
            let ends = [5, 120, 1000];
            let mut logits: Vec<f32> = (0..130).map(|token| token as f32).collect();
            mask.apply(&mut logits, &ends);
            for (token, &logit) in (0..).zip(&logits) {
                let in_mask = token < 100 && allowed(token);
                assert_eq!(mask.allows(token), in_mask);
                let kept = in_mask || may_end && ends.contains(&token);
                let expected = if kept { token as f32 } else { f32::NEG_INFINITY };
                assert_eq!(logit, expected, "token {token}");
            }
        }
    }
}
