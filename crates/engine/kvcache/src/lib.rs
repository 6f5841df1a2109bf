//! A prefix cache for LLM inference engines: a radix tree over KV blocks with one writer and any
//! number of lock-free readers.
//!
//! An engine with paged attention stores the KV of a sequence in blocks of a fixed number of
//! positions. This crate remembers which blocks hold which prompt prefix, so that a prefix shared
//! by several requests is computed once. It manages block ids; the engine owns the memory.
//!
//! [`PrefixCache`] is the whole cache: [`begin`](PrefixCache::begin) locks the cached prefix of a
//! prompt and reserves blocks for the rest, [`commit`](PrefixCache::commit) publishes the blocks
//! that have been computed, and [`make_room`](PrefixCache::make_room) evicts. Its
//! [readers](PrefixCache::reader) answer on any thread how much of a prompt is cached
//! ([`query_match_len`](TreeReader::query_match_len)), without a lock and without a side effect.
//!
//! Its two parts can also be used by themselves, by an engine that keeps them on different threads:
//!
//! - the index, created by [`prefix_tree`] or [`TreeBuilder`]: a [`TreeReader`] and a
//!   [`TreeWriter`], which locks prefixes ([`acquire`](TreeWriter::acquire)), adds finished blocks
//!   ([`commit_from`](TreeWriter::commit_from)), and evicts ([`evict`](TreeWriter::evict));
//! - [`BlockPool`], which tracks the blocks outside the tree: free ones, and those that a running
//!   request has reserved. [`StepFence`] keeps a freed block from being reused while a kernel may
//!   still access it.
//!
//! # Terms
//!
//! - A **position** is one entry of a sequence and of its KV. It is written as a `u32`: a token id
//!   below 2^31, or one position of an atomic token span.
//! - A **block** holds the KV of `block_size` consecutive positions. Only whole blocks are cached.
//! - An **atomic token span** ([`TokenSpan`]) is a part of a prompt that is not text, an image for
//!   example. No match ends inside one.
//! - A **checkpoint** ([`TreeWriter::commit_checkpoint`]) is a copy of the recurrent state of a
//!   sequence in blocks, for models that have one. Requests for such a model can use cached
//!   positions only up to a checkpoint ([`TreeReader::query_resume`]).
//! - A **namespace** ([`Namespace`]) is a separate part of the index, for example per adapter or
//!   tenant.
//! - A **lease** owns something until it is dropped: [`PrefixLease`] a lock on a cached prefix,
//!   [`BlockLease`] private blocks. [`SequenceBlocks`] holds one of each.
//! - A **tick** is one operation of the writer. Recency is measured in ticks.
//!
//! # Example
//!
//! ```
//! use stolon_kvcache::{Namespace, PrefixCache};
//!
//! let mut cache = PrefixCache::new(2, 8)?; // 8 blocks of 2 positions
//! let base = Namespace::default();
//! let prompt = [1, 2, 3, 4, 5];
//!
//! let mut sequence = cache.begin(&base, &prompt)?; // nothing is cached yet
//! // Compute the KV of the prompt into `sequence.table()`, then publish the two full blocks.
//! assert_eq!(cache.commit(&mut sequence, 5)?, 2);
//! assert_eq!(cache.reader().query_match_len(&base, &[1, 2, 3, 9]), 2);
//!
//! drop(sequence);
//! cache.make_room(7);
//! assert_eq!(cache.pool_counts().free, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a process shares
//!
//! Trees are independent of each other, with two exceptions: their queries pin in one collector of
//! crossbeam-epoch, so that a query of one tree can delay the freeing of another tree's retired
//! nodes; and namespaces that are built without a key use one random key of the process
//! ([`NamespaceBuilder::key`]). The collector is not crossbeam-epoch's default one, so nothing that
//! other crates do with that is ever freed in a query.
//!
//! # How the tree is published
//!
//! A node consists of an immutable run of whole blocks (positions, block ids, chained hashes) and
//! one atomic pointer to its table of children. Everything else (locks, recency, parents, the
//! order of eviction) belongs to the writer alone and is stored in plain arrays. Each change is
//! published by **one store** into a slot of a table, or into a node's table pointer:
//!
//! - *insert*: a finished leaf; or, if a run has to be split, a finished front node with the rear
//!   and the new leaf below it. The rear takes over the table of children;
//! - *evict*: the slot of a leaf is cleared, or gets a shorter copy of the leaf;
//! - *merge*: the slot of the first node of a chain gets the whole chain as one node;
//! - *prune*, *flush*: the slot of a namespace is cleared; the table pointer of a root is cleared.
//!
//! A node that such a store has unlinked is *retired*: neither its run nor its table pointer
//! changes again. The writer frees it after every guard that existed at that time is dropped.
//!
//! # Memory ordering
//!
//! | atomic | stored | loaded | what the pair guarantees |
//! |---|---|---|---|
//! | slot, child pointer | Release, by the writer | Acquire, by readers | the child, its run and its table pointer are complete |
//! | slot, key | Release, before the child pointer of that key | Acquire, before the child pointer | a reader that sees the key sees that the slot's earlier child is gone; a wrong pair only costs a comparison, since runs are compared by position |
//! | node, table pointer | Release | Acquire | the table is complete, with its slots as they were copied |
//! | version | `fetch_add` Release, after the store that makes the change | Acquire | a reader of version `n` sees the first `n` changes |
//! | number of the expired batch | Release, by the thread that finds that all guards a batch of retired nodes had to wait for are gone | Acquire, by the writer, before it frees the batch | the readers' accesses come before the freeing |
//! | count of pending returns | Release, under the queue's lock | Acquire, without it | a hint to take the lock; the lock carries the data |
//! | counters shown in dumps | Relaxed | Relaxed | nothing |
//!
//! No store needs more than Release: a reader follows pointers from a root, and the Acquire of each
//! load pairs with the store of exactly that pointer. Readers need no common order of stores to
//! different places, by the argument below. What must not happen is that a reader that pins *after*
//! a node was freed still loads a pointer to it. This is guaranteed by crossbeam-epoch, in which
//! pinning and advancing the epoch are sequentially consistent fences.
//! The step fence and the queues of returned blocks are mutexes. Readers never take them.
//!
//! # Why a query is linearizable
//!
//! *Each node that a query visits was live at some instant during the query.* The roots always are.
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
//! These instants lie between the query's start and its end. Since a query is a single path, a
//! concurrent change elsewhere in the tree does not affect it. `tests/linearizable.rs` checks the
//! claim on real threads, and `loom_tests` checks every interleaving of small cases.
//!
//! # Costs
//!
//! A query compares the positions that it matches (a `memcmp`), hashes one block per node, and pins
//! an epoch. It neither allocates nor frees what the writer has retired: that is done by the writer,
//! in batches, during its own operations ([`TreeWriter::retired_count`]). At every 128th pin of a
//! thread, crossbeam-epoch looks for grace periods that have ended, in time proportional to the
//! number of threads that query. The query that finds the end of one stores one number for the
//! writer, and may free entries of crossbeam-epoch's queue: usually one and at most 64, of 2 KiB.
//! There is one for each batch of at least 256 retired nodes and one for each thread that has ended.
//! The first query of a thread allocates the thread's record.
//!
//! A commit or an eviction copies the run that it cuts; a sequence that grows block by
//! block is copied O(log n) times. An eviction finds its victim in O(log n) of the evictable
//! leaves.

#[cfg(all(loom, not(feature = "loom")))]
compile_error!("`--cfg loom` needs the feature `loom` of stolon-kvcache");

mod block;
mod cache;
mod checkpoint;
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
mod token_span;
mod tree;
mod writer;

pub use block::{BlockId, EvictedBlock, EvictedBlocks, EvictedPrefix};
pub use cache::{PrefixCache, SequenceBlocks};
pub use checkpoint::{CheckpointLease, PrefixMatch, checkpoint_positions, len_before_checkpoint};
pub use dump::{CachedPrefix, NodeDump, TreeDump};
pub use error::{AuditError, CommitError, ConfigError, GrowError, Shortage};
pub use events::{CacheEvent, EventLog, EventReceiver, NumberedEvent};
pub use eviction::{
    EvictionCandidate, EvictionOrder, EvictionPolicy, EvictionRank, UnknownEvictionPolicy,
};
pub use hash::BlockHasher;
pub use lease::{Commit, PrefixLease};
pub use namespace::{Namespace, NamespaceBuilder};
pub use pin::{PinError, PinId, PinInfo};
pub use pool::{BlockLease, BlockPool, PoolCounts, StepFence, StepTicket};
pub use reader::TreeReader;
pub use stats::TreeStats;
#[cfg(loom)]
#[doc(hidden)]
pub use sync::planted;
pub use token_span::{ImageSpan, PositionRun, TokenSpan, TokenSpanError, TokenSpanInterner};
pub use tree::{TreeBuilder, prefix_tree};
pub use writer::{CacheSnapshot, TreeCounts, TreeWriter};

/// Compiles and runs the example in the crate's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
