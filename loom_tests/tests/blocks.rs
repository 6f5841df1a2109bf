//! The owners of the writer, of leases and of steps against each other.
#![cfg(all(loom, not(crossbeam_loom)))]

#[path = "../../crates/engine/kvcache/tests/it/support/block_scenarios.rs"]
mod scenarios;

use scenarios::{
    priorities_of_two_requests, query_acquire_and_eviction,
    query_acquire_and_eviction_of_the_prefix, query_and_checkpoints, resume_and_eviction,
    reuse_during_a_step, reuse_of_a_checkpoint,
};
use stolon_kvcache::planted::{Bug, plant};
use stolon_loom_tests::must_fail;

/// Runs the shared scenarios in every interleaving.
mod harness {
    pub(crate) use stolon_loom_tests::put;

    /// loom's synchronisation types.
    pub(crate) mod sync {
        pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
        pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};
        pub(crate) use loom::thread;

        /// Does nothing: loom lets threads start in any order without a barrier.
        pub(crate) struct Barrier;

        impl Barrier {
            pub(crate) fn new(_threads: usize) -> Barrier {
                Barrier
            }

            pub(crate) fn wait(&self) {}
        }
    }

    pub(crate) fn repeat(scenario: impl Fn() + Send + Sync + 'static) {
        stolon_loom_tests::explore(3, scenario);
    }

    /// Does nothing: loom varies the timing.
    pub(crate) fn stagger(_thread: usize) {}
}

/// Goal: the models find a pool that hands out blocks without waiting for the step fence.
#[test]
fn planted_missing_fence_is_caught() {
    plant(Bug::NoStepFence);
    let message = "handed out during a running step";
    must_fail("planted_missing_fence_is_caught", message, 3, reuse_during_a_step);
}

/// Goal: the models find an eviction that takes locked leaves.
#[test]
fn planted_eviction_of_a_locked_node_is_caught() {
    plant(Bug::EvictLocked);
    let test = "planted_eviction_of_a_locked_node_is_caught";
    must_fail(test, "an acquired block was evicted", 2, query_acquire_and_eviction);
}

/// Goal: the models find an eviction by prefix that takes locked nodes.
#[test]
fn planted_eviction_of_a_locked_prefix_is_caught() {
    plant(Bug::EvictLockedPrefix);
    let test = "planted_eviction_of_a_locked_prefix_is_caught";
    let model = query_acquire_and_eviction_of_the_prefix;
    must_fail(test, "an acquired block was evicted", 2, model);
}

/// Goal: the models find an eviction that takes a checkpoint from which a request resumes.
#[test]
fn planted_eviction_of_a_locked_checkpoint_is_caught() {
    plant(Bug::EvictLocked);
    let test = "planted_eviction_of_a_locked_checkpoint_is_caught";
    must_fail(test, "an acquired checkpoint was evicted", 2, resume_and_eviction);
}

/// Goal: the models find a checkpoint that is published without release ordering, by the query for
/// the place where a request resumes.
#[test]
fn planted_relaxed_publish_of_a_checkpoint_is_caught() {
    plant(Bug::RelaxedPublish);
    let test = "planted_relaxed_publish_of_a_checkpoint_is_caught";
    must_fail(test, "Causality violation", 2, query_and_checkpoints);
}

/// Goal: the models find a checkpoint that is freed while a query looks at it.
#[test]
fn planted_eager_free_of_a_checkpoint_is_caught() {
    plant(Bug::EagerFree);
    let test = "planted_eager_free_of_a_checkpoint_is_caught";
    must_fail(test, "Causality violation", 2, query_and_checkpoints);
}

/// Goal: the models find a pool that hands out a checkpoint's block during the step that reads it.
#[test]
fn planted_reuse_of_a_checkpoint_is_caught() {
    plant(Bug::NoStepFence);
    let message = "handed out during a running step";
    must_fail("planted_reuse_of_a_checkpoint_is_caught", message, 3, reuse_of_a_checkpoint);
}

/// Goal: the models find a request that lowers the priority of its prefix.
#[test]
fn planted_replacement_of_a_priority_is_caught() {
    plant(Bug::ReplacePriority);
    let test = "planted_replacement_of_a_priority_is_caught";
    must_fail(test, "expected the order of priorities", 2, priorities_of_two_requests);
}
