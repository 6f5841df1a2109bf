//! What the writer counts besides blocks. Queries are not counted: they write nothing.

/// Counts since the tree was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TreeStats {
    /// Acquires.
    pub acquires: u64,
    /// Of these, acquires that found at least one block.
    pub acquires_hit: u64,
    /// Positions asked for by acquires.
    pub positions_asked: u64,
    /// Of these, positions found.
    pub positions_hit: u64,
    /// Blocks that commits added.
    pub blocks_committed: u64,
    /// Blocks offered that the tree held already.
    pub blocks_duplicate: u64,
    /// Blocks given back to make room.
    pub evicted_for_room: u64,
    /// Blocks that left by a flush.
    pub evicted_by_flush: u64,
    /// Blocks that left with their namespace.
    pub evicted_by_namespace: u64,
    /// How long evicted runs had been in the tree: entry `n` counts those of 2^n to 2^(n+1) - 1
    /// ticks (operations of the writer), entry 0 those below 2.
    pub lifetime_ticks: [u64; 32],
}

impl TreeStats {
    /// Share of acquires that found something, 0 to 1; 0 before the first.
    pub fn hit_rate(&self) -> f64 {
        share(self.acquires_hit, self.acquires)
    }

    /// Share of the positions asked for that were found, 0 to 1; 0 before the first.
    pub fn token_hit_rate(&self) -> f64 {
        share(self.positions_hit, self.positions_asked)
    }

    /// Positions found by an acquire, on average over all of them.
    pub fn average_match(&self) -> f64 {
        share(self.positions_hit, self.acquires)
    }

    pub(crate) fn lived(&mut self, ticks: u64) {
        let bucket = ticks.max(1).ilog2().min(31);
        self.lifetime_ticks[bucket as usize] += 1;
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
