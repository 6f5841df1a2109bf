//! Races on real threads, with the real reclaimer. The scenarios under `support/` are shared with
//! the loom models in `loom_tests`, which run them in every interleaving of few steps; here they
//! run many times with threads that start together. The races in this file run on threads only.

#[path = "it/support/block_scenarios.rs"]
mod block_scenarios;
#[path = "it/support/reader_scenarios.rs"]
mod reader_scenarios;

use harness::put;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use stolon_kvcache::{CacheEvent, NumberedEvent, prefix_tree};

/// Runs the shared scenarios on threads.
mod harness {
    use crate::reader_scenarios::Race;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use stolon_kvcache::{BlockId, Namespace, TreeWriter, prefix_tree};

    /// The standard library's synchronization types.
    pub(crate) mod sync {
        pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
        pub(crate) use std::sync::{Arc, Barrier, Mutex, MutexGuard};
        pub(crate) use std::thread;
    }

    /// Number of times that a scenario runs.
    const ROUNDS: usize = 300;
    const READERS: usize = 2;
    /// Queries of one reader in a round.
    const QUERIES: usize = 24;

    /// Commits `positions` with block ids counted up from `first`, and leaves nothing locked.
    pub(crate) fn put_in(
        writer: &mut TreeWriter,
        namespace: &Namespace,
        positions: &[u32],
        first: u32,
    ) {
        let mut lease = writer.acquire(namespace, positions);
        let missing = positions.len() - lease.len();
        let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
        let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
    }

    pub(crate) fn put(writer: &mut TreeWriter, positions: &[u32], first: u32) {
        put_in(writer, &Namespace::default(), positions, first);
    }

    /// Delays a thread by a different time at each call, so that the threads of a round meet at
    /// different points of the scenario.
    pub(crate) fn stagger(thread: usize) {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        for _ in 0..(call * (thread + 7)) % 101 {
            std::hint::spin_loop();
        }
    }

    pub(crate) fn repeat(scenario: impl Fn()) {
        (0..ROUNDS).for_each(|_| scenario());
    }

    /// Whether `got` appears in `expected` in this order, with repetitions and omissions.
    fn follows(got: &[usize], expected: &[usize]) -> bool {
        let mut rest = expected;
        got.iter().all(|answer| match rest.iter().position(|candidate| candidate == answer) {
            Some(skipped) => {
                rest = &rest[skipped..];
                true
            }
            None => false,
        })
    }

    /// Runs the change of a race against readers that ask again and again.
    pub(crate) fn run(race: Race) {
        let Race { prepare, write, query, answers } = race;
        repeat(|| {
            let (mut writer, reader) = prefix_tree(1).expect("a block size");
            prepare(&mut writer);
            assert_eq!(Some(&query(&reader)), answers.first());
            let start = Barrier::new(READERS + 1);
            thread::scope(|scope| {
                for thread in 0..READERS {
                    let (reader, start) = (&reader, &start);
                    scope.spawn(move || {
                        start.wait();
                        stagger(thread);
                        let got: Vec<usize> = (0..QUERIES).map(|_| query(reader)).collect();
                        assert!(follows(&got, answers), "expected {answers:?}, got {got:?}");
                    });
                }
                start.wait();
                stagger(READERS);
                write(&mut writer);
            });
            assert_eq!(Some(&query(&reader)), answers.last());
            writer.audit().expect("consistent");
        });
    }
}

/// Goal: a dump that is taken while the writer works lists each node after its parent.
#[test]
fn dump_against_writer() {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for (index, node) in reader.dump().nodes.iter().enumerate() {
                    assert!(node.parent.is_none_or(|parent| parent < index));
                    assert_eq!(node.block_count, node.position_count);
                }
            }
        });
        for round in 0..3000u32 {
            put(&mut writer, &[round % 7, round % 5, round % 3], round * 10);
            if round % 4 == 0 {
                let _ = writer.evict(2);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    writer.audit().expect("consistent");
}

/// Goal: a subscriber on another thread gets every event in order, or learns how many it missed.
#[test]
fn events_against_writer() {
    for capacity in [1, 4, 100_000] {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        let events = writer.subscribe(capacity).expect("a capacity");
        let stop = AtomicBool::new(false);
        let start = Barrier::new(2);
        let mut seen = 0;
        let mut take = |all: Vec<NumberedEvent>| {
            for next in all {
                let missed = match next.event {
                    CacheEvent::Reset { missed } => missed,
                    _ => 1,
                };
                seen += missed;
                assert_eq!(seen, next.number, "each lost event is counted");
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                while !stop.load(Ordering::Relaxed) {
                    take(events.drain());
                }
                take(events.drain());
            });
            start.wait();
            for round in 0..2000u32 {
                put(&mut writer, &[round % 5, round % 7], round * 10);
                let _ = writer.evict(1);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(seen, writer.snapshot().number);
    }
}
