//! Counters of the writer's operations. Queries are not counted, because they write no shared
//! memory.

/// Counters since the tree was created, returned by
/// [`TreeWriter::stats`](crate::TreeWriter::stats).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TreeStats {
    /// Number of acquires.
    pub acquires: u64,
    /// Number of acquires that matched at least one block.
    pub acquires_hit: u64,
    /// Positions in the prompts of all acquires.
    pub positions_asked: u64,
    /// Positions that acquires matched.
    pub positions_hit: u64,
    /// Blocks that commits added to the index.
    pub blocks_committed: u64,
    /// Blocks that commits offered and the index already held.
    pub blocks_duplicate: u64,
    /// Blocks that were evicted to make room.
    pub evicted_for_room: u64,
    /// Blocks that a flush removed.
    pub evicted_by_flush: u64,
    /// Blocks that were removed together with their namespace.
    pub evicted_by_namespace: u64,
    /// Blocks that were removed by their prefix.
    pub evicted_by_prefix: u64,
    /// Blocks that were evicted because their namespace exceeded its quota.
    pub evicted_for_quota: u64,
    /// Pins that were demoted because blocks of their prefixes were evicted, see
    /// [`TreeBuilder::demotable_pins`](crate::TreeBuilder::demotable_pins).
    pub pins_demoted: u64,
    /// Panics of an [`EvictionOrder`](crate::EvictionOrder).
    pub eviction_order_panics: u64,
    /// Histogram of the age of runs of blocks when they were removed. Entry `n` counts the runs
    /// whose age was 2^n to 2^(n+1) - 1 ticks (operations of the writer); entry 0 also counts
    /// blocks of age 0, and the last entry all older ones.
    pub lifetime_ticks: [u64; 32],
}

impl TreeStats {
    /// Share of acquires that matched at least one block, from 0 to 1; 0 if there was none.
    pub fn hit_rate(&self) -> f64 {
        share(self.acquires_hit, self.acquires)
    }

    /// Share of the prompts' positions that were matched, from 0 to 1; 0 if there was none.
    pub fn token_hit_rate(&self) -> f64 {
        share(self.positions_hit, self.positions_asked)
    }

    /// Average number of positions that an acquire matched; 0 if there was none.
    pub fn average_match(&self) -> f64 {
        share(self.positions_hit, self.acquires)
    }

    pub(crate) fn record_lifetime(&mut self, ticks: u64) {
        let bucket = ticks.max(1).ilog2().min(31);
        self.lifetime_ticks[bucket as usize] += 1;
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
