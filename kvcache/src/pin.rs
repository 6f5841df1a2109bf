//! Pins: prefixes that stay cached without a lease, for a time or until taken back.

use crate::Namespace;
use crate::node::NodeId;
use std::collections::BTreeMap;
use thiserror::Error;

/// The name of a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PinId(pub u64);

/// What a pin holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinInfo {
    /// Its name.
    pub id: PinId,
    /// Where.
    pub namespace: Namespace,
    /// Positions held, from the start of the sequence.
    pub position_count: usize,
    /// Blocks held; those shared with another pin count for both.
    pub block_count: usize,
}

/// A prefix cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PinError {
    /// Nothing of it is cached.
    #[error("pin: expected at least one cached block, got none")]
    NotCached,
    /// The pins together would hold too much.
    #[error("pin: expected at most {budget} pinned blocks, got {requested} beside {pinned}")]
    OverBudget {
        /// Blocks that pins may hold.
        budget: usize,
        /// Blocks that they hold.
        pinned: usize,
        /// Blocks that this one would add.
        requested: usize,
    },
}

/// All pins of a tree.
#[derive(Debug)]
pub(crate) struct Pins {
    pub(crate) budget: usize,
    /// Blocks held by all pins, shared ones counted for each.
    pub(crate) blocks: usize,
    next: u64,
    pins: BTreeMap<PinId, (PinInfo, NodeId)>,
}

impl Pins {
    pub(crate) fn new(budget: usize) -> Pins {
        Pins { budget, blocks: 0, next: 0, pins: BTreeMap::new() }
    }

    /// Checks the budget for a pin of `block_count` blocks.
    pub(crate) fn check(&self, block_count: usize) -> Result<(), PinError> {
        if block_count == 0 {
            return Err(PinError::NotCached);
        }
        if self.blocks + block_count > self.budget {
            let (budget, pinned) = (self.budget, self.blocks);
            return Err(PinError::OverBudget { budget, pinned, requested: block_count });
        }
        Ok(())
    }

    pub(crate) fn insert(&mut self, mut info: PinInfo, end: NodeId) -> PinId {
        self.next += 1;
        info.id = PinId(self.next);
        self.blocks += info.block_count;
        self.pins.insert(info.id, (info, end));
        PinId(self.next)
    }

    /// Takes a pin out and returns the node that it locks.
    pub(crate) fn remove(&mut self, id: PinId) -> Option<NodeId> {
        let (info, end) = self.pins.remove(&id)?;
        self.blocks -= info.block_count;
        Some(end)
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &PinInfo> {
        self.pins.values().map(|(info, _)| info)
    }
}
