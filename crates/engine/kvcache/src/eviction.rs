//! The order in which unlocked leaves are evicted.
//!
//! An [`EvictionOrder`] gives each leaf a rank when the leaf becomes evictable. The writer keeps
//! the ranks in one ordered index and evicts the leaf with the smallest rank first. A rank is not
//! recomputed while the leaf stays evictable; a use of the leaf takes it out of the index, and it
//! is ranked again when it becomes evictable the next time.
//!
//! [`EvictionPolicy`] names the orders that come with this crate.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use thiserror::Error;

/// The rank of a leaf in the order of eviction. The smallest rank is evicted first; the second
/// field decides between equal first fields. Leaves with the same rank are evicted in an
/// unspecified order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictionRank(pub u64, pub u64);

/// What an [`EvictionOrder`] knows about a leaf that has become evictable.
///
/// Times are in ticks. The tree counts one tick for each operation of its writer.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct EvictionCandidate {
    /// Tick of the commit that created the leaf.
    pub created: u64,
    /// Tick of the last acquire or commit whose match went through the leaf.
    pub last_use: u64,
    /// Number of acquires whose match went through the leaf.
    pub hits: u32,
    /// The priority last set by [`TreeWriter::set_priority`](crate::TreeWriter::set_priority),
    /// 0 by default.
    pub priority: i32,
    /// Number of blocks in the leaf, at least 1, a checkpoint included.
    pub block_count: usize,
    /// Number of blocks that must be computed again if the leaf is evicted, at least 1: its own; or,
    /// in a tree with checkpoints, the blocks of KV from the checkpoint before it up to its own. A
    /// leaf after the last checkpoint saves nothing. No order is consulted about it: it is evicted
    /// before all others.
    pub saved_blocks: usize,
    /// Number of cached continuations of the prefix that a checkpoint belongs to, 0 for other
    /// leaves. With one, the sequence that took the checkpoint has continued, and requests for it
    /// resume from a later checkpoint. With several, prompts diverge there. The number is not
    /// updated after the leaf has become evictable.
    pub continuations: usize,
    /// Number of blocks before the leaf. The attention of the leaf's positions reads these blocks
    /// too, so recomputing a leaf costs more the deeper it is.
    pub start_block: usize,
}

/// Decides which leaf is evicted first. Implement this trait to supply an order of your own to
/// [`TreeBuilder::eviction_order`](crate::TreeBuilder::eviction_order).
///
/// The tree calls it on the writer's thread, in the middle of writer operations, so both methods
/// should return quickly. If one panics, the tree stays consistent and the operation continues: a
/// leaf without a rank is evicted before those that have one, and
/// [`TreeStats::eviction_order_panics`](crate::TreeStats::eviction_order_panics) counts the panic.
///
/// ```
/// use stolon_kvcache::{EvictionCandidate, EvictionOrder, EvictionRank, TreeBuilder};
///
/// /// Evicts the longest leaf first, then the least recently used.
/// #[derive(Debug)]
/// struct LongestFirst;
///
/// impl EvictionOrder for LongestFirst {
///     fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
///         EvictionRank(u64::MAX - leaf.block_count as u64, leaf.last_use)
///     }
/// }
///
/// let (writer, reader) = TreeBuilder::new(16).eviction_order(Box::new(LongestFirst)).build()?;
/// # Ok::<(), stolon_kvcache::ConfigError>(())
/// ```
pub trait EvictionOrder: fmt::Debug + Send {
    /// Returns the rank of a leaf that has just become evictable.
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank;

    /// Called with the rank of each leaf that is evicted or trimmed to make room. Does nothing by
    /// default.
    /// Orders that age their entries raise their clock here.
    fn evicted(&mut self, victim: EvictionRank) {
        let _ = victim;
    }
}

/// Calls a custom eviction order. A panic would leave the operation in progress half done, so it is
/// counted in `panics` and the result is `None`.
pub(crate) fn contain<T>(panics: &mut u64, call: impl FnOnce() -> T) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(call));
    *panics += u64::from(result.is_err());
    result.ok()
}

/// The eviction orders that come with this crate.
///
/// Parses from and displays as its [`name`](EvictionPolicy::name).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictionPolicy {
    /// Least recently used first.
    #[default]
    Lru,
    /// Fewest hits first, then least recently used.
    Lfu,
    /// First in, first out: the oldest leaf first.
    Fifo,
    /// Most recently used first.
    Mru,
    /// First in, last out: the newest leaf first.
    Filo,
    /// Lowest priority first, then least recently used.
    Priority,
    /// Segmented LRU: leaves with fewer than two hits first; least recently used within both
    /// segments.
    Slru,
    /// The leaf whose loss costs least first (greedy-dual): recomputation cost per block, times
    /// the number of uses, aged as other leaves are evicted.
    CostAware,
}

impl EvictionPolicy {
    /// All policies.
    pub const ALL: [EvictionPolicy; 8] = [
        EvictionPolicy::Lru,
        EvictionPolicy::Lfu,
        EvictionPolicy::Fifo,
        EvictionPolicy::Mru,
        EvictionPolicy::Filo,
        EvictionPolicy::Priority,
        EvictionPolicy::Slru,
        EvictionPolicy::CostAware,
    ];

    /// The policy's name as it is written in configurations, for example `lru` or `cost-aware`.
    pub fn name(self) -> &'static str {
        match self {
            EvictionPolicy::Lru => "lru",
            EvictionPolicy::Lfu => "lfu",
            EvictionPolicy::Fifo => "fifo",
            EvictionPolicy::Mru => "mru",
            EvictionPolicy::Filo => "filo",
            EvictionPolicy::Priority => "priority",
            EvictionPolicy::Slru => "slru",
            EvictionPolicy::CostAware => "cost-aware",
        }
    }

    /// A new instance of the policy's order, for one tree.
    pub fn order(self) -> Box<dyn EvictionOrder> {
        match self {
            EvictionPolicy::Lru => stateless(|leaf| EvictionRank(leaf.last_use, 0)),
            EvictionPolicy::Lfu => {
                stateless(|leaf| EvictionRank(u64::from(leaf.hits), leaf.last_use))
            }
            EvictionPolicy::Fifo => stateless(|leaf| EvictionRank(leaf.created, 0)),
            EvictionPolicy::Mru => stateless(|leaf| EvictionRank(u64::MAX - leaf.last_use, 0)),
            EvictionPolicy::Filo => stateless(|leaf| EvictionRank(u64::MAX - leaf.created, 0)),
            EvictionPolicy::Priority => stateless(|leaf| {
                let above_lowest = i64::from(leaf.priority) - i64::from(i32::MIN);
                EvictionRank(above_lowest as u64, leaf.last_use)
            }),
            EvictionPolicy::Slru => {
                stateless(|leaf| EvictionRank(u64::from(leaf.hits >= 2), leaf.last_use))
            }
            EvictionPolicy::CostAware => Box::new(CostAware { clock: 0 }),
        }
    }
}

impl fmt::Display for EvictionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The string is not the name of an [`EvictionPolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "eviction policy: expected one of {}, got `{got}`",
    EvictionPolicy::ALL.map(EvictionPolicy::name).join(", ")
)]
pub struct UnknownEvictionPolicy {
    /// The string that was parsed.
    pub got: String,
}

impl FromStr for EvictionPolicy {
    type Err = UnknownEvictionPolicy;

    fn from_str(text: &str) -> Result<EvictionPolicy, UnknownEvictionPolicy> {
        let named = EvictionPolicy::ALL.into_iter().find(|policy| policy.name() == text);
        named.ok_or_else(|| UnknownEvictionPolicy { got: text.to_owned() })
    }
}

/// An order that ranks each leaf by itself and remembers nothing.
#[derive(Debug)]
struct Stateless(fn(&EvictionCandidate) -> EvictionRank);

fn stateless(rank: fn(&EvictionCandidate) -> EvictionRank) -> Box<dyn EvictionOrder> {
    Box::new(Stateless(rank))
}

impl EvictionOrder for Stateless {
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
        (self.0)(leaf)
    }
}

/// Greedy-dual: a leaf is worth its recomputation cost per block times its uses, plus the worth of
/// the leaf that was evicted last. As evictions raise this clock, a leaf that is never used again
/// is overtaken by newer leaves, however expensive it was.
#[derive(Debug)]
struct CostAware {
    /// Worth of the leaf that was evicted last.
    clock: u64,
}

impl CostAware {
    /// Number of context blocks at which attention has doubled the cost of computing a block.
    const CONTEXT_DOUBLES: u64 = 256;
    /// Cost of computing one block without context.
    const UNIT: u64 = 1024;
    /// Factor by which a checkpoint is less likely to be used if its sequence has continued.
    const GONE_ON: u64 = 4;
}

impl EvictionOrder for CostAware {
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
        let saved = leaf.saved_blocks as u64;
        let end = leaf.start_block as u64 + leaf.block_count as u64;
        let context = end.saturating_sub(saved.div_ceil(2));
        let cost = Self::UNIT + context * Self::UNIT / Self::CONTEXT_DOUBLES;
        let cost = cost.saturating_mul(saved) / leaf.block_count.max(1) as u64;
        let likely = if leaf.continuations == 1 { 1 } else { Self::GONE_ON };
        let uses = (u64::from(leaf.hits.min(1 << 16)) + 1) * likely;
        EvictionRank(self.clock.saturating_add(cost.saturating_mul(uses)), leaf.last_use)
    }

    fn evicted(&mut self, victim: EvictionRank) {
        self.clock = self.clock.max(victim.0);
    }
}
