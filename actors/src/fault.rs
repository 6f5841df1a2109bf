//! Fault injection for tests: makes one part of the engine fail, so that a test can check that the
//! rest survives. Without the feature `testing`, nothing can be injected.

#[cfg(feature = "testing")]
mod plan;
#[cfg(not(feature = "testing"))]
#[path = "fault/absent.rs"]
mod plan;

#[cfg(feature = "testing")]
pub use plan::Fault;
pub(crate) use plan::FaultPlan;

/// A part of the engine that can fail by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnginePart {
    /// The admission actor.
    Admission,
    /// The prefix tree's actor.
    PrefixTree,
    /// The block allocator's actor.
    BlockAllocator,
    /// The actor in front of the executor's thread.
    Executor,
    /// The executor's thread, outside the backend.
    ExecutorThread,
}

impl EnginePart {
    /// All parts.
    pub const ALL: [Self; 5] = [
        Self::Admission,
        Self::PrefixTree,
        Self::BlockAllocator,
        Self::Executor,
        Self::ExecutorThread,
    ];
}
