//! The tree's readers against each kind of change that the writer can publish. Blocks hold one
//! position, and tables with at least two children are changed in place.
#![cfg(all(loom, not(crossbeam_loom)))]

#[path = "../../crates/engine/kvcache/tests/it/support/reader_scenarios.rs"]
mod scenarios;

use loom::thread;
use scenarios::{Race, SPLIT_ABOVE_CHILDREN};
use stolon_kvcache::planted::{Bug, plant};
use stolon_kvcache::{Namespace, TreeReader, TreeWriter};
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
/// its answer must be in the list of the query.
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

/// A query for many prompts.
fn match_lens(reader: &TreeReader) -> usize {
    let mut lens = Vec::new();
    reader.query_match_lens(&Namespace::default(), &[&[1, 2]], &mut lens);
    lens[0]
}

/// A query by the hash of a block.
fn cached_prefix(reader: &TreeReader) -> usize {
    let hashes = reader.block_hashes(&Namespace::default(), &[1, 2]);
    reader.cached_prefix(hashes[1]).map_or(0, |prefix| prefix.positions.len())
}

/// The number of blocks in a dump.
fn dump(reader: &TreeReader) -> usize {
    reader.dump().nodes.iter().map(|node| node.block_count).sum()
}

/// Goal: the queries that no other model runs keep the nodes that they look at from being freed.
#[test]
fn rare_queries_against_evict() {
    for query in [match_lens as Query, cached_prefix, dump] {
        explore(3, move || {
            let evict = |w: &mut TreeWriter| {
                assert_eq!(w.evict(2).len(), 2);
                // Frees the nodes that no guard keeps any longer.
                let _ = w.counts();
            };
            let prepare = |w: &mut TreeWriter| put(w, &[1, 2], 0);
            let answers: &[usize] = &[0, 2];
            race(Race { prepare, write: evict, query, answers }, &[(query, answers)]);
        });
    }
}

/// Goal: a dump shows a child that is added to a wide table completely or not at all, and
/// everything that it has shown is found afterward.
#[test]
fn a_dump_during_a_publication_in_place() {
    explore(3, || {
        let (mut writer, reader) = tree();
        put(&mut writer, &[1], 1);
        put(&mut writer, &[2], 2);
        let reading = thread::spawn(move || {
            let blocks = dump(&reader);
            let found = reader.query_match_len(&Namespace::default(), &[3]);
            assert!(blocks == 2 || (blocks, found) == (3, 1), "{blocks} blocks, {found} found");
        });
        put(&mut writer, &[3], 3);
        reading.join().expect("the reader saw a permitted state");
    });
}

/// Goal: a reader that has read the number of a change sees the change.
#[test]
fn a_version_shows_its_changes() {
    let versions: [fn(&TreeReader) -> (u64, usize); 2] = [
        |r| (r.tree_version(), r.query_match_len(&Namespace::default(), &[1, 2])),
        |r| {
            let dump = r.dump();
            (dump.version, dump.nodes.iter().map(|node| node.block_count).sum())
        },
    ];
    for version in versions {
        explore(3, move || {
            let (mut writer, reader) = tree();
            let before = reader.tree_version();
            let reading = thread::spawn(move || {
                let (version, cached) = version(&reader);
                assert!(version == before || cached == 2, "a version without its change");
            });
            put(&mut writer, &[1, 2], 0);
            reading.join().expect("the reader saw the change");
        });
    }
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

/// Goal: the models find a node that is freed while its tokens are read as a continuation.
#[test]
fn planted_eager_free_below_a_continuation_is_caught() {
    plant(Bug::EagerFree);
    must_fail(
        "planted_eager_free_below_a_continuation_is_caught",
        "access to freed memory",
        2,
        || {
            let query: Query =
                |r| r.continuation(&Namespace::default(), &[1], 8).iter().sum::<u32>() as usize;
            race(Race { query, ..SPLIT }, &[(query, &[2, 9])]);
        },
    );
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
