//! Pins: prefixes that stay cached without a lease.

use crate::Namespace;
use crate::node::NodeId;
use std::collections::BTreeMap;
use thiserror::Error;

/// Identifies a pin. Ids of one tree are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PinId(pub u64);

/// A pinned prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PinInfo {
    /// The id that [`TreeWriter::pin`](crate::TreeWriter::pin) returned.
    pub id: PinId,
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// Number of pinned positions, from the start of the sequence.
    pub position_count: usize,
    /// Number of pinned blocks. A block that several pins share counts for each of them.
    pub block_count: usize,
}

/// A prefix could not be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PinError {
    /// Not even the first block of the prefix is cached.
    #[error("pin: expected at least one cached block, got none")]
    NotCached,
    /// All pins together would hold more blocks than the pin budget allows; see
    /// [`TreeBuilder::pin_budget`](crate::TreeBuilder::pin_budget).
    #[error(
        "pin: expected at most {budget} pinned blocks, got {requested} in addition to the {pinned} \
         that are pinned"
    )]
    OverBudget {
        /// Maximum number of blocks that pins may hold.
        budget: usize,
        /// Number of blocks that pins hold now.
        pinned: usize,
        /// Number of blocks that this pin would add.
        requested: usize,
    },
}

/// All pins of a tree.
#[derive(Debug)]
pub(crate) struct Pins {
    /// Maximum of `blocks`.
    pub(crate) budget: usize,
    /// Number of blocks that all pins hold; shared blocks count for each pin.
    pub(crate) blocks: usize,
    /// The last id given out.
    last: u64,
    /// Each pin with the node that it locks.
    pins: BTreeMap<PinId, (PinInfo, NodeId)>,
}

impl Pins {
    pub(crate) fn new(budget: usize) -> Pins {
        Pins { budget, blocks: 0, last: 0, pins: BTreeMap::new() }
    }

    /// Checks whether a pin of `block_count` blocks is permitted.
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

    /// Adds a pin that locks `end` and returns its new id.
    pub(crate) fn insert(&mut self, mut info: PinInfo, end: NodeId) -> PinId {
        self.last += 1;
        info.id = PinId(self.last);
        self.blocks += info.block_count;
        self.pins.insert(info.id, (info, end));
        PinId(self.last)
    }

    /// Removes a pin and returns the node that it locks.
    pub(crate) fn remove(&mut self, id: PinId) -> Option<NodeId> {
        let (info, end) = self.pins.remove(&id)?;
        self.blocks -= info.block_count;
        Some(end)
    }

    /// The node that a pin locks.
    pub(crate) fn end(&self, id: PinId) -> Option<NodeId> {
        self.pins.get(&id).map(|&(_, end)| end)
    }

    pub(crate) fn count(&self) -> usize {
        self.pins.len()
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &PinInfo> {
        self.pins.values().map(|(info, _)| info)
    }
}
