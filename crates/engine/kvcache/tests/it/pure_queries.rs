//! Queries free nothing that the writer has removed. They may free a few entries of crossbeam-epoch's
//! queue, by which one thread learns from another that a batch may be freed.

use std::sync::atomic::{AtomicBool, Ordering};

use allocation_counter::measure;
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter, prefix_tree};

/// The numbers of allocations and frees of `work` on this thread.
fn calls_of(work: impl FnOnce()) -> (u64, u64) {
    let counts = measure(work);
    (counts.count_total, (counts.count_total as i64 - counts.count_current) as u64)
}

fn insert(writer: &mut TreeWriter, positions: &[u32], first: u32) {
    let mut lease = writer.acquire(&Namespace::default(), positions);
    let blocks: Vec<BlockId> = (first..).take(positions.len() - lease.len()).map(BlockId).collect();
    let _ = writer.commit(&mut lease, positions, &blocks).expect("a valid commit");
}

/// A tree with `count` leaves below one root.
fn tree(count: u32) -> (TreeWriter, TreeReader) {
    let (mut writer, reader) = prefix_tree(1).expect("1 is a valid block size");
    for leaf in 0..count {
        insert(&mut writer, &[leaf, 1, 2, 3], leaf * 4);
    }
    (writer, reader)
}

fn query(reader: &TreeReader) {
    assert!(reader.query_match_len(&Namespace::default(), &[7, 1, 2, 3]) <= 4);
}

/// Goal: queries free nothing that the writer has removed, neither while the writer is idle nor
/// while it is busy; the work that they do for it is bounded.
///
/// This is one test, because every test has a thread, and the record of a thread that has ended is
/// freed by the other threads of the program.
#[test]
fn queries_free_nothing_of_the_tree() {
    a_query_frees_nothing_that_waits();
    a_query_beside_the_writer_at_most_hands_over();
}

/// Thousands of nodes wait to be freed, and only a reader notices the end of their grace period.
/// Its queries free none of them; the next operation of the writer does.
fn a_query_frees_nothing_that_waits() {
    // Fewer than 64 batches of 256 nodes.
    const LEAVES: u32 = 5000;
    let (mut writer, reader) = tree(LEAVES);
    query(&reader); // The first query of a thread allocates the thread's record.
    let evicting = AtomicBool::new(true);
    let (measured, end) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (measured, evicting, reader) = (measured, &evicting, &reader);
        // Another reader delays the ends of grace periods. Its thread outlives the measurement.
        scope.spawn(move || {
            while evicting.load(Ordering::Relaxed) {
                query(reader);
            }
            let _ = end.recv();
        });
        assert_eq!(writer.evict(usize::MAX).len() as u32, LEAVES * 4);
        evicting.store(false, Ordering::Relaxed);
        let waiting = writer.retired_count();
        assert!(waiting > 0, "the open batch at least");
        let (allocations, frees) = calls_of(|| (0..100_000).for_each(|_| query(reader)));
        // One sealed batch can be handed over. The entries of crossbeam-epoch's queue that are
        // freed then are not many either, because no thread has taken 64 of them yet.
        assert!(allocations == 0 && frees <= 8, "{allocations} allocations, {frees} frees");
        assert_eq!(writer.retired_count(), waiting, "queries free nothing");
        let (_, frees) = calls_of(|| {
            while writer.retired_count() >= 256 {
                let _ = writer.counts();
                std::thread::yield_now();
            }
        });
        assert!(frees as usize >= waiting - writer.retired_count(), "the writer frees");
        drop(measured);
    });
}

/// Next to a writer at full speed, a query hands over at most one batch. crossbeam-epoch frees the
/// entry of its queue that held the function later, together with up to 63 others.
fn a_query_beside_the_writer_at_most_hands_over() {
    const QUERIES: u64 = 2_000_000;
    let (mut writer, reader) = tree(1000);
    let asks = AtomicBool::new(true);
    let reading = || {
        query(&reader);
        let (mut impure, mut most) = (0, 0);
        for _ in 0..QUERIES {
            let (allocations, frees) = calls_of(|| query(&reader));
            impure += u64::from(allocations + frees > 0);
            most = most.max(allocations + frees);
        }
        asks.store(false, Ordering::Relaxed);
        (impure, most)
    };
    std::thread::scope(|scope| {
        let reading = scope.spawn(reading);
        let mut next = 1_000_000;
        while asks.load(Ordering::Relaxed) {
            insert(&mut writer, &[next, 1, 2, 3], 0);
            let _ = writer.evict(4);
            next += 1;
        }
        let (impure, most) = reading.join().expect("the reader does not panic");
        assert!(most <= 65, "one query allocated and freed {most} times");
        assert!(impure <= QUERIES / 10_000, "{impure} queries allocated or freed");
    });
}
