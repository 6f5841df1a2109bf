//! Counter-based random numbers: the n-th number of a seed is a pure function of the seed and n, so
//! there is no generator state to save or restore. Only
//! [`SamplerState`](super::SamplerState) uses it.

use std::hash::{BuildHasher, RandomState};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The n-th random number of `seed`, uniform in `[0, 1)` with a resolution of 2^-53.
pub(super) fn uniform(seed: u64, n: u64) -> f64 {
    // Seed and index form the key of the cipher, so adjacent seeds and indices are uncorrelated.
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&n.to_le_bytes());
    let bits = ChaCha8Rng::from_seed(key).next_u64() >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

/// A random seed for a sequence whose request has none. It differs between calls and processes.
pub(super) fn fresh_seed() -> u64 {
    // `RandomState` takes its key from the system's entropy and uses a different key for each
    // instance. The hash of a constant under such a key is therefore random as well.
    RandomState::new().hash_one(0_u64)
}
