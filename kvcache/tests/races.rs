//! Races by name, on real threads that meet at a barrier: each kind of change against readers,
//! and owners of the writer, of leases and of steps against each other. The models in `loom_tests`
//! go through every interleaving of small cases; these run the real reclaimer on the real machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use stolon_kvcache::{
    BlockId, BlockPool, CacheEvent, Namespace, TreeReader, TreeWriter, prefix_tree,
};

const ROUNDS: usize = 300;
const READERS: usize = 2;
/// Queries of one reader in a round.
const QUERIES: usize = 24;

fn base() -> Namespace {
    Namespace::default()
}

fn salted() -> Namespace {
    Namespace::builder().salt("s").build()
}

fn put_in(writer: &mut TreeWriter, namespace: &Namespace, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(namespace, positions);
    let missing = positions.len() - lease.len();
    let blocks: Vec<BlockId> = (first..).take(missing).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks);
}

fn put(writer: &mut TreeWriter, positions: &[u32], first: u32) {
    put_in(writer, &base(), positions, first);
}

/// Lets the threads of a round drift apart, differently in each.
fn stagger(round: usize, thread: usize) {
    for _ in 0..(round * (thread + 7)) % 101 {
        std::hint::spin_loop();
    }
}

/// Runs `write`, which is one published change, beside readers that ask for `positions`. They may
/// see `before`, later `after`, and never the former again once they have seen the latter.
fn one_change(
    prepare: impl Fn(&mut TreeWriter),
    write: impl Fn(&mut TreeWriter) + Sync,
    ask: impl Fn(&TreeReader) -> usize + Sync,
    before: usize,
    after: usize,
) {
    for round in 0..ROUNDS {
        let (mut writer, reader) = prefix_tree(1).expect("a block size");
        prepare(&mut writer);
        assert_eq!(ask(&reader), before);
        let start = Barrier::new(READERS + 1);
        thread::scope(|scope| {
            for thread in 0..READERS {
                let (ask, reader, start) = (&ask, &reader, &start);
                scope.spawn(move || {
                    start.wait();
                    stagger(round, thread);
                    let answers: Vec<usize> = (0..QUERIES).map(|_| ask(reader)).collect();
                    let old = answers.iter().take_while(|&&answer| answer == before).count();
                    let new = answers[old..].iter().all(|&answer| answer == after);
                    assert!(new, "expected {before}, then {after}, got {answers:?}");
                });
            }
            start.wait();
            stagger(round, READERS);
            write(&mut writer);
        });
        assert_eq!(ask(&reader), after);
        writer.audit().expect("consistent");
    }
}

fn query(positions: &'static [u32]) -> impl Fn(&TreeReader) -> usize + Sync {
    move |reader| reader.query_match_len(&base(), positions)
}

#[test]
fn publish_against_read() {
    one_change(|_| (), |w| put(w, &[1, 2, 3], 0), query(&[1, 2, 3]), 0, 3);
}

#[test]
fn publish_below_a_node_against_read() {
    let prepare = |w: &mut TreeWriter| {
        put(w, &[1, 2], 0);
        put(w, &[1, 2, 3], 10);
        put(w, &[1, 2, 4], 20);
    };
    one_change(prepare, |w| put(w, &[1, 2, 5, 6], 30), query(&[1, 2, 5, 6]), 2, 4);
}

#[test]
fn growth_of_a_leaf_against_read() {
    let grow = |w: &mut TreeWriter| {
        let mut lease = w.acquire(&base(), &[1, 2]);
        let _ = w.commit(&mut lease, &[1, 2, 3], &[BlockId(2)]);
    };
    one_change(|w| put(w, &[1, 2], 0), grow, query(&[1, 2, 3]), 2, 3);
}

#[test]
fn split_against_read() {
    for parting in [&[1, 9][..], &[1, 2, 9], &[1, 2, 3, 9]] {
        one_change(
            |w| put(w, &[1, 2, 3, 4], 0),
            |w| put(w, parting, 9),
            query(&[1, 2, 3, 4]),
            4,
            4,
        );
    }
}

#[test]
fn split_against_a_read_of_the_new_branch() {
    // The acquire splits without a new answer; the branch then comes with one store.
    one_change(|w| put(w, &[1, 2, 3], 0), |w| put(w, &[1, 9, 8], 9), query(&[1, 9, 8]), 1, 3);
}

#[test]
fn split_above_children_against_read() {
    let prepare = |w: &mut TreeWriter| {
        put(w, &[1, 2, 3], 0);
        put(w, &[1, 2, 4], 10);
    };
    one_change(prepare, |w| put(w, &[1, 8], 20), query(&[1, 2, 4]), 3, 3);
}

#[test]
fn evict_against_read() {
    let prepare = |w: &mut TreeWriter| {
        put(w, &[1, 2], 0);
        put(w, &[1, 3], 10);
    };
    let evict = |w: &mut TreeWriter| assert_eq!(w.evict(1), [BlockId(1)]);
    one_change(prepare, evict, query(&[1, 2]), 2, 1);
}

#[test]
fn trim_against_read() {
    let evict = |w: &mut TreeWriter| assert_eq!(w.evict(2).len(), 2);
    one_change(|w| put(w, &[1, 2, 3, 4], 0), evict, query(&[1, 2, 3, 4]), 4, 2);
}

#[test]
fn merge_against_read() {
    let prepare = |w: &mut TreeWriter| {
        put(w, &[1, 2], 0);
        put(w, &[1, 3, 4], 10);
    };
    let merge = |w: &mut TreeWriter| {
        let _ = w.evict(1);
        assert_eq!(w.counts().nodes, 1);
    };
    one_change(prepare, merge, query(&[1, 3, 4]), 3, 3);
}

#[test]
fn prune_against_read() {
    let ask = |reader: &TreeReader| reader.query_match_len(&salted(), &[1, 2]);
    let prune = |w: &mut TreeWriter| {
        let _ = w.evict(2);
        assert_eq!(w.counts().namespaces, 0);
    };
    one_change(|w| put_in(w, &salted(), &[1, 2], 0), prune, ask, 2, 0);
}

#[test]
fn a_new_namespace_against_read() {
    let ask = |reader: &TreeReader| reader.query_match_len(&salted(), &[1, 2]);
    one_change(|_| (), |w| put_in(w, &salted(), &[1, 2], 0), ask, 0, 2);
}

#[test]
fn evict_namespace_against_read() {
    let ask = |reader: &TreeReader| reader.query_match_len(&salted(), &[1, 2]);
    let evict = |w: &mut TreeWriter| assert_eq!(w.evict_namespace(&salted()).len(), 2);
    one_change(|w| put_in(w, &salted(), &[1, 2], 0), evict, ask, 2, 0);
}

#[test]
fn flush_against_read() {
    let flush = |w: &mut TreeWriter| assert_eq!(w.flush().len(), 2);
    one_change(|w| put(w, &[1, 2], 0), flush, query(&[1, 2]), 2, 0);
}

#[test]
fn insertion_in_a_wide_table_against_read() {
    let prepare = |w: &mut TreeWriter| (10..30).for_each(|child| put(w, &[child], child));
    one_change(prepare, |w| put(w, &[1], 0), query(&[1]), 0, 1);
    one_change(prepare, |w| put(w, &[1], 0), query(&[29]), 1, 1);
}

#[test]
fn growth_of_a_table_against_read() {
    // Nine children make it wide; each power of two makes it grow.
    let prepare = |w: &mut TreeWriter| (10..18).for_each(|child| put(w, &[child], child));
    let grow = |w: &mut TreeWriter| (100..150).for_each(|child| put(w, &[child], child));
    one_change(prepare, grow, query(&[17]), 1, 1);
}

#[test]
fn tombstones_against_read() {
    let prepare = |w: &mut TreeWriter| (10..40).for_each(|child| put(w, &[child], child));
    // Nineteen leave, others take their slots; the one asked for is the youngest before them.
    let churn = |w: &mut TreeWriter| {
        assert_eq!(w.evict(19).len(), 19);
        (100..119).for_each(|child| put(w, &[child], child));
    };
    one_change(prepare, churn, query(&[39]), 1, 1);
}

#[test]
fn hashes_against_split() {
    let (_, blank) = prefix_tree(1).expect("a block size");
    let hashes = blank.block_hashes(&base(), &[1, 2, 3]);
    let ask = |reader: &TreeReader| reader.query_match_hashes(&base(), &hashes);
    one_change(|w| put(w, &[1, 2, 3], 0), |w| put(w, &[1, 2, 9], 9), ask, 3, 3);
}

/// A dump taken meanwhile shows every node below a parent that holds it, and nothing twice.
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

/// Two threads that take turns at the writer, one to evict, one to acquire: what is acquired is
/// never among the evicted, and is still there.
#[test]
fn evict_against_acquire() {
    for round in 0..ROUNDS {
        let (mut writer, reader) = prefix_tree(1).expect("a block size");
        put(&mut writer, &[1, 2, 3], 0);
        let writer = Mutex::new(writer);
        let start = Barrier::new(2);
        thread::scope(|scope| {
            let evictor = scope.spawn(|| {
                start.wait();
                stagger(round, 0);
                writer.lock().expect("no panic").evict(2)
            });
            start.wait();
            stagger(round, 1);
            let hint = reader.query_match_len(&base(), &[1, 2, 3]);
            let lease = writer.lock().expect("no panic").acquire(&base(), &[1, 2, 3]);
            assert!(lease.len() <= hint, "nothing was added since");
            let gone = evictor.join().expect("evicts");
            assert!(lease.blocks().iter().all(|block| !gone.contains(block)));
            assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), lease.len());
            assert_eq!(lease.len() + gone.len(), 3);
        });
        writer.lock().expect("no panic").audit().expect("consistent");
    }
}

/// A pin holds from the call on, an eviction beside it or not.
#[test]
fn evict_against_pin() {
    for round in 0..ROUNDS {
        let (mut writer, reader) = prefix_tree(1).expect("a block size");
        put(&mut writer, &[1, 2], 0);
        let writer = Mutex::new(writer);
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                stagger(round, 0);
                let _ = writer.lock().expect("no panic").evict(2);
            });
            start.wait();
            stagger(round, 1);
            let pin = writer.lock().expect("no panic").pin(&base(), &[1, 2]);
            let mut writer = writer.lock().expect("no panic");
            let held = writer.pins().first().map_or(0, |pin| pin.block_count);
            assert_eq!(pin.is_ok(), held == 2);
            let _ = writer.evict(2);
            assert_eq!(reader.query_match_len(&base(), &[1, 2]), held);
        });
    }
}

/// A lease that ends on another thread is evicted after that, never before.
#[test]
fn evict_against_the_end_of_a_lease() {
    for round in 0..ROUNDS {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        put(&mut writer, &[1, 2], 0);
        let lease = writer.acquire(&base(), &[1, 2]);
        let in_use = AtomicBool::new(true);
        let start = Barrier::new(2);
        let gone = thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                stagger(round, 0);
                in_use.store(false, Ordering::SeqCst);
                drop(lease);
            });
            start.wait();
            stagger(round, 1);
            let gone = writer.evict(2);
            assert!(gone.is_empty() || !in_use.load(Ordering::SeqCst), "evicted while in use");
            gone
        });
        assert_eq!(gone.len() + writer.evict(2).len(), 2);
        writer.audit().expect("consistent");
    }
}

/// Two requests that computed the same prompt commit it at the same time: one copy stays.
#[test]
fn commit_against_commit() {
    for round in 0..ROUNDS {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        let leases = [0, 1].map(|_| writer.acquire(&base(), &[1, 2, 3]));
        let writer = Mutex::new(writer);
        let start = Barrier::new(2);
        let (writer, start) = (&writer, &start);
        let commits = thread::scope(|scope| {
            let mut leases = leases.into_iter().enumerate();
            let running = [(); 2].map(|()| {
                let (thread, mut lease) = leases.next().expect("two leases");
                scope.spawn(move || {
                    start.wait();
                    stagger(round, thread);
                    let first = thread as u32 * 10;
                    let blocks = [0, 1, 2].map(|block| BlockId(first + block));
                    writer.lock().expect("no panic").commit(&mut lease, &[1, 2, 3], &blocks)
                })
            });
            running.map(|thread| thread.join().expect("commits"))
        });
        assert_eq!(commits[0].blocks, commits[1].blocks);
        assert_eq!(commits[0].duplicates.len() + commits[1].duplicates.len(), 3);
        let mut writer = writer.lock().expect("no panic");
        assert_eq!((writer.counts().cached, writer.counts().evictable), (3, 3));
        writer.audit().expect("consistent");
    }
}

/// A block that comes back while a step runs is handed out only when that step has ended.
#[test]
fn reuse_against_a_running_step() {
    for round in 0..ROUNDS {
        let (mut pool, fence) = BlockPool::new(1);
        let lease = pool.reserve(1).expect("free");
        let touching = AtomicBool::new(true);
        let ticket = fence.begin();
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                stagger(round, 0);
                touching.store(false, Ordering::SeqCst);
                drop(ticket);
            });
            start.wait();
            stagger(round, 1);
            drop(lease);
            let reused = pool.reserve(1).is_ok();
            assert!(!reused || !touching.load(Ordering::SeqCst), "handed out under the step");
        });
        assert!(pool.reserve(1).is_ok());
        pool.audit().expect("consistent");
    }
}

/// A subscriber beside the writer gets every event, in order, or is told how many it missed.
#[test]
fn events_against_writer() {
    for capacity in [1, 4, 100_000] {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        let events = writer.subscribe(capacity).expect("a capacity");
        let stop = AtomicBool::new(false);
        let start = Barrier::new(2);
        let mut seen = 0;
        let mut take = |all: Vec<stolon_kvcache::NumberedEvent>| {
            for next in all {
                let missed = match next.event {
                    CacheEvent::Reset { missed } => missed,
                    _ => 1,
                };
                seen += missed;
                assert_eq!(seen, next.number, "no event is lost without a word");
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
