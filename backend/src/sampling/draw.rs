//! Randomness by counting: the n-th draw of a seed is a function of the two, with no state that
//! could get out of step. Called by [`SamplerState`](super::SamplerState) only.

use std::hash::{BuildHasher, RandomState};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The n-th draw of `seed`, uniform over `[0, 1)` in steps of 2^-53.
pub(super) fn uniform(seed: u64, n: u64) -> f64 {
    // The pair is the cipher's key, so neighbouring seeds and neighbouring draws are unrelated.
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&n.to_le_bytes());
    let bits = ChaCha8Rng::from_seed(key).next_u64() >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

/// A seed for a sequence that asked for none: differs from call to call and from run to run.
pub(super) fn fresh_seed() -> u64 {
    // The standard library keys its hash maps from the system's entropy and changes the key with
    // every map; the hash of one word under such a key is as fresh.
    RandomState::new().hash_one(0_u64)
}
