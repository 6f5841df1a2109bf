//! The decisions of the Stolon engine: which request runs next, what each step computes, whose
//! blocks are released when there are too few.
//!
//! Nothing here depends on an async runtime or an actor library, so every decision is a plain
//! function of plain data and runs the same way in the engine, in a simulation with virtual time
//! and in tests. `stolon-actors` puts actors around it.
//!
//! * [`EngineContext`] validates a request and takes a queue permit for it, in the caller's
//!   task;
//! * [`Scheduler`] holds the admission queue, the running sequences and the step in flight. It
//!   reaches the prefix tree and the block pool through the trait [`Memory`] and returns
//!   [`StepPlan`]s to be executed;
//! * [`BlockAllocator`] reserves blocks and decides when cached ones are evicted;
//! * [`event_channel`] carries a request's events to its caller and pauses the sequence of a caller
//!   that does not read;
//! * [`Simulation`] runs the scheduler in virtual time.
//!
//! Errors, events and statistics that a user of the engine sees are defined here, once, and
//! re-exported by the facade crate `stolon`.
#![forbid(unsafe_code)]

mod budget;
mod cached_logits;
mod config;
mod context;
mod error;
mod event;
mod event_channel;
mod execute;
mod gauges;
mod health;
mod histogram;
mod images;
mod late_sampling;
mod lookup;
mod marks;
mod memory;
mod pending;
mod permits;
mod pin_budget;
mod policy;
mod preempt;
mod priority;
mod queue;
mod quota;
mod request;
mod request_counts;
mod schedule;
mod scheduler;
mod sequence;
mod session;
mod sharing;
mod simulation;
mod speculation;
mod states;
mod stats;
mod step_cost;
mod step_plan;
mod sync;
mod tenant;
mod token_set;
mod transfer;
mod verify;
mod wait;

#[cfg(test)]
mod tests;

pub use cached_logits::PromptLogits;
pub use config::{AdmissionPolicy, EngineConfig, EvictionOrderFactory, UnknownPolicy};
pub use context::{EmptyCache, EngineContext, PromptLimit};
pub use error::{EngineError, LengthBound};
pub use event::{Event, Finish, FinishReason, Timings, TokenEvent, Usage};
pub use event_channel::{EventReceiver, EventSender, RESERVED_EVENTS, Received, event_channel};
pub use execute::execute;
pub use gauges::{EvictionCounts, Gauges};
pub use health::EngineHealth;
pub use histogram::{EngineHistograms, HistogramData};
pub use images::PromptImage;
pub use late_sampling::LateRow;
pub use marks::{HeldMark, MarkRoom, PrefixMark};
pub use memory::{
    Acquired, ActorStopped, BlockAllocator, BlockCounts, CommitItem, Committed, DirectMemory,
    Evicted, EvictionDemand, LogitsKey, Memory, Removal, Reserved, TreeAccess, acquire, commit,
    commit_checkpoint, evict, remove,
};
#[cfg(loom)]
pub use permits::ModelQueue;
pub use permits::QueuePermit;
pub use pin_budget::{PinBudget, Pinned};
pub use priority::yield_to_computing;
pub use quota::Quota;
pub use request::{RequestOptions, SequenceRequest};
pub use scheduler::Scheduler;
pub use sequence::Sequence;
pub use session::{
    NewSession, SavedSession, SessionContent, SessionError, SessionHold, SessionId, SessionInfo,
    SessionPrefix, Sessions, Turn, TurnEnd,
};
pub use simulation::{Simulation, SimulationEvent};
pub use speculation::{DraftContext, DraftSource, DraftSources, Speculation};
pub use states::CheckpointItem;
pub use stats::{AuditReport, CacheStats, EngineStats};
pub use step_plan::{
    DraftDone, DraftPlan, DraftSlice, EncodeTask, PromptTargets, RowResult, RowTask, StepDone,
    StepPlan,
};
#[cfg(loom)]
pub use sync::planted;
pub use token_set::TokenSet;
pub use transfer::{
    EvictedCopy, KvSink, KvSource, LoadTask, PendingKv, Prefetch, PromptLookup, RepeatedLookup,
    SaveRequest, StoredKv, StoredPin,
};

/// Number of blocks that hold `positions` positions.
pub(crate) fn blocks_for(block_size: usize, positions: usize) -> usize {
    positions.div_ceil(block_size)
}
