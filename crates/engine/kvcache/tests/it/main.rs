//! The tests of the cache, in one program: each program that is linked takes seconds.

mod support {
    pub(crate) mod cache;
    pub(crate) mod model;
    pub(crate) mod quota_model;
    pub(crate) mod token_span_model;
}

mod blocks_of_16;
mod checkpoints;
mod commit_from;
mod continuations;
mod demotable_pins;
mod features;
mod invariants;
mod linearizable;
mod marks;
mod namespace_quotas;
mod namespaces;
mod prefix_cache;
mod pure_queries;
mod refused_commits;
#[cfg(feature = "serde")]
mod serialization;
mod single_position_blocks;
mod state_machine;
mod token_spans;
