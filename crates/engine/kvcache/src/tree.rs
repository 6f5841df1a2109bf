//! Construction of a tree.

use crate::checkpoint::CheckpointSpan;
use crate::core::Core;
use crate::eviction::{EvictionOrder, EvictionPolicy};
use crate::pin::Pins;
use crate::pool::check_block_count;
use crate::sync::Arc;
use crate::writer::Quotas;
use crate::{BlockHasher, BlockPool, ConfigError, PrefixCache, TreeReader, TreeWriter, hash};

/// The largest supported block size, in positions.
const BLOCK_SIZE_MAX: usize = 256;

/// The largest supported number of blocks of a checkpoint.
const CHECKPOINT_BLOCKS_MAX: usize = 1 << 20;

/// Creates an empty tree with blocks of `block_size` positions that evicts the least recently used
/// leaf first. [`TreeBuilder`] offers more settings.
///
/// # Errors
///
/// [`ConfigError::BlockSize`] if `block_size` is not a power of two from 1 to 256.
pub fn prefix_tree(block_size: usize) -> Result<(TreeWriter, TreeReader), ConfigError> {
    TreeBuilder::new(block_size).build()
}

/// The settings of a tree.
#[derive(Debug)]
pub struct TreeBuilder {
    block_size: usize,
    order: Box<dyn EvictionOrder>,
    hash_seed: u64,
    pin_budget: usize,
    demotable_pins: bool,
    block_count: Option<usize>,
    checkpoint_blocks: usize,
    namespace_quota: Option<usize>,
}

impl TreeBuilder {
    /// Starts with blocks of `block_size` positions (a power of two from 1 to 256), the policy
    /// [`EvictionPolicy::Lru`], the default hash seed, no limit on pinned blocks and no quota.
    pub fn new(block_size: usize) -> TreeBuilder {
        TreeBuilder {
            block_size,
            order: EvictionPolicy::default().order(),
            hash_seed: hash::DEFAULT_SEED,
            pin_budget: usize::MAX,
            demotable_pins: false,
            block_count: None,
            checkpoint_blocks: 0,
            namespace_quota: None,
        }
    }

    /// Uses one of the eviction policies that come with this crate.
    pub fn eviction_policy(self, policy: EvictionPolicy) -> TreeBuilder {
        self.eviction_order(policy.order())
    }

    /// Uses a custom eviction order.
    pub fn eviction_order(mut self, order: Box<dyn EvictionOrder>) -> TreeBuilder {
        self.order = order;
        self
    }

    /// Sets the seed of the block hashes. Trees with the same seed compute the same hashes for the
    /// same prompt, also in different processes, which a router relies on. The default seed is
    /// public; with a secret one, clients cannot construct prompts whose hashes collide.
    pub fn hash_seed(mut self, seed: u64) -> TreeBuilder {
        self.hash_seed = seed;
        self
    }

    /// Sets the maximum number of blocks that all pins together may hold. A block that several
    /// pins share counts once for each of them.
    pub fn pin_budget(mut self, block_count: usize) -> TreeBuilder {
        self.pin_budget = block_count;
        self
    }

    /// Sets whether pins can be demoted. By default they cannot: a pin locks its prefix. A demotable
    /// pin lets the blocks of its prefix be evicted when nothing else can, least recently used
    /// first or as the eviction policy says. It remains a pin, and protects the prefix again as
    /// soon as it is committed again. For engines that store pinned prefixes in a second tier of
    /// memory: pins then never keep a long prompt from running.
    pub fn demotable_pins(mut self, demotable: bool) -> TreeBuilder {
        self.demotable_pins = demotable;
        self
    }

    /// Sets the number of blocks of the KV memory. Commits then refuse block ids that are not below
    /// it, and blocks that the tree already has in another place. Without it, the caller alone is
    /// responsible for the ids, and only [`TreeWriter::audit`] finds a block in two places. Costs
    /// one bit for each block. At most 2^28 blocks are supported.
    pub fn block_count(mut self, block_count: usize) -> TreeBuilder {
        self.block_count = Some(block_count);
        self
    }

    /// Sets the number of blocks that a checkpoint takes: a copy of the recurrent state of a
    /// sequence, for models that have one. See
    /// [`TreeWriter::commit_checkpoint`](crate::TreeWriter::commit_checkpoint). With 0, the
    /// default, the tree has no checkpoints.
    pub fn checkpoint_blocks(mut self, block_count: usize) -> TreeBuilder {
        self.checkpoint_blocks = block_count;
        self
    }

    /// Sets the quota of each namespace but the base namespace: the number of blocks that it may
    /// keep cached, so that the prompts of one tenant cannot evict those of all others. A quota of
    /// 0 keeps nothing that no lease and no pin holds. Without this call there is no quota.
    /// [`TreeWriter::set_namespace_quota`] sets another quota for one namespace, also for the base
    /// namespace.
    ///
    /// All blocks of a namespace that the index holds count, including those that leases and pins
    /// hold. When a commit adds blocks to a namespace that then exceeds its quota, or when
    /// something is unlocked in a namespace that exceeds it, the namespace's own unlocked leaves
    /// are evicted in the order of the eviction policy, until it is within its quota or everything
    /// in it is locked. So a namespace exceeds its quota only by what leases and pins hold, and
    /// other namespaces lose nothing. Dropped leases count as unlocked from the next operation of
    /// the writer on, as for all purposes.
    ///
    /// Blocks that were evicted for a quota are returned by the next eviction, before it removes
    /// anything from the index. Until then [`TreeCounts::freed`](crate::TreeCounts::freed) counts
    /// them.
    pub fn namespace_quota(mut self, block_count: usize) -> TreeBuilder {
        self.namespace_quota = Some(block_count);
        self
    }

    /// Returns a hasher that computes the block hashes of trees with these settings.
    ///
    /// # Errors
    ///
    /// [`ConfigError::BlockSize`] if the block size is not a power of two from 1 to 256.
    pub fn block_hasher(&self) -> Result<BlockHasher, ConfigError> {
        self.check_block_size()?;
        Ok(BlockHasher { block_size: self.block_size, seed: self.hash_seed })
    }

    /// Creates the empty tree.
    ///
    /// # Errors
    ///
    /// [`ConfigError::BlockSize`] if the block size is not a power of two from 1 to 256, and
    /// [`ConfigError::BlockCount`] for more than 2^28 blocks, or 2^20 for a checkpoint.
    pub fn build(self) -> Result<(TreeWriter, TreeReader), ConfigError> {
        self.check_block_size()?;
        self.block_count.map(check_block_count).transpose()?;
        let block_count = self.checkpoint_blocks;
        if block_count > CHECKPOINT_BLOCKS_MAX {
            let (got, max) = (block_count, CHECKPOINT_BLOCKS_MAX);
            return Err(ConfigError::BlockCount { got, max });
        }
        let span = (block_count > 0).then(|| CheckpointSpan::new(block_count, self.block_size));
        let core = Arc::new(Core::new(self.block_size, self.hash_seed, span));
        let reader = TreeReader { core: core.clone() };
        let pins = Pins::new(self.pin_budget, self.demotable_pins);
        let quotas = Quotas::new(self.namespace_quota);
        Ok((TreeWriter::new(core, self.order, pins, quotas, self.block_count), reader))
    }

    /// Creates the empty tree together with a pool of `block_count` blocks.
    ///
    /// # Errors
    ///
    /// [`ConfigError::BlockSize`] if the block size is not a power of two from 1 to 256, and
    /// [`ConfigError::BlockCount`] for more than 2^28 blocks.
    pub fn build_cache(self, block_count: usize) -> Result<PrefixCache, ConfigError> {
        let (writer, _) = self.block_count(block_count).build()?;
        let (pool, fence) = BlockPool::new(block_count)?;
        Ok(PrefixCache::from_parts(writer, pool, fence))
    }

    fn check_block_size(&self) -> Result<(), ConfigError> {
        if self.block_size.is_power_of_two() && self.block_size <= BLOCK_SIZE_MAX {
            return Ok(());
        }
        Err(ConfigError::BlockSize { got: self.block_size })
    }
}
