//! The states of blocks outside the tree, and leases on private blocks.
//!
//! Life of a block:
//! 1. **free** in the pool;
//! 2. **reserved** in one [`BlockLease`]: private to one sequence, which writes KV to it;
//! 3. **committed** ([`TreeWriter::commit_from`](crate::TreeWriter::commit_from)): owned by the
//!    tree, and never written to again;
//! 4. **fenced** after an eviction returned it, after the tree refused it as a duplicate, or after
//!    its lease was dropped: not handed out until all steps have ended that had begun by then,
//!    because such a step may still access it;
//! 5. free again.
//!
//! The pool has one owner. Leases and fences may be on other threads; they send messages to the
//! pool through a queue, which the pool processes at its next operation.

mod fence;
mod lease;

pub use fence::{StepFence, StepTicket};
pub use lease::BlockLease;

use crate::sync::{Arc, Mutex, lock};
use crate::{AuditError, BlockId, ConfigError, EvictedBlocks, Shortage};
pub(crate) use lease::PoolQueue;
use lease::Returned;
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reserved,
    Committed,
    Fenced,
}

/// Tracks the state of each block of the engine's KV memory. Hands out free blocks, and takes them
/// back when they are no longer used.
///
/// A block is free, reserved (in a [`BlockLease`]), committed (owned by the tree), or fenced
/// (returned, but a running step may still access it). At any time `free + fenced + reserved +
/// committed` is the number of blocks; [`counts`](BlockPool::counts) returns these numbers.
///
/// Dropping the pool is allowed while leases exist; they have no effect afterward.
#[derive(Debug)]
pub struct BlockPool {
    states: Vec<State>,
    free: Vec<BlockId>,
    /// Returned blocks, oldest first, with the last step that had begun when they were returned.
    fenced: VecDeque<(u64, BlockId)>,
    reserved: usize,
    committed: usize,
    /// Number of returned blocks that were refused because of their state.
    misused: usize,
    fence: StepFence,
    queue: PoolQueue,
}

/// The number of blocks in each state, returned by [`BlockPool::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PoolCounts {
    /// Blocks that can be reserved now.
    pub free: usize,
    /// Blocks that become free when the steps that are running now have ended.
    pub fenced: usize,
    /// Blocks in leases.
    pub reserved: usize,
    /// Blocks that the tree owns.
    pub committed: usize,
}

/// The largest supported number of blocks. Their accounting takes five bytes a block.
const BLOCK_COUNT_MAX: u32 = 1 << 28;

/// Checks the number of blocks of a KV memory.
pub(crate) fn check_block_count(got: usize) -> Result<u32, ConfigError> {
    match u32::try_from(got) {
        Ok(count) if count <= BLOCK_COUNT_MAX => Ok(count),
        _ => Err(ConfigError::BlockCount { got, max: BLOCK_COUNT_MAX as usize }),
    }
}

impl BlockPool {
    /// Creates a pool of the blocks 0 to `block_count - 1`, all free, and its step fence.
    ///
    /// # Errors
    ///
    /// [`ConfigError::BlockCount`] if `block_count` is more than 2^28.
    pub fn new(block_count: usize) -> Result<(BlockPool, StepFence), ConfigError> {
        let count = check_block_count(block_count)?;
        let fence = StepFence::new();
        let pool = BlockPool {
            states: vec![State::Free; count as usize],
            // Reversed, so that the lowest ids are handed out first.
            free: (0..count).rev().map(BlockId).collect(),
            fenced: VecDeque::new(),
            reserved: 0,
            committed: 0,
            misused: 0,
            fence: fence.clone(),
            queue: Arc::new(Mutex::new(Vec::new())),
        };
        Ok((pool, fence))
    }

    /// Moves `count` free blocks into a lease.
    ///
    /// # Errors
    ///
    /// [`Shortage`] if fewer blocks are free at this moment. In this case nothing is reserved.
    /// Evict [`Shortage::missing`] blocks from the tree, [`release`](BlockPool::release) them, and
    /// try again, or wait for a running step to end.
    pub fn reserve(&mut self, count: usize) -> Result<BlockLease, Shortage> {
        self.settle();
        if self.free.len() < count {
            let (free, fenced) = (self.free.len(), self.fenced.len());
            return Err(Shortage { requested: count, free, fenced });
        }
        let blocks = self.free.split_off(self.free.len() - count);
        let blocks: Vec<BlockId> = blocks.into_iter().rev().collect();
        for block in &blocks {
            debug_assert_eq!(
                self.states[block.index()],
                State::Free,
                "only free blocks are in the list"
            );
            self.states[block.index()] = State::Reserved;
        }
        self.reserved += count;
        Ok(BlockLease::new(blocks, self.queue.clone()))
    }

    /// Takes back blocks that the tree has evicted. Blocks of another pool are refused;
    /// [`audit`](BlockPool::audit) reports this.
    pub fn release(&mut self, evicted: EvictedBlocks) {
        self.take_evicted(&evicted);
    }

    /// [`release`](BlockPool::release) for a caller that still returns the content of the blocks,
    /// and releases them only once.
    pub(crate) fn take_evicted(&mut self, evicted: &EvictedBlocks) {
        self.settle();
        if evicted.pool.as_ref().is_none_or(|pool| !Arc::ptr_eq(pool, &self.queue)) {
            self.misused += evicted.len();
            return;
        }
        self.take_back(evicted.iter().map(|block| block.id), State::Committed);
    }

    /// Whether `lease` was reserved from this pool.
    pub(crate) fn has_lease(&self, lease: &BlockLease) -> bool {
        lease.returns_to(&self.queue)
    }

    /// Number of blocks of the pool, in any state.
    pub fn block_count(&self) -> usize {
        self.states.len()
    }

    /// The number of blocks in each state at this moment. Dropped leases and ended steps are taken
    /// into account.
    pub fn counts(&self) -> PoolCounts {
        let mut counts = PoolCounts {
            free: self.free.len(),
            fenced: self.fenced.len(),
            reserved: self.reserved,
            committed: self.committed,
        };
        let passed = self.fence.passed();
        let ready = self.fenced.iter().take_while(|&&(step, _)| step <= passed).count();
        counts.free += ready;
        counts.fenced -= ready;
        // Blocks that were just returned are free at once if no step is running.
        let idle = passed == self.fence.begun();
        for returned in lock(&self.queue).iter() {
            match returned {
                Returned::Dropped(blocks) => {
                    counts.reserved -= blocks.len();
                    *(if idle { &mut counts.free } else { &mut counts.fenced }) += blocks.len();
                }
                Returned::Committed(blocks) => {
                    counts.reserved -= blocks.len();
                    counts.committed += blocks.len();
                }
            }
        }
        counts
    }

    /// Recounts the states of all blocks, for tests and debugging. The pool cannot know whether the
    /// tree really owns all committed blocks: for that, compare [`PoolCounts::committed`] with
    /// [`TreeCounts`](crate::TreeCounts) (`cached + detached`).
    ///
    /// # Errors
    ///
    /// The first contradiction found, or [`AuditError::Misuse`] if blocks were refused.
    pub fn audit(&mut self) -> Result<(), AuditError> {
        self.settle();
        let tally = |state| self.states.iter().filter(|&&s| s == state).count();
        let checks = [
            ("free blocks", tally(State::Free), self.free.len()),
            ("fenced blocks", tally(State::Fenced), self.fenced.len()),
            ("reserved blocks", tally(State::Reserved), self.reserved),
            ("committed blocks", tally(State::Committed), self.committed),
        ];
        for (counter, expected, got) in checks {
            if expected != got {
                return Err(AuditError::Counter { counter, expected, got });
            }
        }
        if self.misused > 0 {
            return Err(AuditError::Misuse { expected: "committed", count: self.misused });
        }
        let listed = self.free.iter().chain(self.fenced.iter().map(|(_, block)| block));
        let mut seen = vec![false; self.states.len()];
        for &block in listed {
            if std::mem::replace(&mut seen[block.index()], true) {
                return Err(AuditError::SharedBlock { block });
            }
        }
        Ok(())
    }

    /// Processes the messages from leases, and frees blocks whose steps have ended.
    fn settle(&mut self) {
        let returned = std::mem::take(&mut *lock(&self.queue));
        for message in returned {
            match message {
                Returned::Dropped(blocks) => self.take_back(blocks.into_iter(), State::Reserved),
                Returned::Committed(blocks) => {
                    self.reserved -= blocks.len();
                    self.committed += blocks.len();
                    for block in blocks {
                        self.states[block.index()] = State::Committed;
                    }
                }
            }
        }
        let passed = self.fence.passed();
        while let Some(&(step, block)) = self.fenced.front() {
            if step > passed {
                break;
            }
            self.fenced.pop_front();
            self.states[block.index()] = State::Free;
            self.free.push(block);
        }
    }

    fn take_back(&mut self, blocks: impl Iterator<Item = BlockId>, from: State) {
        let begun = self.fence.begun();
        for block in blocks {
            match self.states.get_mut(block.index()) {
                Some(state) if *state == from => *state = State::Fenced,
                _ => {
                    self.misused += 1;
                    continue;
                }
            }
            match from {
                State::Reserved => self.reserved -= 1,
                _ => self.committed -= 1,
            }
            self.fenced.push_back((begun, block));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
