//! Arbitrary operations on the block pool and its fence: every block has one owner, and no block is
//! handed out during a step that was running when the block was returned.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;
use stolon_kvcache::{BlockId, BlockLease, BlockPool, Namespace, StepTicket, prefix_tree};

const BLOCKS: usize = 24;

#[derive(Arbitrary, Debug)]
enum Op {
    Reserve(u8),
    Drop(u8),
    Split(u8, u8),
    Append(u8, u8),
    Commit(u8, u8),
    Release,
    Begin,
    End(u8),
}

/// A running step of the executor.
struct Running {
    ticket: StepTicket,
    /// Blocks that were returned while it was running.
    returned: HashSet<BlockId>,
}

fn pick<T>(all: &mut Vec<T>, which: u8) -> Option<T> {
    (!all.is_empty()).then(|| all.swap_remove(usize::from(which) % all.len()))
}

fuzz_target!(|ops: Vec<Op>| {
    let (mut pool, fence) = BlockPool::new(BLOCKS).expect("a valid count");
    let mut leases: Vec<BlockLease> = Vec::new();
    // Takes the committed blocks. Each prompt is new, so it takes all of them.
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let mut next_position = 0;
    let mut committed: Vec<BlockId> = Vec::new();
    let mut running: Vec<Running> = Vec::new();
    let record_return = |running: &mut Vec<Running>, blocks: &[BlockId]| {
        running.iter_mut().for_each(|step| step.returned.extend(blocks));
    };
    for op in ops {
        match op {
            Op::Reserve(count) => {
                let free = pool.counts().free;
                let lease = pool.reserve(count.into());
                assert_eq!(lease.is_ok(), usize::from(count) <= free);
                for block in lease.iter().flat_map(BlockLease::blocks) {
                    assert!(running.iter().all(|step| !step.returned.contains(block)));
                }
                leases.extend(lease);
            }
            Op::Drop(which) => {
                if let Some(lease) = pick(&mut leases, which) {
                    record_return(&mut running, lease.blocks());
                }
            }
            Op::Split(which, count) => {
                if let Some(mut lease) = pick(&mut leases, which) {
                    leases.push(lease.split(count.into()));
                    leases.push(lease);
                }
            }
            Op::Append(left, right) => {
                if leases.len() >= 2
                    && let Some(right) = pick(&mut leases, right)
                    && let Some(mut left) = pick(&mut leases, left)
                {
                    left.append(right).expect("leases of one pool");
                    leases.push(left);
                }
            }
            Op::Commit(which, count) => {
                if let Some(mut lease) = pick(&mut leases, which) {
                    let count = lease.len().min(count.into());
                    let positions: Vec<u32> = (next_position..).take(count).collect();
                    next_position += count as u32;
                    let mut prefix = writer.acquire(&Namespace::default(), &positions);
                    let taken = writer.commit_from(&mut prefix, &positions, &mut lease);
                    assert_eq!(taken, Ok(count));
                    committed.extend(prefix.blocks());
                    leases.push(lease);
                }
            }
            Op::Release => {
                let evicted = writer.evict(1);
                for block in evicted.iter() {
                    committed.retain(|id| *id != block.id);
                    record_return(&mut running, &[block.id]);
                }
                pool.release(evicted);
            }
            Op::Begin => running.push(Running { ticket: fence.begin(), returned: HashSet::new() }),
            Op::End(which) => {
                if let Some(step) = pick(&mut running, which) {
                    drop(step.ticket);
                }
            }
        }
        let reserved = leases.iter().map(BlockLease::len).sum::<usize>();
        let counts = pool.counts();
        assert_eq!((counts.reserved, counts.committed), (reserved, committed.len()));
        assert_eq!(counts.free + counts.fenced + reserved + committed.len(), BLOCKS);
        pool.audit().expect("consistent");
        let owned: HashSet<BlockId> =
            leases.iter().flat_map(BlockLease::blocks).chain(&committed).copied().collect();
        assert_eq!(owned.len(), reserved + committed.len(), "one owner per block");
    }
});
