//! Models that run through crossbeam-epoch itself, with one reader. In addition to `--cfg loom`
//! they need `--cfg crossbeam_loom`, which makes crossbeam-epoch use loom's atomics.
#![cfg(all(loom, crossbeam_loom))]

use loom::thread;
use stolon_kvcache::{BlockId, Namespace, TreeWriter};
use stolon_loom_tests::{explore, put, tree};

fn race(prepare: fn(&mut TreeWriter), write: fn(&mut TreeWriter), allowed: &'static [usize]) {
    explore(2, move || {
        let (mut writer, reader) = tree();
        prepare(&mut writer);
        let query = thread::spawn(move || {
            let got = reader.query_match_len(&Namespace::default(), &[1, 2]);
            assert!(allowed.contains(&got), "expected one of {allowed:?}, got {got}");
        });
        write(&mut writer);
        query.join().expect("the reader got a permitted answer");
    });
}

/// Goal: publication of a new leaf with the real collector.
#[test]
fn publish_against_read() {
    race(|_| (), |w| put(w, &[1, 2], 0), &[0, 2]);
}

/// Goal: a split with the real collector.
#[test]
fn split_against_read() {
    race(|w| put(w, &[1, 2], 0), |w| put(w, &[1, 9], 7), &[2]);
}

/// Goal: eviction and reclamation with the real collector.
#[test]
fn evict_against_read() {
    race(|w| put(w, &[1, 2], 0), |w| assert_eq!(w.evict(2), [BlockId(0), BlockId(1)]), &[0, 2]);
}

/// Goal: eviction of a prefix, whose nodes are all retired together, with the real collector.
#[test]
fn evict_prefix_against_read() {
    let evict = |w: &mut TreeWriter| {
        assert_eq!(w.evict_prefix(&Namespace::default(), &[1]).len(), 3);
    };
    race(
        |w| {
            put(w, &[1, 2], 0);
            put(w, &[1, 3], 7);
        },
        evict,
        &[0, 1, 2],
    );
}
