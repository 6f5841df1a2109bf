use super::*;
use crate::{Commit, EvictedBlock, Namespace};
use proptest::prelude::*;

/// Marks the first `count` blocks of a lease as committed, as a tree does that takes them.
fn commit_front(lease: &mut BlockLease, count: usize) -> Vec<BlockId> {
    let blocks: Vec<BlockId> = lease.blocks().iter().copied().take(count).collect();
    lease.settle(&Commit { blocks: blocks.clone(), duplicates: Vec::new() });
    blocks
}

/// These blocks, as a tree returns them that got them from `pool`.
fn evicted(pool: &BlockPool, ids: Vec<BlockId>) -> EvictedBlocks {
    let block = |id| EvictedBlock { id, namespace: Namespace::default(), hash: 0 };
    EvictedBlocks { blocks: ids.into_iter().map(block).collect(), pool: Some(pool.queue.clone()) }
}

fn ids(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}

/// Goal: a reservation that cannot be satisfied changes nothing and reports what is missing.
#[test]
fn a_shortage_changes_nothing() {
    let (mut pool, _fence) = BlockPool::new(4).expect("a valid count");
    let lease = pool.reserve(3).expect("4 are free");
    assert_eq!(lease.blocks(), ids(&[0, 1, 2]));
    let shortage = pool.reserve(2).expect_err("1 is free");
    assert_eq!(shortage, Shortage { requested: 2, free: 1, fenced: 0 });
    assert_eq!(shortage.missing(), 1);
    assert_eq!(pool.counts(), PoolCounts { free: 1, reserved: 3, ..PoolCounts::default() });
    pool.audit().expect("consistent");
}

/// Goal: dropping a lease returns its blocks, except those that were committed or split off.
#[test]
fn a_dropped_lease_returns_what_it_still_holds() {
    let (mut pool, _fence) = BlockPool::new(4).expect("a valid count");
    let mut lease = pool.reserve(4).expect("free");
    let committed = commit_front(&mut lease, 1);
    assert_eq!(committed, ids(&[0]));
    let rest = lease.split(1);
    drop(lease);
    assert_eq!(pool.counts().reserved, 1);
    assert_eq!(pool.counts().committed, 1);
    drop(rest);
    pool.release(evicted(&pool, committed));
    assert_eq!(pool.reserve(4).expect("all are back").len(), 4);
    pool.audit().expect("consistent");
}

/// Goal: a block that is returned during a step is handed out only after that step, and does not
/// wait for steps that began later.
#[test]
fn a_block_waits_for_the_steps_that_began_before_its_return() {
    let (mut pool, fence) = BlockPool::new(1).expect("a valid count");
    let lease = pool.reserve(1).expect("free");
    let first = fence.begin();
    drop(lease);
    assert!(pool.reserve(1).is_err(), "the first step may still access the block");
    let second = fence.begin();
    drop(first);
    assert!(pool.reserve(1).is_ok(), "the second step began after the return");
    drop(second);
}

/// Goal: steps may end in any order; the oldest running one counts.
#[test]
fn steps_may_end_in_any_order() {
    let (mut pool, fence) = BlockPool::new(1).expect("a valid count");
    let lease = pool.reserve(1).expect("free");
    let (first, second) = (fence.begin(), fence.begin());
    drop(lease);
    assert!(pool.reserve(1).is_err());
    drop(second);
    assert!(pool.reserve(1).is_err(), "the first one is still running");
    drop(first);
    assert!(pool.reserve(1).is_ok());
}

/// Goal: blocks of another pool, and blocks that were committed by their ids, are refused and
/// reported.
#[test]
fn blocks_of_others_are_refused() {
    let (mut pool, _fence) = BlockPool::new(2).expect("a valid count");
    let committed = commit_front(&mut pool.reserve(1).expect("free"), 1);
    let (other, _fence) = BlockPool::new(2).expect("a valid count");
    pool.release(evicted(&other, committed.clone()));
    pool.release(EvictedBlocks { pool: None, ..evicted(&pool, committed.clone()) });
    assert_eq!(pool.counts().free, 1);
    pool.release(evicted(&pool, committed));
    assert_eq!(pool.counts().free, 2);
    let misuse = AuditError::Misuse { expected: "committed", count: 2 };
    assert_eq!(pool.audit(), Err(misuse));
}

/// Goal: a lease that was appended to another keeps the order of its blocks, and all return.
#[test]
fn appended_leases_keep_their_blocks_in_order() {
    let (mut pool, _fence) = BlockPool::new(4).expect("a valid count");
    let mut lease = pool.reserve(1).expect("free");
    lease.append(pool.reserve(2).expect("free")).expect("of the same pool");
    assert_eq!(lease.blocks(), ids(&[0, 1, 2]));
    drop(lease);
    assert_eq!(pool.reserve(4).expect("all are back").len(), 4);
}

proptest! {
    /// Goal: in any sequence of operations, every block is in exactly one state, and no block is
    /// handed out while a step is running that may access it.
    #[test]
    fn blocks_are_conserved(ops in proptest::collection::vec((0u8..6, 0usize..5), 1..80)) {
        let (mut pool, fence) = BlockPool::new(8).expect("a valid count");
        let (mut leases, mut committed, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
        // Each running step with the blocks that it may access.
        for (op, n) in ops {
            match op {
                0 => {
                    if let Ok(lease) = pool.reserve(n) {
                        for (_, touched) in &tickets {
                            let touched: &Vec<BlockId> = touched;
                            prop_assert!(lease.blocks().iter().all(|b| !touched.contains(b)));
                        }
                        leases.push(lease);
                    }
                }
                1 if n < leases.len() => drop(leases.remove(n)),
                2 if n < leases.len() => committed.extend(commit_front(&mut leases[n], n + 1)),
                3 => {
                    let out = committed.split_off(committed.len() - n.min(committed.len()));
                    pool.release(evicted(&pool, out));
                }
                4 => {
                    let used = leases.iter().flat_map(|lease: &BlockLease| lease.blocks());
                    tickets.push((fence.begin(), used.chain(&committed).copied().collect()));
                }
                5 if n < tickets.len() => drop(tickets.remove(n)),
                _ => {}
            }
            let counts = pool.counts();
            prop_assert_eq!(counts.free + counts.fenced + counts.reserved + counts.committed, 8);
            prop_assert_eq!(counts.committed, committed.len());
            prop_assert_eq!(counts.reserved, leases.iter().map(BlockLease::len).sum::<usize>());
            prop_assert_eq!(pool.audit(), Ok(()));
        }
    }
}

/// Goal: a ticket that was forgotten shows, and blocks that are returned after it are not handed out.
#[test]
fn a_forgotten_ticket_shows() {
    let (mut pool, fence) = BlockPool::new(2).expect("a valid count");
    drop(fence.begin());
    assert_eq!(fence.running(), 0);
    // As if it were forgotten, but without a leak that a sanitizer would report.
    let forgotten = fence.begin();
    drop(pool.reserve(2).expect("all are free"));
    assert_eq!((fence.running(), pool.counts().fenced), (1, 2));
    assert!(pool.reserve(1).is_err());
    pool.audit().expect("consistent");
    drop(forgotten);
}
