//! Pins, marks and priorities.

use super::TreeWriter;
use crate::node::NodeId;
use crate::{Namespace, PinError, PinId, PinInfo, token_span};

impl TreeWriter {
    /// Keeps the longest cached prefix of `positions` from being evicted until
    /// [`unpin`](TreeWriter::unpin). A [`flush`](TreeWriter::flush) ends all pins, and
    /// [`evict_namespace`](TreeWriter::evict_namespace) those of its namespace. What is committed
    /// later is not pinned.
    ///
    /// In a tree with checkpoints, the last one of the prefix is pinned with it.
    ///
    /// If pins are [demotable](crate::TreeBuilder::demotable_pins), the prefix is not kept from
    /// being evicted, but evicted after all that is not pinned.
    ///
    /// # Errors
    ///
    /// If not even one block is cached, or if the pin budget would be exceeded. After an error
    /// nothing is pinned.
    pub fn pin(&mut self, namespace: &Namespace, positions: &[u32]) -> Result<PinId, PinError> {
        let checkpoint = match self.pins.demotable || self.checkpoint_blocks() == 0 {
            true => None,
            false => self.lock_checkpoint_of_prefix(namespace, positions),
        };
        self.begin_operation();
        let block_size = self.block_size();
        let raw = self.find(namespace, positions);
        let length = token_span::whole_spans(positions, raw, block_size);
        let of_checkpoint = checkpoint.as_ref().map_or(0, |lease| lease.blocks().len());
        let block_count = match length / block_size {
            0 => 0,
            count => count + of_checkpoint,
        };
        self.pins.check(block_count)?;
        let end = self.end_path_at(length / block_size);
        match self.pins.demotable {
            true => self.count_pins(end, |pins| pins + 1),
            false => self.lock_up(end, NodeId::NONE),
        }
        let info = PinInfo {
            id: PinId(0),
            namespace: *namespace,
            position_count: length,
            block_count,
            demoted: false,
            is_mark: false,
        };
        Ok(self.pins.insert(info, end, checkpoint))
    }

    /// Lets the longest cached prefix of `positions`, and of it at most `block_count_max` blocks, be
    /// evicted after everything that is neither marked nor pinned, until
    /// [`unpin`](TreeWriter::unpin) or whatever else ends pins. Nothing is locked: what is marked
    /// is evicted when nothing else can be, and protected again as soon as it is committed again.
    /// `positions` may end with those of a [checkpoint](crate::checkpoint_positions).
    ///
    /// Marks do not count for the pin budget. Returns `None` if not even one block is cached or
    /// allowed.
    pub fn mark(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        block_count_max: usize,
    ) -> Option<PinId> {
        self.begin_operation();
        let block_size = self.block_size();
        let allowed = positions.len().min(block_count_max.saturating_mul(block_size));
        let raw = self.find(namespace, &positions[..allowed]);
        let position_count = token_span::whole_spans(positions, raw, block_size);
        let block_count = position_count / block_size;
        if block_count == 0 {
            return None;
        }
        let end = self.end_path_at(block_count);
        self.count_pins(end, |pins| pins + 1);
        let info = PinInfo {
            id: PinId(0),
            namespace: *namespace,
            position_count,
            block_count,
            demoted: false,
            is_mark: true,
        };
        Some(self.pins.insert(info, end, None))
    }

    /// Ends a pin or a mark. Returns whether it existed.
    pub fn unpin(&mut self, id: PinId) -> bool {
        self.begin_operation();
        let existed = self.end_pin(id);
        self.enforce_quotas();
        existed
    }

    /// Returns all pins and marks, oldest first.
    pub fn pins(&mut self) -> Vec<PinInfo> {
        self.drain();
        self.pins.infos().cloned().collect()
    }

    /// Number of pins, without marks.
    pub fn pin_count(&self) -> usize {
        self.pins.count()
    }

    /// Sets the priority of the cached prefix of `positions`. Under
    /// [`EvictionPolicy::Priority`](crate::EvictionPolicy::Priority), and for custom orders that
    /// use it, a higher priority keeps blocks cached longer. It applies to whole nodes, so blocks
    /// after the prefix may get it too. Returns the length of the prefix in positions.
    pub fn set_priority(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        priority: i32,
    ) -> usize {
        self.begin_operation();
        let raw = self.find(namespace, positions);
        for (id, _) in self.path.clone() {
            self.records[id.index()].priority = priority;
            self.refresh(id);
        }
        token_span::whole_spans(positions, raw, self.block_size())
    }

    /// When a pinned prefix was last used by an acquire or a commit, in ticks. `None` if there is
    /// no such pin.
    pub fn pin_last_use(&self, id: PinId) -> Option<u64> {
        self.pins.last_use(id, |end| self.records[end.index()].last_use)
    }

    pub(super) fn end_pin(&mut self, id: PinId) -> bool {
        let Some((end, demotable)) = self.pins.remove(id) else { return false };
        if demotable {
            self.count_pins(end, |pins| pins - 1);
            self.merge_around(end);
        } else {
            self.unlock_up(end);
        }
        true
    }

    /// Demotes the pins that end in a leaf, because blocks of it are evicted. The leaf keeps its
    /// place in the order of eviction until then.
    pub(super) fn demote_pins(&mut self, leaf: NodeId) {
        let positions = self.evicted_prefix(leaf, 0).positions;
        let hash = self.arena.edge(leaf).last_hash();
        let last_use = self.records[leaf.index()].last_use;
        let demoted = self.pins.demote(leaf, &positions, hash, last_use);
        self.stats.pins_demoted += u64::from(demoted);
        self.change_pins(leaf, |pins| pins - demoted);
    }

    /// Protects demoted pins again whose prefixes end with one of the last `fresh` blocks of the
    /// node `end`, in which `positions` end and which were committed just now.
    pub(super) fn renew_pins(
        &mut self,
        namespace: &Namespace,
        positions: &[u32],
        end: NodeId,
        fresh: usize,
    ) {
        if fresh == 0 || !self.pins.has_demoted() {
            return;
        }
        let hashes = self.arena.edge(end).hashes();
        let hashes = hashes[hashes.len() - fresh..].iter();
        let renewed: Vec<_> =
            hashes.flat_map(|&hash| self.pins.demoted_at(hash, namespace, positions)).collect();
        for (id, block_count) in renewed {
            self.find(namespace, &positions[..block_count * self.block_size()]);
            let end = self.end_path_at(block_count);
            self.count_pins(end, |pins| pins + 1);
            self.pins.renew(id, end);
        }
    }

    /// Changes the number of demotable pins of the nodes from `end` up, and the rank of `end`.
    fn count_pins(&mut self, end: NodeId, change: impl Fn(u32) -> u32) {
        self.change_pins(end, change);
        if !end.is_none() {
            self.refresh(end);
        }
    }

    fn change_pins(&mut self, end: NodeId, change: impl Fn(u32) -> u32) {
        let mut id = end;
        while !id.is_none() && !self.arena.is_root(id) {
            let record = &mut self.records[id.index()];
            record.pins = change(record.pins);
            id = self.arena.parent(id);
        }
    }
}
