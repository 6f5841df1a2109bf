//! Models of the thread pool of stolon-kernels: a parallel call is complete when it returns, in
//! every interleaving of the caller with the workers.
//!
//! Tasks write with relaxed atomics. Loom lets a later relaxed read return an older value unless a
//! happens-before edge forbids it, so a read of the final value shows that the pool has made the
//! write visible.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use stolon_kernels::Threads;
use stolon_kernels::planted::{Bug, plant};
use stolon_loom_tests::{explore, must_fail};

/// Runs `model` in all interleavings with at most `preemptions` preemptions, regardless of
/// `LOOM_MAX_PREEMPTIONS`: with more, a model of three threads or of two calls takes hours.
fn explore_within(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Runs `task_count` tasks and checks that each has run exactly once, as seen by the caller.
fn call(threads: &Threads, task_count: usize) {
    let runs: Vec<AtomicUsize> = (0..task_count).map(|_| AtomicUsize::new(0)).collect();
    threads.for_each(task_count, |index| {
        let before = runs[index].load(Relaxed);
        runs[index].store(before + 1, Relaxed);
    });
    for run in &runs {
        assert_eq!(run.load(Relaxed), 1, "a task has not run exactly once when the call returns");
    }
}

/// Goal: a call returns only after each task has run exactly once, and its writes are visible;
/// dropping the pool joins the worker whether it spins, sleeps or is about to sleep.
#[test]
fn a_call_is_complete_when_it_returns() {
    explore(3, || {
        let threads = Threads::new(2);
        assert_eq!(threads.count(), 2);
        call(&threads, 2);
    });
}

/// Goal: a worker that is late for one call does not disturb the next one.
#[test]
fn two_calls_follow_each_other() {
    explore_within(2, || {
        let threads = Threads::new(2);
        call(&threads, 2);
        call(&threads, 3);
    });
}

/// Runs two tasks, each of which waits until the other one has begun.
///
/// They wait in a loop and not on a lock, because the pool would catch the panic with which loom
/// reports a deadlock.
fn call_of_both(threads: &Threads) {
    let begun = AtomicUsize::new(0);
    threads.for_each(2, |_| {
        begun.fetch_add(1, AcqRel);
        while begun.load(Acquire) < 2 {
            loom::thread::yield_now();
        }
    });
}

/// Goal: no worker sleeps through a call, whether it spins, sleeps or is about to sleep when the
/// call begins.
#[test]
fn a_worker_takes_part_in_a_long_call() {
    explore_within(2, || call_of_both(&Threads::new(2)));
}

/// Goal: the workers take part in one call after the other.
#[test]
fn a_worker_takes_part_in_two_long_calls() {
    explore_within(1, || {
        let threads = Threads::new(2);
        call_of_both(&threads);
        call_of_both(&threads);
    });
}

/// Goal: two workers enter and leave the same call.
#[test]
fn two_workers_share_a_call() {
    explore_within(1, || call(&Threads::new(3), 2));
}

/// Goal: while one thread's call runs, another thread's call runs inline and is complete, too.
#[test]
fn two_callers_at_once() {
    explore_within(2, || {
        let threads = Arc::new(Threads::new(2));
        let other = {
            let threads = Arc::clone(&threads);
            loom::thread::spawn(move || call(&threads, 2))
        };
        call(&threads, 2);
        other.join().expect("the other caller does not panic");
    });
}

/// Goal: the panic of a task reaches the caller, and the pool remains usable.
#[test]
fn a_panic_reaches_the_caller() {
    explore_within(2, || {
        let threads = Threads::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| {
            threads.for_each(2, |index| {
                if index == 1 {
                    resume_unwind(Box::new("task one"));
                }
            });
        }));
        let payload = result.expect_err("the panic reaches the caller");
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"task one"));
        call(&threads, 2);
    });
}

/// Goal: a pool that is dropped without a call ends its workers.
#[test]
fn an_idle_pool_is_dropped() {
    explore(3, || drop(Threads::new(3)));
}

/// Goal: two tasks that need memory at the same time do not get the same one, and each gets enough,
/// whichever of them returns it first.
#[test]
fn two_tasks_take_scratch_memory() {
    explore(3, || {
        let threads = Arc::new(Threads::new(1));
        assert!(threads.use_scratch(1) >= 1, "it is kept for the tasks");
        let other = {
            let threads = Arc::clone(&threads);
            loom::thread::spawn(move || threads.use_scratch(1))
        };
        assert!(threads.use_scratch(1) >= 1);
        assert!(other.join().expect("the other task does not panic") >= 1);
    });
}

/// Goal: the models find a gate that is opened without publishing the call behind it.
#[test]
fn relaxed_opening_of_the_gate_is_found() {
    must_fail("relaxed_opening_of_the_gate_is_found", "Causality violation", 3, || {
        plant(Bug::RelaxedOpen);
        call(&Threads::new(2), 2);
    });
}

/// Goal: the models find a worker that leaves without publishing what its tasks wrote.
#[test]
fn relaxed_leaving_is_found() {
    must_fail("relaxed_leaving_is_found", "when the call returns", 3, || {
        plant(Bug::RelaxedLeave);
        call(&Threads::new(2), 2);
    });
}

/// Goal: the models find a call that returns while a worker still runs one of its tasks.
#[test]
fn returning_before_the_workers_left_is_found() {
    must_fail("returning_before_the_workers_left_is_found", "when the call returns", 3, || {
        plant(Bug::NoWait);
        call(&Threads::new(2), 2);
    });
}
