//! The tree's readers against each kind of change that the writer can publish. Blocks hold one
//! position; tables are wide from two children on.
#![cfg(all(loom, not(crossbeam_loom)))]

use loom::thread;
use stolon_kvcache::planted::{Bug, plant};
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter};
use stolon_loom_tests::{explore, must_fail, put, tree};

/// Runs `write` beside a reader for each of `queries`; the answers have to be among `allowed`.
fn race(
    prepare: fn(&mut TreeWriter),
    write: fn(&mut TreeWriter),
    queries: &[(&'static [u32], &'static [usize])],
) {
    let (mut writer, reader) = tree();
    prepare(&mut writer);
    let readers: Vec<_> = queries
        .iter()
        .map(|&(positions, allowed)| {
            let reader: TreeReader = reader.clone();
            thread::spawn(move || {
                let got = reader.query_match_len(&Namespace::default(), positions);
                assert!(allowed.contains(&got), "expected one of {allowed:?}, got {got}");
            })
        })
        .collect();
    write(&mut writer);
    for reader in readers {
        reader.join().expect("the reader saw what it may see");
    }
    writer.audit().expect("consistent");
}

/// Goal: a new leaf is seen whole or not at all.
#[test]
fn publish_against_read() {
    explore(3, || race(|_| (), |w| put(w, &[1, 2], 0), &[(&[1, 2], &[0, 2])]));
}

/// Goal: a commit that extends a leaf in place of a new child never shows less than before.
#[test]
fn growth_of_a_leaf_against_read() {
    fn grow(writer: &mut TreeWriter) {
        let mut lease = writer.acquire(&Namespace::default(), &[1]);
        let _ = writer.commit(&mut lease, &[1, 2], &[BlockId(1)]);
    }
    explore(3, || race(|w| put(w, &[1], 0), grow, &[(&[1, 2], &[1, 2])]));
}

/// Goal: while a run is split, at every border, nobody sees less of it than was there.
#[test]
fn split_against_read_at_every_border() {
    fn prepare(writer: &mut TreeWriter) {
        put(writer, &[1, 2, 3], 0);
    }
    explore(3, || {
        race(prepare, |w| put(w, &[1, 9], 7), &[(&[1, 2, 3], &[3])]);
    });
    explore(3, || {
        race(prepare, |w| put(w, &[1, 2, 9], 7), &[(&[1, 2, 3], &[3])]);
    });
    explore(3, || {
        race(prepare, |w| put(w, &[1, 2, 9], 7), &[(&[1, 2, 9], &[2, 3])]);
    });
}

/// Goal: a split hands the children on: what is below the run stays visible.
#[test]
fn split_above_children_against_read() {
    fn prepare(writer: &mut TreeWriter) {
        put(writer, &[1, 2, 3], 0);
        put(writer, &[1, 2, 4], 10);
    }
    explore(3, || {
        race(prepare, |w| put(w, &[1, 8], 20), &[(&[1, 2, 3], &[3])]);
    });
}

/// Goal: an evicted leaf is seen or not; what it hung on stays; nothing is freed under a reader.
#[test]
fn evict_and_reclaim_against_read() {
    fn prepare(writer: &mut TreeWriter) {
        put(writer, &[1, 2], 0);
        put(writer, &[1, 3], 10);
    }
    fn evict(writer: &mut TreeWriter) {
        assert_eq!(writer.evict(1), [BlockId(1)]);
    }
    explore(3, || race(prepare, evict, &[(&[1, 2], &[1, 2])]));
    explore(3, || race(prepare, evict, &[(&[1, 3], &[2])]));
}

/// Goal: trimming the tail of a leaf shows the old or the new length.
#[test]
fn trim_against_read() {
    let trim = |w: &mut TreeWriter| assert_eq!(w.evict(1), [BlockId(2)]);
    explore(3, move || {
        race(|w| put(w, &[1, 2, 3], 0), trim, &[(&[1, 2, 3], &[2, 3])]);
    });
}

/// Goal: a chain that is merged stays whole for every reader.
#[test]
fn merge_against_read() {
    fn prepare(writer: &mut TreeWriter) {
        put(writer, &[1, 2], 0);
        put(writer, &[1, 3], 10);
    }
    // Evicting [1, 2] leaves [1] with one child; the two become one node.
    let merge = |w: &mut TreeWriter| {
        let _ = w.evict(1);
        assert_eq!(w.counts().nodes, 1);
    };
    explore(3, move || race(prepare, merge, &[(&[1, 3], &[2])]));
}

/// Goal: a table that grows, or gets a child in place, hides none of the others meanwhile.
#[test]
fn table_growth_and_insertion_in_place_against_read() {
    fn one(writer: &mut TreeWriter) {
        put(writer, &[1], 0);
    }
    fn two(writer: &mut TreeWriter) {
        one(writer);
        put(writer, &[2], 1);
    }
    // From one child to two: the small table gives way to a wide one.
    explore(3, || race(one, |w| put(w, &[2], 1), &[(&[1], &[1])]));
    // From two to three: in place.
    explore(3, || race(two, |w| put(w, &[3], 2), &[(&[3], &[0, 1])]));
    explore(3, || race(two, |w| put(w, &[3], 2), &[(&[2], &[1])]));
}

/// Goal: a slot that is cleared and taken over by another child never shows a wrong one.
#[test]
fn a_tombstone_used_again_against_read() {
    fn prepare(writer: &mut TreeWriter) {
        put(writer, &[1], 0);
        put(writer, &[2], 1);
        put(writer, &[3], 2);
    }
    fn replace(writer: &mut TreeWriter) {
        let _ = writer.evict(1);
        put(writer, &[4], 3);
        let _ = writer.evict(1);
        put(writer, &[1], 4);
    }
    explore(3, || race(prepare, replace, &[(&[1], &[0, 1])]));
    explore(3, || race(prepare, replace, &[(&[3], &[1])]));
}

/// Goal: a namespace that comes and goes is there or not; its pruning frees nothing early.
#[test]
fn namespace_prune_against_read() {
    explore(3, || {
        let (mut writer, reader) = tree();
        let salted = Namespace::builder().salt("a").build();
        let mut lease = writer.acquire(&salted, &[1]);
        let _ = writer.commit(&mut lease, &[1], &[BlockId(0)]);
        drop(lease);
        let namespace = salted.clone();
        let query = thread::spawn(move || {
            let got = reader.query_match_len(&namespace, &[1]);
            assert!(got <= 1);
        });
        assert_eq!(writer.evict(1), [BlockId(0)]);
        assert_eq!(writer.counts().namespaces, 0);
        let mut lease = writer.acquire(&salted, &[1]);
        let _ = writer.commit(&mut lease, &[1], &[BlockId(0)]);
        query.join().expect("the reader saw what it may see");
    });
}

/// Goal: a flush is seen whole or not at all, also where a lease keeps blocks from coming back.
#[test]
fn flush_against_read() {
    fn flush_and_start_anew(writer: &mut TreeWriter) {
        let lease = writer.acquire(&Namespace::default(), &[1]);
        assert_eq!(writer.flush(), [BlockId(1)]);
        drop(lease);
        assert_eq!(writer.evict(1), [BlockId(0)]);
        put(writer, &[1], 5);
    }
    let queries: [(&'static [u32], &'static [usize]); 1] = [(&[1, 2], &[0, 1, 2])];
    explore(3, move || race(|w| put(w, &[1, 2], 0), flush_and_start_anew, &queries));
}

/// Goal: a query by hashes while a run is split, and while its tail is trimmed.
#[test]
fn hashes_against_split_and_trim() {
    explore(3, || {
        let (mut writer, reader) = tree();
        put(&mut writer, &[1, 2, 3], 0);
        let hashes = reader.block_hashes(&Namespace::default(), &[1, 2, 3]);
        let query =
            thread::spawn(move || reader.query_match_hashes(&Namespace::default(), &hashes));
        put(&mut writer, &[1, 9], 7);
        assert_eq!(writer.evict(1), [BlockId(2)]);
        let got = query.join().expect("no look at freed memory");
        assert!([2, 3].contains(&got), "expected 2 or 3 blocks, got {got}");
    });
}

/// Goal: two readers beside a split and an eviction, at once.
#[test]
fn two_readers_against_split_and_evict() {
    fn write(writer: &mut TreeWriter) {
        put(writer, &[1, 9], 7);
        let _ = writer.evict(1);
    }
    explore(2, || {
        let queries: [(&'static [u32], &'static [usize]); 2] =
            [(&[1, 2], &[1, 2]), (&[1, 9], &[1, 2])];
        race(|w| put(w, &[1, 2], 0), write, &queries);
    });
}

/// Goal: a reader that stays pinned across many changes keeps what it could reach, and what it
/// holds back is bounded by what was retired meanwhile; afterwards all of it is freed.
#[test]
fn a_pinned_reader_keeps_what_it_could_reach() {
    explore(3, || {
        let (mut writer, reader) = tree();
        let counts = reader.clone();
        put(&mut writer, &[1, 2], 0);
        let query = thread::spawn(move || reader.query_match_len(&Namespace::default(), &[1, 2]));
        for round in 0..2 {
            let _ = writer.evict(1);
            put(&mut writer, &[1, 2], 10 + round);
        }
        assert!((0..=2).contains(&query.join().expect("no look at freed memory")));
        let (waiting, most) = counts.retired_waiting();
        assert_eq!(waiting, 0, "nothing waits when no guard is left");
        assert!(most <= 8, "at most two items a change wait, got {most}");
    });
}

/// Goal: the models see a publication without release.
#[test]
fn planted_relaxed_publish_is_caught() {
    plant(Bug::RelaxedPublish);
    must_fail("planted_relaxed_publish_is_caught", "Causality violation", 2, || {
        race(|_| (), |w| put(w, &[1], 0), &[(&[1], &[0, 1])]);
    });
}

/// Goal: the models see a node that is freed under a reader.
#[test]
fn planted_eager_free_is_caught() {
    plant(Bug::EagerFree);
    must_fail("planted_eager_free_is_caught", "Causality violation", 2, || {
        race(|w| put(w, &[1, 2], 0), |w| put(w, &[1, 9], 7), &[(&[1, 2], &[2])]);
    });
}

/// Goal: the models see a split that loses what is below.
#[test]
fn planted_split_without_children_is_caught() {
    plant(Bug::SplitDropsChildren);
    must_fail("planted_split_without_children_is_caught", "expected one of [3]", 2, || {
        let prepare = |w: &mut TreeWriter| {
            put(w, &[1, 2, 3], 0);
            put(w, &[1, 2, 4], 10);
        };
        race(prepare, |w| put(w, &[1, 8], 20), &[(&[1, 2, 3], &[3])]);
    });
}
