//! The thread pool: each task runs once, nested calls, panics, sleeping and waking.

use std::sync::atomic::AtomicU32;

use super::*;

/// Goal: every task runs exactly once, for many calls of many sizes.
#[test]
fn each_task_runs_once() {
    let threads = Threads::new(4);
    for task_count in (0..200).chain([5_000]) {
        let runs: Vec<AtomicU32> = (0..task_count).map(|_| AtomicU32::new(0)).collect();
        threads.for_each(task_count, |task| {
            runs[task].fetch_add(1, Ordering::Relaxed);
        });
        assert!(runs.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{task_count} tasks");
    }
}

/// Goal: workers that sleep wake up for a call.
#[test]
fn sleeping_workers_wake() {
    let threads = Threads::new(3);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(5));
        let names = Mutex::new(std::collections::HashSet::new());
        // Tasks that wait for each other can only end if three threads run them.
        let barrier = std::sync::Barrier::new(3);
        threads.for_each(3, |_| {
            barrier.wait();
            lock(&names).insert(std::thread::current().id());
        });
        assert_eq!(lock(&names).len(), 3);
    }
}

/// Goal: a task may call the pool itself, and two threads may call it at the same time.
#[test]
fn nested_and_concurrent_calls_end() {
    let threads = Threads::new(2);
    let total = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..100 {
                    threads.for_each(4, |_| {
                        threads.for_each(3, |_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(total.load(Ordering::Relaxed), 3 * 100 * 4 * 3);
}

/// Goal: the panic of a task reaches the caller with its message, and the pool remains usable.
#[test]
fn panic_reaches_the_caller_and_the_pool_remains_usable() {
    let threads = Threads::new(3);
    for round in 0..20 {
        let result = catch_unwind(AssertUnwindSafe(|| {
            threads.for_each(50, |task| assert_ne!(task, 7, "task seven"));
        }));
        let payload = result.unwrap_err();
        let message = payload.downcast_ref::<String>().expect("an assertion's message");
        assert!(message.contains("task seven"), "round {round}: {message}");
        let count = AtomicU32::new(0);
        threads.for_each(10, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 10);
    }
}

/// Goal: a pool of one thread works, also if zero threads are requested.
#[test]
fn pool_of_one() {
    for count in [0, 1] {
        let threads = Threads::new(count);
        assert_eq!(threads.count(), 1);
        let total = AtomicU32::new(0);
        threads.for_each(9, |task| {
            total.fetch_add(u32::try_from(task).unwrap(), Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 36);
    }
}

/// Goal: scratch buffers are reused and always at least as large as requested.
#[test]
fn scratch_is_reused() {
    let threads = Threads::new(1);
    let first = threads.scratch::<f32>(1000).slice_mut::<f32>().as_ptr();
    let mut again = threads.scratch::<f32>(900);
    assert_eq!(again.slice_mut::<f32>().as_ptr(), first);
    assert!(threads.scratch::<f32>(50_000).slice_mut::<f32>().len() >= 50_000);
    assert!(again.slice_mut::<f32>().len() >= 900);
}
