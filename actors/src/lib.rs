//! The actors of the Stolon engine, their supervisor, and the handle that callers hold.
//!
//! ```text
//!  caller's task           AdmissionActor       PrefixTreeActor   BlockAllocatorActor   ExecutorActor + thread
//!  EngineHandle::submit ─► queue, policy,  ───► acquire, commit
//!  (validation, permit)    room, step plan ────────────────────► reserve (evicts) ─┐
//!                                               evict, remove ◄────────────────────┘
//!                                          ───────────────────────────────────────────► a step
//!  SequenceStream ◄──────── events         ◄─────────────────────────────────────────── its results
//! ```
//!
//! Calls that wait for an answer go one way only (admission to tree, admission to allocator,
//! allocator to tree); everything else is a cast, so no cycle can deadlock. Token ids go in and
//! token ids come out: text is handled by the facade.
//!
//! The actors only receive, call the functions of [`stolon_scheduler`] and send.
#![forbid(unsafe_code)]

mod admission;
mod block_allocator;
mod cache;
mod executor;
mod fault;
mod handle;
mod memory;
mod prefix_tree;
mod stored;
mod stream;
mod supervisor;

pub use cache::{CacheEvents, Pin, PinOptions};
pub use fault::EnginePart;
#[cfg(feature = "testing")]
pub use fault::Fault;
pub use handle::EngineHandle;
pub use stream::SequenceStream;
