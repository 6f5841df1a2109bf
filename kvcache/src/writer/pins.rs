//! Pins and priorities.

use super::TreeWriter;
use crate::node::NodeId;
use crate::{Namespace, PinError, PinId, PinInfo, token_span};

impl TreeWriter {
    /// Keeps the longest cached prefix of `positions` from being evicted until
    /// [`unpin`](TreeWriter::unpin). A [`flush`](TreeWriter::flush) ends all pins, and
    /// [`evict_namespace`](TreeWriter::evict_namespace) those of its namespace. What is committed
    /// later is not pinned.
    ///
    /// # Errors
    ///
    /// If not even one block is cached, or if the pin budget would be exceeded. Nothing is pinned
    /// then.
    pub fn pin(&mut self, namespace: &Namespace, positions: &[u32]) -> Result<PinId, PinError> {
        self.begin_operation();
        let block_size = self.block_size();
        let raw = self.find(namespace, positions);
        let length = token_span::whole_spans(positions, raw, block_size);
        let block_count = length / block_size;
        self.pins.check(block_count)?;
        let end = self.end_path_at(block_count);
        self.lock_up(end, NodeId::NONE);
        let info =
            PinInfo { id: PinId(0), namespace: *namespace, position_count: length, block_count };
        Ok(self.pins.insert(info, end))
    }

    /// Ends a pin. Returns whether it existed.
    pub fn unpin(&mut self, id: PinId) -> bool {
        self.begin_operation();
        self.end_pin(id)
    }

    /// Returns all pins, oldest first.
    pub fn pins(&mut self) -> Vec<PinInfo> {
        self.drain();
        self.pins.infos().cloned().collect()
    }

    /// Number of pins.
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
        self.pins.end(id).map(|end| self.records[end.index()].last_use)
    }

    pub(super) fn end_pin(&mut self, id: PinId) -> bool {
        let end = self.pins.remove(id);
        if let Some(end) = end {
            self.unlock_up(end);
        }
        end.is_some()
    }
}
