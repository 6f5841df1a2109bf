//! What can go wrong here, each variant something that a caller can act on.

use crate::BlockId;
use thiserror::Error;

/// A tree was configured with values that it cannot work with.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The block size is zero, above 256 or no power of two.
    #[error("block size: expected a power of two from 1 to 256, got {got}")]
    BlockSize {
        /// What was asked for, in positions.
        got: usize,
    },
    /// The event queue cannot hold a single event.
    #[error("event queue: expected a capacity of at least 1 event, got {got}")]
    EventCapacity {
        /// What was asked for, in events.
        got: usize,
    },
}

/// There are not enough free blocks at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("expected {requested} free blocks, got {free} ({fenced} more wait for a running step)")]
pub struct Shortage {
    /// Blocks asked for.
    pub requested: usize,
    /// Blocks free at this moment.
    pub free: usize,
    /// Blocks that become free when the steps now running have ended.
    pub fenced: usize,
}

impl Shortage {
    /// Blocks missing even when the running steps have ended: how many to evict.
    pub fn missing(&self) -> usize {
        self.requested.saturating_sub(self.free + self.fenced)
    }
}

/// An audit found a structure that contradicts itself. Always a defect of this crate, or of a
/// caller that handed over a block which was not its own.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AuditError {
    /// A counter differs from a recount.
    #[error("{counter}: a recount expected {expected}, the counter holds {got}")]
    Counter {
        /// Which counter.
        counter: &'static str,
        /// What the recount found.
        expected: usize,
        /// What the counter said.
        got: usize,
    },
    /// A block has two owners.
    #[error("block {block:?}: expected one owner, got a second one")]
    SharedBlock {
        /// The block.
        block: BlockId,
    },
    /// A node breaks a rule of the tree.
    #[error("node {node}: expected {expected}")]
    Node {
        /// The writer's number of the node.
        node: u32,
        /// The rule.
        expected: &'static str,
    },
    /// Blocks were handed to the pool that were not in the state they had to be in.
    #[error("pool: expected every returned block to be {expected}, got {count} others")]
    Misuse {
        /// The state the blocks had to be in.
        expected: &'static str,
        /// How many blocks were refused since the pool was made.
        count: usize,
    },
}
