//! What the fake stores a position, and how logits follow from a prefix of it.

/// The fake's key and value of one position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    token: u32,
    position: u32,
    /// Hash of the token, the position and the hash of the position before.
    hash: u64,
}

impl Mark {
    /// The mark of `token` at `position`, right after `before` (the default one at position 0).
    pub(super) fn after(before: Mark, token: u32, position: usize) -> Self {
        let own = (u64::from(token) << 32) | position as u64;
        Self { token, position: position as u32, hash: mix(mix(own) ^ before.hash) }
    }

    /// Whether this is the mark of some token at `position` right after `before`.
    pub(super) fn continues(self, before: Mark, position: usize) -> bool {
        self == Self::after(before, self.token, position)
    }
}

/// A digest of all marks of a prefix: what attention is to a real model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixDigest {
    last: Mark,
    fold: u64,
}

impl PrefixDigest {
    /// Takes in the next position's mark.
    pub(super) fn push(&mut self, mark: Mark) {
        self.fold = mix(self.fold ^ mark.hash);
        self.last = mark;
    }

    /// The last mark taken in; the default one at the start.
    pub(super) fn last(&self) -> Mark {
        self.last
    }

    /// The token with the largest logit.
    fn next(&self, vocab_size: usize) -> u32 {
        (mix(self.fold) % vocab_size as u64) as u32
    }

    /// Appends the logits after this prefix, `[vocab_size]`: one token leads by 4 or more, all
    /// others lie in -4 to 4.
    pub(super) fn append_logits(&self, vocab_size: usize, logits: &mut Vec<f32>) {
        let first = logits.len();
        logits.extend((0..vocab_size as u64).map(|token| {
            // 24 bits are exact in f32.
            let bits = mix(self.fold ^ mix(token)) >> 40;
            bits as f32 / (1u64 << 21) as f32 - 4.0
        }));
        logits[first + self.next(vocab_size) as usize] = 8.0;
    }
}

/// The greedy token after `tokens`, by the plain definition: no blocks, no batch.
#[must_use]
pub fn expected_next(tokens: &[u32], vocab_size: usize) -> u32 {
    digest(tokens).next(vocab_size)
}

/// The logits after `tokens`, `[vocab_size]`, by the plain definition.
#[must_use]
pub fn expected_logits(tokens: &[u32], vocab_size: usize) -> Vec<f32> {
    let mut logits = Vec::with_capacity(vocab_size);
    digest(tokens).append_logits(vocab_size, &mut logits);
    logits
}

fn digest(tokens: &[u32]) -> PrefixDigest {
    let mut digest = PrefixDigest::default();
    for (position, &token) in tokens.iter().enumerate() {
        digest.push(Mark::after(digest.last(), token, position));
    }
    digest
}

/// A bijective mixer of 64 bits (the finaliser of SplitMix64, after one step of its counter).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
