//! The hand-over of unlinked memory from the readers, which end its grace period, to the writer,
//! which frees it. The models run on the double of crossbeam-epoch and, where the number of
//! interleavings permits it, on crossbeam-epoch itself.
#![cfg(loom)]

use loom::thread;
use stolon_kvcache::planted::{Bug, plant};
use stolon_kvcache::{Namespace, TreeReader};
use stolon_loom_tests::{explore, must_fail, put, tree};

/// Maximum number of preemptions. The models yield where a switch between the threads matters.
const PREEMPTIONS: usize = if cfg!(crossbeam_loom) { 1 } else { 3 };

fn query(reader: &TreeReader) -> usize {
    reader.query_match_len(&Namespace::default(), &[1, 2])
}

/// The writer unlinks a node that a reader looks at. The reader ends the grace period, and the
/// writer frees at its next operation.
fn a_reader_hands_over() {
    let (mut writer, reader) = tree();
    put(&mut writer, &[1, 2], 0);
    let reading = thread::spawn(move || {
        assert!([0, 2].contains(&query(&reader)));
        // Every 128th query of a thread does this, too. A grace period is two epochs long, and each
        // call ends at most one epoch.
        reader.end_grace_periods();
        reader.end_grace_periods();
    });
    thread::yield_now();
    // A node and the table that it was in.
    assert_eq!(writer.evict(2).len(), 2);
    thread::yield_now();
    let _ = writer.counts();
    reading.join().expect("no access to freed memory");
}

/// Goal: memory that a reader hands over is freed only after every access by readers.
#[test]
fn a_hand_over_orders_the_freeing() {
    explore(PREEMPTIONS, a_reader_hands_over);
}

/// Goal: the models find a hand-over that does not order the writer's freeing after the readers'
/// accesses.
#[test]
fn planted_relaxed_hand_over_is_caught() {
    plant(Bug::RelaxedHandOver);
    let name = "planted_relaxed_hand_over_is_caught";
    must_fail(name, "Causality violation", PREEMPTIONS, a_reader_hands_over);
}

/// Goal: a reader continues after the writer was dropped, although the writer left unlinked nodes
/// behind. They are freed with the last handle.
#[test]
fn the_writer_leaves_unlinked_nodes_behind() {
    explore(PREEMPTIONS, || {
        let (mut writer, reader) = tree();
        put(&mut writer, &[1, 2], 0);
        let reading = thread::spawn(move || assert!((1..=2).contains(&query(&reader))));
        assert_eq!(writer.evict(1).len(), 1);
        drop(writer);
        reading.join().expect("no access to freed memory");
    });
}

/// Models that run on the double only.
#[cfg(not(crossbeam_loom))]
mod on_the_double {
    use super::*;

    /// Two queries during several changes, each of which unlinks at least one node.
    fn queries_during_changes() {
        let (mut writer, reader) = tree();
        put(&mut writer, &[1, 2], 0);
        let reading = thread::spawn(move || (query(&reader), query(&reader)).1);
        for round in 0..2 {
            let _ = writer.evict(1);
            put(&mut writer, &[1, 2], 10 + round);
        }
        assert!(writer.retired_count() <= 8, "at most two items per change wait");
        assert!((0..=2).contains(&reading.join().expect("no access to freed memory")));
        // Each operation frees at most two items here.
        for _ in 0..8 {
            let _ = writer.counts();
        }
        assert_eq!(writer.retired_count(), 0, "nothing waits when no guard is left");
    }

    /// Goal: a reader that stays pinned during many changes keeps the memory that it can reach, and
    /// the number of items that it keeps from being freed is bounded by the number of changes. All
    /// of them are freed afterward.
    #[test]
    fn a_pinned_reader_keeps_what_it_can_reach() {
        explore(3, queries_during_changes);
    }

    /// Goal: the models find a writer that frees the open batch when the sealed one has expired.
    #[test]
    fn planted_freeing_of_the_open_batch_is_caught() {
        plant(Bug::FreeOpenBatch);
        let name = "on_the_double::planted_freeing_of_the_open_batch_is_caught";
        must_fail(name, "Causality violation", 3, queries_during_changes);
    }
}
