//! Making a tree.

use crate::core::Core;
use crate::policy::{EvictionPolicy, Policy};
use crate::sync::Arc;
use crate::{ConfigError, TreeReader, TreeWriter, hash};

/// The largest block size there is.
const BLOCK_SIZE_MAX: usize = 256;

/// Makes an empty tree with blocks of `block_size` positions that evicts the least recently used.
///
/// # Errors
///
/// When `block_size` is no power of two from 1 to 256.
pub fn prefix_tree(block_size: usize) -> Result<(TreeWriter, TreeReader), ConfigError> {
    TreeBuilder::new(block_size).build()
}

/// Makes a tree with choices.
#[derive(Debug)]
pub struct TreeBuilder {
    block_size: usize,
    policy: Box<dyn EvictionPolicy>,
    hash_seed: u64,
    pin_budget: usize,
}

impl TreeBuilder {
    /// Starts with blocks of `block_size` positions (a power of two from 1 to 256), LRU, the
    /// common hash seed and no limit to pins.
    pub fn new(block_size: usize) -> TreeBuilder {
        let policy = Policy::default().build();
        let (hash_seed, pin_budget) = (hash::DEFAULT_SEED, usize::MAX);
        TreeBuilder { block_size, policy, hash_seed, pin_budget }
    }

    /// One of the policies that come with the crate.
    pub fn policy(self, policy: Policy) -> TreeBuilder {
        self.custom_policy(policy.build())
    }

    /// A policy of the caller's own.
    pub fn custom_policy(mut self, policy: Box<dyn EvictionPolicy>) -> TreeBuilder {
        self.policy = policy;
        self
    }

    /// Where block hashes start. Trees with the same seed give the same hashes; a secret one
    /// keeps others from choosing prompts that fall into one slot.
    pub fn hash_seed(mut self, seed: u64) -> TreeBuilder {
        self.hash_seed = seed;
        self
    }

    /// How many blocks pins may hold together.
    pub fn pin_budget(mut self, block_count: usize) -> TreeBuilder {
        self.pin_budget = block_count;
        self
    }

    /// Makes the tree.
    ///
    /// # Errors
    ///
    /// When the block size is no power of two from 1 to 256.
    pub fn build(self) -> Result<(TreeWriter, TreeReader), ConfigError> {
        if !self.block_size.is_power_of_two() || self.block_size > BLOCK_SIZE_MAX {
            return Err(ConfigError::BlockSize { got: self.block_size });
        }
        let core = Arc::new(Core::new(self.block_size, self.hash_seed));
        let reader = TreeReader { core: core.clone() };
        Ok((TreeWriter::new(core, self.policy, self.pin_budget), reader))
    }
}
