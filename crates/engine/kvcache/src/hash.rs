//! Hashes of blocks. A block's hash covers its own positions, everything before them, and the
//! namespace: `hash[i] = chain(hash[i - 1], digest(block i))`.
//!
//! The hashes are the keys of the child tables, and queries by hash compare them. They do not
//! identify a block: a query by positions always compares the positions themselves.

use crate::Namespace;

const LANE_KEYS: [u64; 4] =
    [0x9e6c_63d0_876a_9a47, 0xe703_7ed1_a0b4_28db, 0x8ebc_6af0_9c88_c6e3, 0x5899_65cc_7537_4cc3];

/// The default hash seed. It is a constant so that different processes compute the same hashes.
pub(crate) const DEFAULT_SEED: u64 = 0x51a7_0b1e_57ee_d000;

/// The mixing step: the exclusive or of both halves of the 128-bit product.
#[inline(always)]
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Mixes the hash of the previous block with a block's digest. Never 0, because child tables use
/// the key 0 for empty slots.
#[inline(always)]
pub(crate) fn chain(parent: u64, digest: u64) -> u64 {
    fold(parent ^ LANE_KEYS[0], digest ^ LANE_KEYS[1]).max(1)
}

/// A digest of `positions`, of any length. The products of different groups of four positions do
/// not depend on each other, so the CPU computes several at a time.
#[inline(always)]
pub(crate) fn digest(positions: &[u32]) -> u64 {
    let mut sum = LANE_KEYS[2] ^ positions.len() as u64;
    let (fours, rest) = positions.as_chunks::<4>();
    for (index, four) in fours.iter().enumerate() {
        let low = u64::from(four[0]) | u64::from(four[1]) << 32;
        let high = u64::from(four[2]) | u64::from(four[3]) << 32;
        let index_key = (index as u64).wrapping_mul(LANE_KEYS[3]);
        sum = sum.wrapping_add(fold(low ^ LANE_KEYS[0] ^ index_key, high ^ LANE_KEYS[1]));
    }
    for &position in rest {
        sum = fold(sum ^ LANE_KEYS[0], u64::from(position) ^ LANE_KEYS[3]);
    }
    sum
}

/// Computes the hashes of blocks without a tree, in a router for example. Created by
/// [`TreeBuilder::block_hasher`](crate::TreeBuilder::block_hasher) from the settings of the tree,
/// or by [`TreeReader::block_hasher`](crate::TreeReader::block_hasher).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHasher {
    pub(crate) block_size: usize,
    pub(crate) seed: u64,
}

impl BlockHasher {
    /// Returns the same as [`TreeReader::block_hashes`](crate::TreeReader::block_hashes): one
    /// chained hash for each whole block of `positions`.
    pub fn block_hashes(&self, namespace: &Namespace, positions: &[u32]) -> Vec<u64> {
        self.block_hashes_after(namespace, None, positions)
    }

    /// As [`block_hashes`](BlockHasher::block_hashes), for positions that follow the block with the
    /// hash `parent`; `None` at the start of a sequence.
    pub fn block_hashes_after(
        &self,
        namespace: &Namespace,
        parent: Option<u64>,
        positions: &[u32],
    ) -> Vec<u64> {
        let parent = parent.unwrap_or_else(|| namespace.root_hash(self.seed));
        block_hashes(parent, positions, self.block_size)
    }
}

/// The chained hashes of the whole blocks of `positions`, where `root` is the hash before the first
/// block.
pub(crate) fn block_hashes(root: u64, positions: &[u32], block_size: usize) -> Vec<u64> {
    let mut parent = root;
    let mut hashes = Vec::with_capacity(positions.len() / block_size);
    for block in positions.chunks_exact(block_size) {
        parent = chain(parent, digest(block));
        hashes.push(parent);
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Goal: blocks that differ in one bit, in order, or in length have different digests.
    #[test]
    fn similar_blocks_have_different_digests() {
        let mut seen = HashSet::new();
        for size in [1usize, 2, 3, 4, 8, 16, 32] {
            let base: Vec<u32> = (0..size as u32).collect();
            assert!(seen.insert(digest(&base)));
            for at in 0..size {
                for bit in 0..32 {
                    let mut other = base.clone();
                    other[at] ^= 1 << bit;
                    seen.insert(digest(&other));
                }
            }
        }
        let mut swapped: Vec<u32> = (0..16).collect();
        swapped.swap(0, 4);
        assert_ne!(digest(&swapped), digest(&(0..16).collect::<Vec<_>>()));
        swapped.swap(0, 4);
        swapped.rotate_left(4);
        assert_ne!(digest(&swapped), digest(&(0..16).collect::<Vec<_>>()));
        assert_eq!(seen.len(), 7 + (1 + 2 + 3 + 4 + 8 + 16 + 32) * 32);
    }

    /// Goal: the hash of a block depends on everything before the block, and is never the key of
    /// empty slots.
    #[test]
    fn block_hashes_depend_on_the_prefix() {
        let a = block_hashes(1, &[1, 2, 3, 4], 2);
        let b = block_hashes(1, &[9, 2, 3, 4], 2);
        let c = block_hashes(2, &[1, 2, 3, 4], 2);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[0], c[0]);
        assert!(a.iter().chain(&b).chain(&c).all(|&hash| hash != 0));
    }
}
