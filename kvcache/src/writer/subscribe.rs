//! Events for those who keep a copy of the index.

use super::TreeWriter;
use crate::core::Core;
use crate::events::EventReceiver;
use crate::node::NodeId;
use crate::{CacheEvent, ConfigError, Namespace};

/// The index as a list of events that would build it.
#[derive(Clone, Debug)]
pub struct CacheSnapshot {
    /// The number of the last event that the snapshot includes.
    pub number: u64,
    /// `Stored` events, parents before children.
    pub events: Vec<CacheEvent>,
}

impl TreeWriter {
    /// Subscribes to all events from now on, with a queue of `capacity` events. Take a
    /// [`snapshot`](TreeWriter::snapshot) right after it for what is there already.
    ///
    /// # Errors
    ///
    /// When `capacity` is 0.
    pub fn subscribe(&mut self, capacity: usize) -> Result<EventReceiver, ConfigError> {
        if capacity == 0 {
            return Err(ConfigError::EventCapacity { got: 0 });
        }
        Ok(self.events.subscribe(capacity))
    }

    /// The index as it is now: to start a copy from, also after a reset. Events numbered above
    /// [`CacheSnapshot::number`] come after it.
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
                events.push(CacheEvent::Stored {
                    namespace: namespace.clone(),
                    parent,
                    hashes: edge.hashes().to_vec(),
                    positions: edge.positions().to_vec(),
                });
            }
        }
        CacheSnapshot { number: self.events.last(), events }
    }
}
