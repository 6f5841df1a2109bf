//! Pins: prefixes that stay cached without a lease.
//!
//! A pin locks its prefix, unless pins can be demoted. A mark is a pin that can always be demoted: its
//! prefix is evicted after everything that is neither pinned nor marked. Pins and marks have separate
//! budgets.

use crate::node::NodeId;
use crate::{CheckpointLease, Namespace};
use std::collections::{BTreeMap, HashMap};
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
    /// Number of pinned blocks, including the blocks of a checkpoint. A block that several pins
    /// share counts for each of them.
    pub block_count: usize,
    /// Whether blocks of the prefix were evicted and it was not committed again since. Only marks,
    /// and pins that [`TreeBuilder::demotable_pins`](crate::TreeBuilder::demotable_pins) permits to
    /// demote, ever are.
    pub demoted: bool,
    /// Whether [`TreeWriter::mark`](crate::TreeWriter::mark) has made it.
    pub is_mark: bool,
}

/// A prefix could not be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
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
    budget: usize,
    /// Whether pins can be demoted, instead of locking their prefixes. Marks always can.
    pub(crate) demotable: bool,
    /// Number of blocks that all pins but marks hold; shared blocks count for each pin.
    pub(crate) blocks: usize,
    /// The last id given out.
    last: u64,
    pins: BTreeMap<PinId, Pin>,
    /// The demoted pins, by the hash of the last block of their prefixes.
    demoted: HashMap<u64, Vec<PinId>>,
}

#[derive(Debug)]
struct Pin {
    info: PinInfo,
    /// Locks the last checkpoint of the prefix.
    _checkpoint: Option<CheckpointLease>,
    state: PinState,
}

#[derive(Debug)]
enum PinState {
    /// The node in which the prefix ends.
    Cached(NodeId),
    /// The prefix is not cached completely.
    Demoted {
        /// All positions of the prefix.
        positions: Box<[u32]>,
        /// The hash of its last block.
        hash: u64,
        /// Tick of the last use before it was demoted.
        last_use: u64,
    },
}

impl Pins {
    pub(crate) fn new(budget: usize, demotable: bool) -> Pins {
        let (pins, demoted) = (BTreeMap::new(), HashMap::new());
        Pins { budget, demotable, blocks: 0, last: 0, pins, demoted }
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

    /// Adds a pin whose prefix ends in `end` and returns its new id.
    pub(crate) fn insert(
        &mut self,
        mut info: PinInfo,
        end: NodeId,
        checkpoint: Option<CheckpointLease>,
    ) -> PinId {
        self.last += 1;
        info.id = PinId(self.last);
        self.blocks += if info.is_mark { 0 } else { info.block_count };
        let state = PinState::Cached(end);
        self.pins.insert(info.id, Pin { info, state, _checkpoint: checkpoint });
        PinId(self.last)
    }

    /// Removes a pin. Returns the node in which its prefix ends, [`NodeId::NONE`] for a demoted
    /// pin, and whether it could be demoted; `None` if there is no such pin.
    pub(crate) fn remove(&mut self, id: PinId) -> Option<(NodeId, bool)> {
        let Pin { info, state, .. } = self.pins.remove(&id)?;
        self.blocks -= if info.is_mark { 0 } else { info.block_count };
        let demotable = self.demotable || info.is_mark;
        match state {
            PinState::Cached(end) => Some((end, demotable)),
            PinState::Demoted { hash, .. } => {
                self.forget_demoted(hash, id);
                Some((NodeId::NONE, demotable))
            }
        }
    }

    /// Demotes the pins that end in `end`, the node that the prefix of all `positions` ends in.
    /// Returns how many there were.
    pub(crate) fn demote(
        &mut self,
        end: NodeId,
        positions: &[u32],
        hash: u64,
        last_use: u64,
    ) -> u32 {
        let mut count = 0;
        for (&id, pin) in &mut self.pins {
            if matches!(pin.state, PinState::Cached(node) if node == end) {
                pin.state = PinState::Demoted { positions: positions.into(), hash, last_use };
                pin.info.demoted = true;
                self.demoted.entry(hash).or_default().push(id);
                count += 1;
            }
        }
        count
    }

    pub(crate) fn has_demoted(&self) -> bool {
        !self.demoted.is_empty()
    }

    /// The demoted pins whose prefix ends with a block of this hash and is a prefix of `positions`
    /// in `namespace`, with the number of its blocks.
    pub(crate) fn demoted_at(
        &self,
        hash: u64,
        namespace: &Namespace,
        positions: &[u32],
    ) -> Vec<(PinId, usize)> {
        let ids = self.demoted.get(&hash).into_iter().flatten();
        let is_prefix = |pin: &&Pin| match &pin.state {
            PinState::Demoted { positions: own, .. } => {
                pin.info.namespace == *namespace && positions.starts_with(own)
            }
            PinState::Cached(_) => false,
        };
        let pins = ids.filter_map(|id| self.pins.get(id)).filter(is_prefix);
        pins.map(|pin| (pin.info.id, pin.info.block_count)).collect()
    }

    /// The prefix of a demoted pin is cached again and ends in `end`.
    pub(crate) fn renew(&mut self, id: PinId, end: NodeId) {
        let Some(pin) = self.pins.get_mut(&id) else { return };
        pin.info.demoted = false;
        let before = std::mem::replace(&mut pin.state, PinState::Cached(end));
        if let PinState::Demoted { hash, .. } = before {
            self.forget_demoted(hash, id);
        }
    }

    fn forget_demoted(&mut self, hash: u64, id: PinId) {
        if let Some(ids) = self.demoted.get_mut(&hash) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.demoted.remove(&hash);
            }
        }
    }

    /// When a pinned prefix was last used, with `node_use` as the last use of a node.
    pub(crate) fn last_use(&self, id: PinId, node_use: impl Fn(NodeId) -> u64) -> Option<u64> {
        match self.pins.get(&id)?.state {
            PinState::Cached(end) => Some(node_use(end)),
            PinState::Demoted { last_use, .. } => Some(last_use),
        }
    }

    /// The nodes in which the prefixes of pins end that can be demoted and are not.
    pub(crate) fn ends(&self) -> impl Iterator<Item = NodeId> {
        let demotable = self.pins.values().filter(|pin| self.demotable || pin.info.is_mark);
        demotable.filter_map(|pin| match pin.state {
            PinState::Cached(end) => Some(end),
            PinState::Demoted { .. } => None,
        })
    }

    /// Number of pins that are no marks.
    pub(crate) fn count(&self) -> usize {
        self.pins.values().filter(|pin| !pin.info.is_mark).count()
    }

    pub(crate) fn infos(&self) -> impl Iterator<Item = &PinInfo> {
        self.pins.values().map(|pin| &pin.info)
    }
}
