//! A lock-free radix tree over KV blocks: one writer, any number of readers.

mod atom;
mod block;
mod core;
mod dump;
mod error;
mod events;
mod hash;
mod lease;
mod namespace;
mod node;
mod pin;
mod policy;
mod pool;
mod reader;
pub mod reclaim;
mod stats;
mod sync;
mod tree;
mod writer;

pub use atom::{Atom, AtomError, AtomInterner};
pub use block::BlockId;
pub use dump::{NodeDump, TreeDump};
pub use error::{AuditError, ConfigError, Shortage};
pub use events::{Event, EventReceiver, Numbered};
pub use lease::{Commit, PrefixLease};
pub use namespace::{Namespace, NamespaceBuilder};
pub use pin::{PinError, PinId, PinInfo};
pub use policy::{EvictionPolicy, LeafInfo, Policy, Rank};
pub use pool::{BlockLease, BlockPool, PoolCounts, StepFence, StepTicket};
pub use reader::TreeReader;
pub use stats::TreeStats;
#[cfg(loom)]
#[doc(hidden)]
pub use sync::planted;
pub use tree::{TreeBuilder, prefix_tree};
pub use writer::{Snapshot, TreeCounts, TreeWriter};
