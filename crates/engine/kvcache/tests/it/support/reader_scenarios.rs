//! Races between readers and one change of the tree. Each scenario is written once and runs twice:
//! on real threads in `tests/races.rs`, and in every interleaving in `loom_tests`. The including
//! crate supplies `crate::harness`, which runs a [`Race`] in its own way.

use crate::harness::{put, put_in, run};
use stolon_kvcache::{BlockId, Namespace, TreeReader, TreeWriter};

/// One race. Blocks hold one position.
#[derive(Clone, Copy)]
pub(crate) struct Race {
    /// Fills the empty tree before the readers start.
    pub(crate) prepare: fn(&mut TreeWriter),
    /// Changes the tree while the readers query it.
    pub(crate) write: fn(&mut TreeWriter),
    /// What a reader asks.
    pub(crate) query: fn(&TreeReader) -> usize,
    /// The exact answers before, during and after the change, in order of time. The answers of one
    /// reader must follow this order; it may skip any of them.
    pub(crate) answers: &'static [usize],
}

/// The smallest number of children whose table is changed in place. (Loom models use the smallest
/// possible tables, so that they need few steps.)
const WIDE: u32 = if cfg!(loom) { 2 } else { 9 };

fn nothing(_: &mut TreeWriter) {}

fn salted() -> Namespace {
    Namespace::builder().salt("s").build()
}

fn match_len(reader: &TreeReader, positions: &[u32]) -> usize {
    reader.query_match_len(&Namespace::default(), positions)
}

fn match_len_salted(reader: &TreeReader) -> usize {
    reader.query_match_len(&salted(), &[1, 2])
}

/// Adds the children `first..first + count` to the root, with block ids like the keys.
fn put_children(writer: &mut TreeWriter, first: u32, count: u32) {
    (first..first + count).for_each(|child| put(writer, &[child], child));
}

/// Goal: a new leaf is seen whole or not at all.
#[test]
fn publish_against_read() {
    run(Race {
        prepare: nothing,
        write: |w| put(w, &[1, 2, 3], 0),
        query: |r| match_len(r, &[1, 2, 3]),
        answers: &[0, 3],
    });
}

/// Goal: a leaf that is added below a node that has children is seen whole or not at all.
#[test]
fn publish_below_a_node_against_read() {
    run(Race {
        prepare: |w| {
            put(w, &[1, 2], 0);
            put(w, &[1, 2, 3], 10);
            put(w, &[1, 2, 4], 20);
        },
        write: |w| put(w, &[1, 2, 5, 6], 30),
        query: |r| match_len(r, &[1, 2, 5, 6]),
        answers: &[2, 4],
    });
}

/// Extends the leaf `[1, 2]` by a token.
fn grow_leaf(w: &mut TreeWriter) {
    let mut lease = w.acquire(&Namespace::default(), &[1, 2]);
    let _ = w.commit(&mut lease, &[1, 2, 3], &[BlockId(2)]).expect("a valid commit");
}

/// Goal: a commit that extends a leaf instead of adding a child never shows less than before.
#[test]
fn growth_of_a_leaf_against_read() {
    run(Race {
        prepare: |w| put(w, &[1, 2], 0),
        write: grow_leaf,
        query: |r| match_len(r, &[1, 2, 3]),
        answers: &[2, 3],
    });
}

/// Goal: while a run is split, after any of its blocks, readers always see all of it.
#[test]
fn split_against_read_at_every_boundary() {
    let writes: [fn(&mut TreeWriter); 3] =
        [|w| put(w, &[1, 9], 9), |w| put(w, &[1, 2, 9], 9), |w| put(w, &[1, 2, 3, 9], 9)];
    for write in writes {
        run(Race {
            prepare: |w| put(w, &[1, 2, 3, 4], 0),
            write,
            query: |r| match_len(r, &[1, 2, 3, 4]),
            answers: &[4],
        });
    }
}

/// Goal: the new branch of a split appears with one store. (The acquire before the commit splits
/// the run without changing any answer.)
#[test]
fn split_against_a_read_of_the_new_branch() {
    run(Race {
        prepare: |w| put(w, &[1, 2, 3], 0),
        write: |w| put(w, &[1, 9, 8], 9),
        query: |r| match_len(r, &[1, 9, 8]),
        answers: &[1, 3],
    });
    run(Race {
        prepare: |w| put(w, &[1, 2, 3], 0),
        write: |w| put(w, &[1, 2, 9], 7),
        query: |r| match_len(r, &[1, 2, 9]),
        answers: &[2, 3],
    });
}

/// A split of a node that has children.
pub(crate) const SPLIT_ABOVE_CHILDREN: Race = Race {
    prepare: |w| {
        put(w, &[1, 2, 3], 0);
        put(w, &[1, 2, 4], 10);
    },
    write: |w| put(w, &[1, 8], 20),
    query: |r| match_len(r, &[1, 2, 3]),
    answers: &[3],
};

/// Goal: a split passes the children on, so that everything below the run stays visible.
#[test]
fn split_above_children_against_read() {
    run(SPLIT_ABOVE_CHILDREN);
    run(Race { query: |r| match_len(r, &[1, 2, 4]), ..SPLIT_ABOVE_CHILDREN });
}

/// Goal: an evicted leaf is seen or not, its parent and its sibling stay visible, and nothing is
/// freed while a reader looks at it.
#[test]
fn evict_and_reclaim_against_read() {
    let race = Race {
        prepare: |w| {
            put(w, &[1, 2], 0);
            put(w, &[1, 3], 10);
        },
        write: |w| assert_eq!(w.evict(1), [BlockId(1)]),
        query: |r| match_len(r, &[1, 2]),
        answers: &[2, 1],
    };
    run(race);
    run(Race { query: |r| match_len(r, &[1, 3]), answers: &[2], ..race });
}

/// Goal: while the tail of a leaf is trimmed, readers see the old or the new length.
#[test]
fn trim_against_read() {
    run(Race {
        prepare: |w| put(w, &[1, 2, 3, 4], 0),
        write: |w| assert_eq!(w.evict(2), [BlockId(2), BlockId(3)]),
        query: |r| match_len(r, &[1, 2, 3, 4]),
        answers: &[4, 2],
    });
}

/// Goal: a chain of nodes that is merged into one stays whole for every reader.
#[test]
fn merge_against_read() {
    run(Race {
        prepare: |w| {
            put(w, &[1, 2], 0);
            put(w, &[1, 3, 4], 10);
        },
        // Without [1, 2], the node [1] has one child, and the two become one node.
        write: |w| {
            let _ = w.evict(1);
            assert_eq!(w.counts().nodes, 1);
        },
        query: |r| match_len(r, &[1, 3, 4]),
        answers: &[3],
    });
}

/// Goal: while a small table is replaced by a larger one, the other children stay visible.
#[test]
fn growth_of_a_table_against_read() {
    run(Race {
        prepare: |w| put_children(w, 10, WIDE - 1),
        write: |w| put_children(w, 100, if cfg!(loom) { 1 } else { 50 }),
        query: |r| match_len(r, &[10 + WIDE - 2]),
        answers: &[1],
    });
}

/// Goal: a child that is inserted into a wide table in place appears at once, and hides no other.
#[test]
fn insertion_in_a_wide_table_against_read() {
    let race = Race {
        prepare: |w| put_children(w, 10, if cfg!(loom) { WIDE } else { 20 }),
        write: |w| put(w, &[1], 0),
        query: |r| match_len(r, &[1]),
        answers: &[0, 1],
    };
    run(race);
    run(Race { query: |r| match_len(r, &[11]), answers: &[1], ..race });
}

/// Goal: when other children take over the slots of evicted ones, and an evicted child comes back
/// in another slot, readers never see a wrong child and miss none that stays.
#[test]
fn reuse_of_slots_in_a_wide_table_against_read() {
    const COUNT: u32 = if cfg!(loom) { 3 } else { 30 };
    const CHURN: u32 = if cfg!(loom) { 1 } else { 14 };
    let race = Race {
        prepare: |w| put_children(w, 10, COUNT),
        write: |w| {
            assert_eq!(w.evict(CHURN as usize).len(), CHURN as usize);
            put_children(w, 100, CHURN);
            assert_eq!(w.evict(CHURN as usize).len(), CHURN as usize);
            put_children(w, 10, CHURN);
        },
        query: |r| match_len(r, &[10]),
        answers: &[1, 0, 1],
    };
    run(race);
    run(Race { query: |r| match_len(r, &[10 + COUNT - 1]), answers: &[1], ..race });
}

/// Goal: a namespace appears together with its first leaf.
#[test]
fn a_new_namespace_against_read() {
    run(Race {
        prepare: nothing,
        write: |w| put_in(w, &salted(), &[1, 2], 0),
        query: match_len_salted,
        answers: &[0, 2],
    });
}

/// Goal: a namespace whose last block is evicted is pruned at once, is freed only after the readers
/// in it, and can come back.
#[test]
fn namespace_prune_against_read() {
    run(Race {
        prepare: |w| put_in(w, &salted(), &[1, 2], 0),
        write: |w| {
            assert_eq!(w.evict(2).len(), 2);
            assert_eq!(w.counts().namespaces, 0);
            put_in(w, &salted(), &[1], 7);
        },
        query: match_len_salted,
        answers: &[2, 0, 1],
    });
}

/// Goal: eviction of a namespace is seen as one change.
#[test]
fn evict_namespace_against_read() {
    run(Race {
        prepare: |w| put_in(w, &salted(), &[1, 2], 0),
        write: |w| assert_eq!(w.evict_namespace(&salted()).len(), 2),
        query: match_len_salted,
        answers: &[2, 0],
    });
}

/// Goal: when a prefix is evicted, readers of the sequences that start with it see them become
/// shorter, from the ends to what others share, and other sequences stay whole.
#[test]
fn evict_prefix_against_read() {
    let race = Race {
        prepare: |w| {
            put(w, &[1, 2, 3], 0);
            put(w, &[1, 2, 4], 10);
            put(w, &[1, 5], 20);
        },
        write: |w| assert_eq!(w.evict_prefix(&Namespace::default(), &[1, 2]).len(), 3),
        query: |r| match_len(r, &[1, 2, 3]),
        answers: &[3, 2, 1],
    };
    run(race);
    run(Race { query: |r| match_len(r, &[1, 5]), answers: &[2], ..race });
}

/// Goal: when a prefix is evicted and a lease holds a part of it, that part stays visible.
#[test]
fn evict_prefix_of_a_locked_prefix_against_read() {
    run(Race {
        prepare: |w| put(w, &[1, 2], 0),
        write: |w| {
            let lease = w.acquire(&Namespace::default(), &[1]);
            assert_eq!(w.evict_prefix(&Namespace::default(), &[1]), [BlockId(1)]);
            drop(lease);
            assert_eq!(w.evict_prefix(&Namespace::default(), &[1]), [BlockId(0)]);
        },
        query: |r| match_len(r, &[1, 2]),
        answers: &[2, 1, 0],
    });
}

/// Goal: a flush is seen as one change.
#[test]
fn flush_against_read() {
    run(Race {
        prepare: |w| put(w, &[1, 2], 0),
        write: |w| assert_eq!(w.flush().len(), 2),
        query: |r| match_len(r, &[1, 2]),
        answers: &[2, 0],
    });
}

/// Goal: a flush is seen as one change also where a lease holds some of the blocks, and the tree
/// can be filled again.
#[test]
fn flush_of_a_locked_prefix_against_read() {
    run(Race {
        prepare: |w| put(w, &[1, 2], 0),
        write: |w| {
            let lease = w.acquire(&Namespace::default(), &[1]);
            assert_eq!(w.flush(), [BlockId(1)]);
            drop(lease);
            assert_eq!(w.evict(1), [BlockId(0)]);
            put(w, &[1], 5);
        },
        query: |r| match_len(r, &[1, 2]),
        answers: &[2, 0, 1],
    });
}

fn match_hashes(reader: &TreeReader) -> usize {
    let base = Namespace::default();
    reader.query_match_hashes(&base, &reader.block_hashes(&base, &[1, 2, 3]))
}

/// Goal: a query by hashes sees all of a run while it is split, and then the trimmed run.
#[test]
fn query_by_hashes_against_split_and_trim() {
    run(Race {
        prepare: |w| put(w, &[1, 2, 3], 0),
        write: |w| put(w, &[1, 2, 9], 9),
        query: match_hashes,
        answers: &[3],
    });
    run(Race {
        prepare: |w| put(w, &[1, 2, 3], 0),
        write: |w| {
            put(w, &[1, 9], 7);
            assert_eq!(w.evict(1), [BlockId(2)]);
        },
        query: match_hashes,
        answers: &[3, 2],
    });
}

/// The tokens after `positions`, as the digits of a number.
fn continuation(reader: &TreeReader, positions: &[u32]) -> usize {
    let tokens = reader.continuation(&Namespace::default(), positions, 8);
    tokens.iter().fold(0, |number, &token| 10 * number + token as usize)
}

/// Goal: what follows a prefix is read whole, before or after a commit that adds to it.
#[test]
fn continuation_against_growth_of_a_leaf() {
    run(Race {
        prepare: |w| put(w, &[1, 2], 0),
        write: grow_leaf,
        query: |r| continuation(r, &[1]),
        answers: &[2, 23],
    });
}

/// Goal: while a run is split, what follows a prefix is the run or, once it is there, the branch
/// that was used later, and never a mixture.
#[test]
fn continuation_against_split() {
    let race = Race {
        prepare: |w| put(w, &[1, 2, 3], 0),
        write: |w| put(w, &[1, 9, 8], 7),
        query: |r| continuation(r, &[1]),
        answers: &[23, 98],
    };
    run(race);
    run(Race { query: |r| continuation(r, &[1, 2]), answers: &[3], ..race });
}

/// Goal: what follows a prefix stays there while a sibling is evicted and the rest is merged into
/// one run.
#[test]
fn continuation_against_merge() {
    let race = Race {
        prepare: |w| {
            put(w, &[1, 2], 0);
            put(w, &[1, 3, 4], 10);
        },
        write: |w| {
            let _ = w.evict(1);
            assert_eq!(w.counts().nodes, 1);
        },
        query: |r| continuation(r, &[1]),
        answers: &[34],
    };
    run(race);
    run(Race { query: |r| continuation(r, &[]), answers: &[134], ..race });
}

/// Goal: what follows a prefix becomes shorter as it is evicted, and is not freed while it is read.
#[test]
fn continuation_against_evict() {
    run(Race {
        prepare: |w| put(w, &[1, 2, 3, 4], 0),
        write: |w| {
            assert_eq!(w.evict(2), [BlockId(2), BlockId(3)]);
            assert_eq!(w.evict(2).len(), 2);
            // Frees the nodes that no guard keeps any longer.
            let _ = w.counts();
        },
        query: |r| continuation(r, &[1]),
        answers: &[234, 2, 0],
    });
}
