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
    /// The tick at which it ends by itself, if any.
    pub expires: Option<u64>,
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
    /// By expiry, for the pins that have one.
    expiries: BTreeMap<(u64, PinId), ()>,
}

impl Pins {
    pub(crate) fn new(budget: usize) -> Pins {
        let (pins, expiries) = (BTreeMap::new(), BTreeMap::new());
        Pins { budget, blocks: 0, next: 0, pins, expiries }
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
        if let Some(expires) = info.expires {
            self.expiries.insert((expires, info.id), ());
        }
        self.pins.insert(info.id, (info, end));
        PinId(self.next)
    }

    /// Takes a pin out and returns the node that it locks.
    pub(crate) fn remove(&mut self, id: PinId) -> Option<NodeId> {
        let (info, end) = self.pins.remove(&id)?;
        self.blocks -= info.block_count;
        if let Some(expires) = info.expires {
            self.expiries.remove(&(expires, id));
        }
        Some(end)
    }

    /// A pin whose time is over at `tick`.
    pub(crate) fn expired(&self, tick: u64) -> Option<PinId> {
        let (&(expires, id), ()) = self.expiries.first_key_value()?;
        (expires <= tick).then_some(id)
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &PinInfo> {
        self.pins.values().map(|(info, _)| info)
    }
}
