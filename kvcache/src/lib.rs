//! A lock-free radix tree over KV blocks: one writer, any number of readers.
//!
//! [`prefix_tree`] makes a [`TreeWriter`] and a [`TreeReader`]. The reader is cloned freely and
//! answers [`query_match_len`](TreeReader::query_match_len) on any thread, without a lock and
//! without a side effect. The writer locks what it has matched ([`TreeWriter::acquire`]), publishes
//! finished blocks ([`TreeWriter::commit`]) and gives blocks back ([`TreeWriter::evict`]).
//! [`BlockPool`] and [`StepFence`] keep the blocks outside the tree.
//!
//! # Example
//!
//! ```
//! use stolon_kvcache::{BlockId, Namespace, prefix_tree};
//!
//! let (mut writer, reader) = prefix_tree(2)?;
//! let base = Namespace::default();
//! let mut lease = writer.acquire(&base, &[1, 2, 3, 4, 5]);
//! writer.commit(&mut lease, &[1, 2, 3, 4, 5], &[BlockId(0), BlockId(1)]);
//! assert_eq!(reader.query_match_len(&base, &[1, 2, 3, 9]), 2);
//! drop(lease);
//! assert_eq!(writer.evict(1), [BlockId(1)]);
//! # Ok::<(), stolon_kvcache::ConfigError>(())
//! ```
//!
//! # What readers see
//!
//! A node is an immutable run of whole blocks (positions, block ids, chained hashes) and one
//! atomic pointer to its table of children. Everything else, locks, recency, parents, the order of
//! eviction, is the writer's own and in plain arrays. Each change is published by **one store**
//! into a slot of a table, or into a node's table pointer:
//!
//! - *insert*: a finished leaf, or a finished front with rear and new leaf below it when a run has
//!   to be split. The rear takes over the children's table;
//! - *evict*: the slot of a leaf is cleared, or gets the leaf's shorter self;
//! - *merge*: the slot of a chain's first node gets the chain as one node;
//! - *prune*, *flush*: the slot of a namespace is cleared; a root's table pointer is.
//!
//! A node that such a store has unlinked is *retired*: neither its run nor its table pointer
//! changes again. The reclaimer frees it after every guard that was alive then.
//!
//! # Memory order
//!
//! | atomic | stored | loaded | what the pair carries |
//! |---|---|---|---|
//! | slot, child pointer | Release, by the writer | Acquire, by readers | the child, its run and its table pointer are complete |
//! | slot, key | Release, before the child pointer of that key | Acquire, before the child pointer | who sees the key sees the slot's earlier child gone; a wrong pair only costs a comparison, since runs are compared by position |
//! | node, table pointer | Release | Acquire | the table is complete, its slots as they were copied |
//! | version | `fetch_add` Release, after the change's store | Acquire | who reads version `n` sees the first `n` changes |
//! | pending returns | Release, under the queue's lock | Acquire, without it | a hint to take the lock; the lock carries the data |
//! | shown counters | Relaxed | Relaxed | nothing: numbers for dumps |
//!
//! No store needs more than Release: a reader follows pointers from a root, and each load's
//! Acquire pairs with the store of just that pointer. Two stores to different places need no common
//! order for readers, by the argument below. What must not happen is that a reader that pins
//! *after* a node was freed still loads a pointer to it: this is the reclaimer's part
//! (crossbeam-epoch's pin and its advance of the epoch are sequentially consistent fences).
//! The step fence and the block queues are mutexes; no reader meets them.
//!
//! # Why a query is linearizable
//!
//! *Each node that a query visits was live at some instant within the query.* The roots always are.
//! Let the query be at a node P that was live at instant t, and load a child C from P's table at u.
//! If the table belongs to a live node at u (P itself, or the rear of a split of P, whose path ends
//! where P's did), C is live at u. Otherwise the table stopped changing when its last live owner
//! was retired, after t, and C was live just before that.
//!
//! *The answer was exact at such an instant.* If the query ends inside a run, or has used up its
//! positions, the answer depends on that node's run alone and is exact whenever the node is live.
//! If it ends at the end of node L because no child fits: when L's table belonged to a live node at
//! that moment, the answer is exact then; otherwise it is exact just before the store that retired
//! the table's last live owner, which came after the query had found L live. In a wide table the
//! probe reads several slots; children do not move within a table, so a child that the probe
//! missed was absent at some instant of the probe.
//!
//! These instants lie between the query's start and its end. Since a query is a single path, what
//! changes elsewhere meanwhile does not matter to it. `tests/linearizable.rs` checks the claim on
//! real threads, `loom_tests` every interleaving of small cases.
//!
//! # Costs
//!
//! A query compares the positions it matches (a `memcmp`), hashes one block a node, and pins an
//! epoch. A commit or an eviction copies the run that it cuts; a sequence that grows block by block
//! is copied O(log n) times. An eviction finds its victim in O(log n) of the evictable leaves.

#[cfg(all(loom, not(feature = "loom")))]
compile_error!("`--cfg loom` needs the feature `loom` of stolon-kvcache");

mod atom;
mod block;
mod core;
mod dump;
mod error;
mod events;
mod eviction;
mod hash;
mod lease;
mod namespace;
mod node;
mod pin;
mod pool;
mod reader;
mod reclaim;
mod stats;
mod sync;
mod tree;
mod writer;

pub use atom::{Atom, AtomError, AtomInterner};
pub use block::BlockId;
pub use dump::{NodeDump, TreeDump};
pub use error::{AuditError, ConfigError, Shortage};
pub use events::{CacheEvent, EventReceiver, NumberedEvent};
pub use eviction::{
    EvictionCandidate, EvictionOrder, EvictionPolicy, EvictionRank, UnknownEvictionPolicy,
};
pub use lease::{Commit, PrefixLease};
pub use namespace::{Namespace, NamespaceBuilder};
pub use pin::{PinError, PinId, PinInfo};
pub use pool::{BlockLease, BlockPool, PoolCounts, StepFence, StepTicket};
pub use reader::TreeReader;
pub use stats::TreeStats;
#[cfg(loom)]
#[doc(hidden)]
pub use sync::planted;
pub use tree::{TreeBuilder, prefix_tree};
pub use writer::{CacheSnapshot, TreeCounts, TreeWriter};

/// The examples of the crate's README, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
