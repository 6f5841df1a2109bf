//! Which unlocked leaf goes first. A policy gives each leaf a rank when it becomes evictable; the
//! writer keeps the ranks in one ordered index and never recomputes them in between.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Where a leaf stands in the order of eviction: the smallest goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(pub u64, pub u64);

/// What a policy may look at. Ticks count the writer's operations.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LeafInfo {
    /// Tick of the commit that made the leaf.
    pub created: u64,
    /// Tick of the last acquire or commit that went through it.
    pub last_use: u64,
    /// Acquires that went through it.
    pub hits: u32,
    /// The priority last given to it, 0 by default; higher stays longer.
    pub priority: i32,
    /// Blocks in the leaf.
    pub block_count: usize,
    /// Blocks before it: what its computation had to attend to besides itself.
    pub start_block: usize,
}

/// An order of eviction. Implement it to supply one of your own.
pub trait EvictionPolicy: fmt::Debug + Send {
    /// The rank of a leaf that has just become evictable.
    fn rank(&mut self, leaf: &LeafInfo) -> Rank;

    /// Told of the rank of each victim. Does nothing by default.
    fn evicted(&mut self, victim: Rank) {
        let _ = victim;
    }
}

/// The orders that come with the crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// Least recently used first.
    #[default]
    Lru,
    /// Fewest hits first, then least recently used.
    Lfu,
    /// Oldest first.
    Fifo,
    /// Most recently used first.
    Mru,
    /// Youngest first.
    Filo,
    /// Lowest priority first, then least recently used.
    Priority,
    /// Leaves hit fewer than twice first; least recently used within both groups.
    Slru,
    /// Cheapest to lose first: recomputation cost x expected reuse / size, ageing with evictions.
    CostAware,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 8] = [
        Policy::Lru,
        Policy::Lfu,
        Policy::Fifo,
        Policy::Mru,
        Policy::Filo,
        Policy::Priority,
        Policy::Slru,
        Policy::CostAware,
    ];

    /// Its name, as in configurations: `lru`, `cost-aware`.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Fifo => "fifo",
            Policy::Mru => "mru",
            Policy::Filo => "filo",
            Policy::Priority => "priority",
            Policy::Slru => "slru",
            Policy::CostAware => "cost-aware",
        }
    }

    pub(crate) fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Policy::CostAware => Box::new(CostAware { clock: 0 }),
            plain => Box::new(plain),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no policy's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("eviction policy: expected one of {}, got `{got}`", Policy::ALL.map(Policy::name).join(", "))]
pub struct UnknownPolicy {
    /// The name.
    pub got: String,
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Policy, UnknownPolicy> {
        let named = Policy::ALL.into_iter().find(|policy| policy.name() == text);
        named.ok_or_else(|| UnknownPolicy { got: text.to_owned() })
    }
}

impl EvictionPolicy for Policy {
    fn rank(&mut self, leaf: &LeafInfo) -> Rank {
        match self {
            Policy::Lru | Policy::CostAware => Rank(leaf.last_use, 0),
            Policy::Lfu => Rank(u64::from(leaf.hits), leaf.last_use),
            Policy::Fifo => Rank(leaf.created, 0),
            Policy::Mru => Rank(u64::MAX - leaf.last_use, 0),
            Policy::Filo => Rank(u64::MAX - leaf.created, 0),
            Policy::Priority => {
                Rank((i64::from(leaf.priority) - i64::from(i32::MIN)) as u64, leaf.last_use)
            }
            Policy::Slru => Rank(u64::from(leaf.hits >= 2), leaf.last_use),
        }
    }
}

/// Greedy-dual: a leaf is worth its cost a block times its uses, on top of the value at which the
/// last victim went. What is never used again is overtaken by the clock, however dear it was.
#[derive(Debug)]
struct CostAware {
    /// Worth of the last victim.
    clock: u64,
}

impl CostAware {
    /// Blocks of context at which attention has doubled the cost of computing a block.
    const CONTEXT_DOUBLES: u64 = 256;
    /// Worth of computing one block without context.
    const UNIT: u64 = 1024;
}

impl EvictionPolicy for CostAware {
    fn rank(&mut self, leaf: &LeafInfo) -> Rank {
        let context = leaf.start_block as u64 + leaf.block_count as u64 / 2;
        let cost = Self::UNIT + context * Self::UNIT / Self::CONTEXT_DOUBLES;
        let uses = u64::from(leaf.hits.min(1 << 16)) + 1;
        Rank(self.clock.saturating_add(cost.saturating_mul(uses)), leaf.last_use)
    }

    fn evicted(&mut self, victim: Rank) {
        self.clock = self.clock.max(victim.0);
    }
}
