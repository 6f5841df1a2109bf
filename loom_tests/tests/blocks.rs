//! The owners of the writer, the leases and the steps, which act on the tree and its blocks at the
//! same time.
#![cfg(all(loom, not(crossbeam_loom)))]

#[path = "../../crates/engine/kvcache/tests/it/support/block_scenarios.rs"]
mod scenarios;

use loom::thread;
use scenarios::{
    priorities_of_two_requests, query_acquire_and_eviction,
    query_acquire_and_eviction_of_the_prefix, query_and_checkpoints, resume_and_eviction,
    reuse_during_a_step, reuse_of_a_checkpoint,
};
use stolon_kvcache::BlockPool;
use stolon_kvcache::planted::{Bug, plant};
use stolon_loom_tests::{explore, must_fail};

/// Runs the shared scenarios in every interleaving.
mod harness {
    pub(crate) use stolon_loom_tests::put;

    /// loom's synchronization types.
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

/// Goal: when two steps begin at the same time, blocks that are returned during both stay in use
/// until both have ended, in whichever order they end.
#[test]
fn two_steps_begin_at_once() {
    for own_ends_first in [true, false] {
        explore(3, move || {
            let (mut pool, fence) = BlockPool::new(1).expect("a valid count");
            let lease = pool.reserve(1).expect("a free block");
            let other = {
                let fence = fence.clone();
                thread::spawn(move || fence.begin())
            };
            let own = fence.begin();
            let other = other.join().expect("the thread does not panic");
            drop(lease);
            let (first, second) = if own_ends_first { (own, other) } else { (other, own) };
            drop(first);
            assert!(pool.reserve(1).is_err(), "handed out during a running step");
            drop(second);
            assert!(pool.reserve(1).is_ok(), "both steps have ended");
        });
    }
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
