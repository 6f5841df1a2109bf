//! A lock-free radix tree over KV blocks: one writer, any number of readers.

mod atom;
mod block;
mod core;
mod error;
mod hash;
mod lease;
mod namespace;
mod node;
mod policy;
mod pool;
mod reader;
pub mod reclaim;
mod sync;
mod tree;
mod writer;

pub use block::BlockId;
pub use error::{AuditError, ConfigError, Shortage};
pub use lease::{Commit, PrefixLease};
pub use namespace::{Namespace, NamespaceBuilder};
pub use policy::{EvictionPolicy, LeafInfo, Policy, Rank};
pub use pool::{BlockLease, BlockPool, PoolCounts, StepFence, StepTicket};
pub use reader::TreeReader;
#[cfg(loom)]
#[doc(hidden)]
pub use sync::planted;
pub use tree::{TreeBuilder, prefix_tree};
pub use writer::{TreeCounts, TreeWriter};
