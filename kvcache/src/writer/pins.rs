//! Pinning, priorities and time.

use super::TreeWriter;
use crate::node::NodeId;
use crate::{Namespace, PinError, PinId, PinInfo, token_span};

impl TreeWriter {
    /// Keeps what is cached of `positions` from being evicted, for `ttl` ticks (operations of
    /// this writer) or until [`unpin`](TreeWriter::unpin). A flush ends all pins.
    ///
    /// # Errors
    ///
    /// When nothing of it is cached or the pins' budget would be exceeded; nothing is pinned then.
    pub fn pin(&mut self, namespace: &Namespace, positions: &[u32]) -> Result<PinId, PinError> {
        self.begin_operation();
        let block_size = self.block_size();
        let raw = self.find(namespace, positions);
        let length = token_span::whole_spans(positions, raw, block_size);
        let block_count = length / block_size;
        self.pins.check(block_count)?;
        let end = self.end_path_at(block_count);
        self.lock_up(end, NodeId::NONE);
        let info = PinInfo {
            id: PinId(0),
            namespace: namespace.clone(),
            position_count: length,
            block_count,
        };
        Ok(self.pins.insert(info, end))
    }

    /// Ends a pin. Returns whether there was one of this name.
    pub fn unpin(&mut self, id: PinId) -> bool {
        self.begin_operation();
        self.end_pin(id)
    }

    /// All pins, oldest first.
    pub fn pins(&mut self) -> Vec<PinInfo> {
        self.drain();
        self.pins.infos().cloned().collect()
    }

    /// Gives all nodes on the way through the cached part of `positions` a priority: higher stays
    /// longer under [`EvictionPolicy::Priority`](crate::EvictionPolicy::Priority) and policies of the caller's
    /// own. Returns the positions covered.
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

    pub(super) fn end_pin(&mut self, id: PinId) -> bool {
        let end = self.pins.remove(id);
        if let Some(end) = end {
            self.unlock_up(end);
        }
        end.is_some()
    }
}
