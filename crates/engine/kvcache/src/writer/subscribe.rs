//! Subscriptions to events, and snapshots of the index.

use super::TreeWriter;
use crate::core::Core;
use crate::events::EventReceiver;
use crate::node::NodeId;
use crate::{CacheEvent, ConfigError, Namespace};

/// The content of the index, as a list of events that would build it. Returned by
/// [`TreeWriter::snapshot`].
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CacheSnapshot {
    /// The number of the last event that the snapshot includes.
    pub number: u64,
    /// Only [`CacheEvent::Stored`] events, parents before children.
    pub events: Vec<CacheEvent>,
}

impl TreeWriter {
    /// Subscribes to all events from now on, with a queue of `capacity` events. Call
    /// [`snapshot`](TreeWriter::snapshot) right after it to learn what is cached already.
    ///
    /// # Errors
    ///
    /// [`ConfigError::EventCapacity`] if `capacity` is 0.
    pub fn subscribe(&mut self, capacity: usize) -> Result<EventReceiver, ConfigError> {
        if capacity == 0 {
            return Err(ConfigError::EventCapacity { got: 0 });
        }
        Ok(self.events.subscribe(capacity))
    }

    /// Returns the current content of the index, from which a subscriber can start a copy, also
    /// after a [`CacheEvent::Reset`]. Later changes are the events with numbers above
    /// [`CacheSnapshot::number`].
    pub fn snapshot(&self) -> CacheSnapshot {
        let mut events = Vec::new();
        let base = (Core::BASE, Namespace::default());
        let directory = self.arena.children(Core::DIRECTORY);
        let named = directory.into_iter().map(|root| (root, self.arena.namespace_of(root)));
        for (root, namespace) in std::iter::once(base).chain(named) {
            let first = self.arena.children(root).into_iter().map(|child| (child, None));
            let mut pending: Vec<(NodeId, Option<u64>)> = first.collect();
            while let Some((id, parent)) = pending.pop() {
                let edge = self.arena.edge(id);
                let last = Some(edge.last_hash());
                pending.extend(self.arena.children(id).into_iter().map(|child| (child, last)));
                let hashes = edge.kv_hashes().to_vec();
                let positions = edge.positions()[..hashes.len() * self.block_size()].to_vec();
                if !hashes.is_empty() {
                    events.push(CacheEvent::Stored { namespace, parent, hashes, positions });
                }
            }
        }
        CacheSnapshot { number: self.events.last(), events }
    }
}
