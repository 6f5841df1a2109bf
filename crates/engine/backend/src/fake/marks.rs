//! The mark that the fake backend stores per position, and the logits that follow from the marks
//! of a prefix.

use super::adapters;
use crate::Adapter;

/// The value that the fake backend stores for one position in place of a key and a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    token: u32,
    position: u32,
    /// Hash of the token, the position and the hash of the previous position.
    hash: u64,
}

impl Mark {
    /// The mark of `token` at `position`. `before` is the previous position's mark, or the default
    /// mark at position 0.
    pub(super) fn after(before: Mark, token: u32, position: usize) -> Self {
        let own = (u64::from(token) << 32) | position as u64;
        Self { token, position: position as u32, hash: mix(mix(own) ^ before.hash) }
    }

    /// Whether this is the mark of some token at `position` whose previous mark is `before`.
    pub(super) fn continues(self, before: Mark, position: usize) -> bool {
        self == Self::after(before, self.token, position)
    }
}

/// Size in bytes of a copied slot: whether it was written, token, position and hash.
pub(super) const SLOT_BYTES: usize = 24;

/// A slot of the KV store as bytes.
pub(super) fn slot_to_bytes(slot: Option<Mark>) -> [u8; SLOT_BYTES] {
    let mark = slot.unwrap_or_default();
    let mut bytes = [0; SLOT_BYTES];
    bytes[0] = u8::from(slot.is_some());
    bytes[8..12].copy_from_slice(&mark.token.to_le_bytes());
    bytes[12..16].copy_from_slice(&mark.position.to_le_bytes());
    bytes[16..].copy_from_slice(&mark.hash.to_le_bytes());
    bytes
}

/// The reverse of [`slot_to_bytes`].
pub(super) fn slot_from_bytes(bytes: &[u8; SLOT_BYTES]) -> Option<Mark> {
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|index| bytes[at + index]));
    let hash = u64::from(word(20)) << 32 | u64::from(word(16));
    (bytes[0] == 1).then(|| Mark { token: word(8), position: word(12), hash })
}

/// A digest of all marks of a prefix. Every mark influences the logits through it, as every
/// position of a prefix does through attention in a real model.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixDigest {
    last: Mark,
    fold: u64,
}

impl PrefixDigest {
    /// The digest of no positions, in a sequence whose marks start from `seed`: 0 without an
    /// adapter.
    pub(super) fn of(seed: u64) -> Self {
        Self { last: Mark { hash: seed, ..Mark::default() }, fold: seed }
    }

    /// Adds the next position's mark.
    pub(super) fn push(&mut self, mark: Mark) {
        self.fold = mix(self.fold ^ mark.hash);
        self.last = mark;
    }

    /// The mark added last, or the default mark if there is none yet.
    pub(super) fn last(&self) -> Mark {
        self.last
    }

    /// The token with the largest logit.
    fn next(&self, vocab_size: usize) -> u32 {
        (mix(self.fold) % vocab_size as u64) as u32
    }

    /// Appends the logits `[vocab_size]` after this prefix. One token has the logit 8, all others
    /// are in `-4.0..4.0`.
    pub(super) fn append_logits(&self, vocab_size: usize, logits: &mut Vec<f32>) {
        let first = logits.len();
        logits.extend((0..vocab_size as u64).map(|token| {
            // 24 bits are exact in f32.
            let bits = mix(self.fold ^ mix(token)) >> 40;
            bits as f32 / (1u64 << 21) as f32 - 4.0
        }));
        logits[first + self.next(vocab_size) as usize] = 8.0;
    }

    /// Appends the hidden state `[hidden_size]` of the last position, in `-1.0..1.0`.
    pub(super) fn append_hidden(&self, hidden_size: usize, hidden: &mut Vec<f32>) {
        hidden.extend((0..hidden_size as u64).map(|index| {
            let bits = mix(self.fold.rotate_left(17) ^ mix(index)) >> 40;
            bits as f32 / (1u64 << 23) as f32 - 1.0
        }));
    }
}

/// The hidden state `[hidden_size]` that a [`FakeBackend`](super::FakeBackend) must return for the
/// last one of `tokens`. Computed directly from the tokens, without blocks and batches.
#[must_use]
pub fn expected_hidden(tokens: &[u32], hidden_size: usize) -> Vec<f32> {
    let mut hidden = Vec::with_capacity(hidden_size);
    digest(0, tokens).append_hidden(hidden_size, &mut hidden);
    hidden
}

/// The token that greedy sampling must return after `tokens`, which is below `vocab_size`.
/// Computed directly from the tokens, without blocks and batches.
#[must_use]
pub fn expected_next(tokens: &[u32], vocab_size: usize) -> u32 {
    digest(0, tokens).next(vocab_size)
}

/// [`expected_next`] of a sequence with `adapter`.
///
/// # Panics
/// If the adapter is not one of the fake backend.
#[must_use]
pub fn expected_next_with(adapter: Option<&Adapter>, tokens: &[u32], vocab_size: usize) -> u32 {
    let seed = adapters::seed(adapter).expect("an adapter of the fake backend");
    digest(seed, tokens).next(vocab_size)
}

/// The logits `[vocab_size]` that a [`FakeBackend`](super::FakeBackend) must return after
/// `tokens`. Computed directly from the tokens, without blocks and batches.
#[must_use]
pub fn expected_logits(tokens: &[u32], vocab_size: usize) -> Vec<f32> {
    let mut logits = Vec::with_capacity(vocab_size);
    digest(0, tokens).append_logits(vocab_size, &mut logits);
    logits
}

fn digest(seed: u64, tokens: &[u32]) -> PrefixDigest {
    let mut digest = PrefixDigest::of(seed);
    for (position, &token) in tokens.iter().enumerate() {
        digest.push(Mark::after(digest.last(), token, position));
    }
    digest
}

/// One step of SplitMix64: a bijection of 64-bit values whose output bits depend on all input bits.
pub(super) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
