//! The states of blocks outside the tree, and leases on the private ones.
//!
//! Life of a block:
//! 1. **free** in the pool;
//! 2. **reserved**: in one [`BlockLease`], private to one sequence, being written;
//! 3. **committed**: handed over by [`BlockLease::commit_front`], owned by the tree, never
//!    written to again;
//! 4. given back by an eviction, as a duplicate, or by dropping its lease: **fenced** until every
//!    step has ended that had begun by then, since such a step could still touch it;
//! 5. free again.
//!
//! The pool has one owner; leases and fences travel to other threads and leave word in a queue.

mod fence;
mod lease;

pub use fence::{StepFence, StepTicket};
pub use lease::BlockLease;

use crate::sync::{Arc, Mutex, lock};
use crate::{AuditError, BlockId, Shortage};
use lease::Returned;
use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reserved,
    Committed,
    Fenced,
}

/// Hands out blocks and takes them back.
#[derive(Debug)]
pub struct BlockPool {
    states: Vec<State>,
    free: Vec<BlockId>,
    /// Returned blocks, oldest first, with the last step that had begun when they came back.
    fenced: VecDeque<(u64, BlockId)>,
    reserved: usize,
    committed: usize,
    /// Returned blocks that were not in the state they had to be in; refused.
    misused: usize,
    fence: StepFence,
    queue: Arc<Mutex<Vec<Returned>>>,
}

/// How many blocks are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Ready to be reserved.
    pub free: usize,
    /// Given back, waiting for running steps to end.
    pub fenced: usize,
    /// In leases.
    pub reserved: usize,
    /// Owned by the tree.
    pub committed: usize,
}

impl BlockPool {
    /// A pool of the blocks 0 to `block_count - 1`, all free, and the fence for its steps.
    pub fn new(block_count: usize) -> (BlockPool, StepFence) {
        let count = u32::try_from(block_count).unwrap_or(u32::MAX);
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
        (pool, fence)
    }

    /// Takes `count` free blocks into a lease.
    ///
    /// # Errors
    ///
    /// When fewer are free at this moment; nothing is taken then.
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
                "free blocks are in the list"
            );
            self.states[block.index()] = State::Reserved;
        }
        self.reserved += count;
        Ok(BlockLease::new(blocks, self.queue.clone()))
    }

    /// Takes back blocks that the tree has given back, or refused as duplicates.
    pub fn release(&mut self, blocks: Vec<BlockId>) {
        self.settle();
        self.take_back(blocks, State::Committed);
    }

    /// Blocks in the pool, in whatever state.
    pub fn block_count(&self) -> usize {
        self.states.len()
    }

    /// All counts at this moment, word from dropped leases and ended steps included.
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
        // What has just come back is free at once when no step runs.
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

    /// Checks every block's state against the lists.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
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

    /// Takes in word from leases and from the fence.
    fn settle(&mut self) {
        let returned = std::mem::take(&mut *lock(&self.queue));
        for message in returned {
            match message {
                Returned::Dropped(blocks) => self.take_back(blocks, State::Reserved),
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

    fn take_back(&mut self, blocks: Vec<BlockId>, from: State) {
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
