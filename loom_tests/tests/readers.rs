//! The tree's readers against each kind of change that the writer can publish. Blocks hold one
//! position, and tables are changed in place from two children on.
#![cfg(all(loom, not(crossbeam_loom)))]

#[path = "../../crates/engine/kvcache/tests/it/support/reader_scenarios.rs"]
mod scenarios;

use loom::thread;
use scenarios::{Race, SPLIT_ABOVE_CHILDREN};
use stolon_kvcache::planted::{Bug, plant};
use stolon_kvcache::{Namespace, TreeReader};
use stolon_loom_tests::{explore, must_fail, put, tree};

/// Runs the shared scenarios in every interleaving.
mod harness {
    pub(crate) use stolon_loom_tests::{put, put_in};

    pub(crate) fn run(race: super::Race) {
        stolon_loom_tests::explore(3, move || super::race(race, &[(race.query, race.answers)]));
    }
}

type Query = fn(&TreeReader) -> usize;

/// Runs the change of `race` against one reader for each of `queries`. Each reader asks once, and
/// its answer must be one of those given.
fn race(race: Race, queries: &[(Query, &'static [usize])]) {
    let (mut writer, reader) = tree();
    (race.prepare)(&mut writer);
    let readers: Vec<_> = queries
        .iter()
        .map(|&(query, allowed)| {
            let reader = reader.clone();
            thread::spawn(move || {
                let got = query(&reader);
                assert!(allowed.contains(&got), "expected one of {allowed:?}, got {got}");
            })
        })
        .collect();
    (race.write)(&mut writer);
    for reader in readers {
        reader.join().expect("the reader got a permitted answer");
    }
    writer.audit().expect("consistent");
}

const SPLIT: Race = Race {
    prepare: |w| put(w, &[1, 2], 0),
    write: |w| put(w, &[1, 9], 7),
    query: |r| r.query_match_len(&Namespace::default(), &[1, 2]),
    answers: &[2],
};

/// Goal: two readers at once, against a split and an eviction.
#[test]
fn two_readers_against_split_and_evict() {
    explore(2, || {
        let write = |w: &mut _| {
            (SPLIT.write)(w);
            let _ = w.evict(1);
        };
        let new_branch: Query = |r| r.query_match_len(&Namespace::default(), &[1, 9]);
        race(Race { write, ..SPLIT }, &[(SPLIT.query, &[1, 2]), (new_branch, &[1, 2])]);
    });
}

/// Goal: the models find a publication without release ordering.
#[test]
fn planted_relaxed_publish_is_caught() {
    plant(Bug::RelaxedPublish);
    must_fail("planted_relaxed_publish_is_caught", "Causality violation", 2, || {
        let publish = Race {
            prepare: |_| (),
            write: |w| put(w, &[1], 0),
            query: |r| r.query_match_len(&Namespace::default(), &[1]),
            answers: &[0, 1],
        };
        race(publish, &[(publish.query, publish.answers)]);
    });
}

/// Goal: the models find a node that is freed while a reader looks at it.
#[test]
fn planted_eager_free_is_caught() {
    plant(Bug::EagerFree);
    must_fail("planted_eager_free_is_caught", "access to freed memory", 2, || {
        race(SPLIT, &[(SPLIT.query, SPLIT.answers)]);
    });
}

/// Goal: the models find a split that loses the children of the run.
#[test]
fn planted_split_without_children_is_caught() {
    plant(Bug::SplitDropsChildren);
    must_fail("planted_split_without_children_is_caught", "expected one of [3]", 2, || {
        let split = SPLIT_ABOVE_CHILDREN;
        race(split, &[(split.query, split.answers)]);
    });
}
