//! Blocks: leases that end on other threads, the step fence, and what a hint is worth.
#![cfg(all(loom, not(crossbeam_loom)))]

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use stolon_kvcache::planted::{Bug, plant};
use stolon_kvcache::{BlockId, BlockPool, Namespace};
use stolon_loom_tests::{explore, must_fail, put, tree};

/// A step that works on a block beside a pool that gets the block back and hands it out again.
fn reuse_beside_a_step() {
    let (mut pool, fence) = BlockPool::new(1);
    let lease = pool.reserve(1).expect("free");
    let touching = Arc::new(AtomicBool::new(true));
    let ticket = fence.begin();
    let step = {
        let touching = touching.clone();
        thread::spawn(move || {
            // The kernel's last access to the block.
            touching.store(false, Ordering::Relaxed);
            drop(ticket);
        })
    };
    drop(lease);
    if let Ok(again) = pool.reserve(1) {
        assert_eq!(again.blocks(), [BlockId(0)]);
        assert!(!touching.load(Ordering::Relaxed), "handed out under a running step");
    }
    step.join().expect("the step ends");
    assert_eq!(pool.reserve(1).map(|lease| lease.len()), Ok(1), "free once the step has ended");
}

/// Goal: a block that came back while a step runs is handed out only after that step.
#[test]
fn block_reuse_against_a_running_step() {
    explore(3, reuse_beside_a_step);
}

/// Goal: without the fence that model fails.
#[test]
fn planted_missing_fence_is_caught() {
    plant(Bug::NoStepFence);
    let complaint = "handed out under a running step";
    must_fail("planted_missing_fence_is_caught", complaint, 3, reuse_beside_a_step);
}

/// Goal: leases that end on two threads at once give every block back exactly once.
#[test]
fn leases_that_end_on_other_threads() {
    explore(3, || {
        let (mut pool, _fence) = BlockPool::new(2);
        let leases = [pool.reserve(1), pool.reserve(1)].map(|lease| lease.expect("free"));
        let ends = leases.map(|lease| thread::spawn(move || drop(lease)));
        let _ = pool.reserve(1);
        for end in ends {
            end.join().expect("dropped");
        }
        assert_eq!(pool.reserve(2).map(|lease| lease.len()), Ok(2));
        pool.audit().expect("consistent");
    });
}

/// Goal: a prefix whose lease ends on another thread is evicted after that, never before.
#[test]
fn eviction_against_the_end_of_a_lease() {
    explore(3, || {
        let (mut writer, _reader) = tree();
        put(&mut writer, &[1], 0);
        let lease = writer.acquire(&Namespace::default(), &[1]);
        let in_use = Arc::new(AtomicBool::new(true));
        let end = {
            let in_use = in_use.clone();
            thread::spawn(move || {
                in_use.store(false, Ordering::Relaxed);
                drop(lease);
            })
        };
        let out = writer.evict(1);
        assert!(out.is_empty() || !in_use.load(Ordering::Relaxed), "evicted while in use");
        end.join().expect("dropped");
        let rest = writer.evict(1);
        assert_eq!(out.len() + rest.len(), 1);
        writer.audit().expect("consistent");
    });
}

/// Admission's hint, an eviction, and the acquire that follows, on two threads.
fn hint_eviction_acquire() {
    let (writer, reader) = tree();
    let writer = Arc::new(Mutex::new(writer));
    put(&mut writer.lock().expect("no panic"), &[1, 2], 0);
    let evictor = {
        let writer = writer.clone();
        thread::spawn(move || writer.lock().expect("no panic").evict(2))
    };
    let hint = reader.query_match_len(&Namespace::default(), &[1, 2]);
    let lease = writer.lock().expect("no panic").acquire(&Namespace::default(), &[1, 2]);
    assert!(lease.len() <= hint, "nothing was added since the hint");
    let freed = evictor.join().expect("evicts");
    for block in lease.blocks() {
        assert!(!freed.contains(block), "an acquired block was evicted");
    }
    let now = reader.query_match_len(&Namespace::default(), &[1, 2]);
    assert_eq!(now, lease.len(), "what is acquired stays");
}

/// Goal: the hint may be out of date; what was acquired never is.
#[test]
fn a_hint_may_be_stale_an_acquire_never() {
    explore(3, hint_eviction_acquire);
}

/// Goal: if eviction took locked leaves, that model would fail.
#[test]
fn planted_eviction_of_a_locked_node_is_caught() {
    plant(Bug::EvictLocked);
    let complaint = "an acquired block was evicted";
    let name = "planted_eviction_of_a_locked_node_is_caught";
    must_fail(name, complaint, 2, hint_eviction_acquire);
}
