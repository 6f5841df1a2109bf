//! The core of the Stolon engine: four actors, a supervisor, and the decisions they make.
//!
//! ```text
//!  caller's task        AdmissionActor        PrefixTreeActor   BlockAllocatorActor   ExecutorActor + thread
//!  CoreHandle::submit ─► queue, policy,  ───► acquire, commit
//!  (checks, the door)    budget, plan    ─────────────────────► reserve (evicts) ─┐
//!                                             evict, counts ◄─────────────────────┘
//!                                        ──────────────────────────────────────────► a step
//!  SequenceStream ◄───── events          ◄────────────────────────────────────────── its results
//! ```
//!
//! Calls that wait for an answer go one way only (admission to tree, admission to allocator,
//! allocator to tree); all else is a cast, so no cycle can deadlock. Token ids in, token ids
//! out: text is the facade's business.
//!
//! The actors are shells. What they decide is in plain functions on plain data beside them, and
//! [`CoreHandle`] is all that callers see.

mod admission;
mod block_allocator;
mod config;
mod door;
mod error;
mod executor;
mod fault;
mod gauges;
mod handle;
mod kept_rows;
mod memory;
mod prefix_tree;
mod request;
mod simulation;
mod stream;
mod supervisor;
mod surroundings;

pub use config::{AdmissionPolicy, CoreConfig, UnknownPolicy};
pub use error::{CoreError, LengthBound};
pub use fault::{Fault, Part};
pub use gauges::CoreStats;
pub use handle::CoreHandle;
pub use memory::CoreAudit;
pub use prefix_tree::{CacheEvents, CacheReport, CorePin};
pub use request::{SequenceEnd, SequenceEvent, SequenceFinish, SequenceRequest};
pub use simulation::{Simulation, Told};
pub use stream::SequenceStream;
