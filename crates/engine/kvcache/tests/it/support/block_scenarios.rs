//! Races between the owners of the writer, of leases and of steps. Each scenario is written once
//! and runs twice: on real threads in `tests/races.rs`, and in every interleaving in `loom_tests`.
//! The including crate supplies `crate::harness`: its synchronization types, and `repeat`, which
//! runs a scenario in its own way.

use crate::harness::sync::{Arc, AtomicBool, Barrier, Mutex, MutexGuard, Ordering, thread};
use crate::harness::{put, repeat, stagger};
use stolon_kvcache::{
    BlockId, BlockPool, EvictedBlocks, EvictionPolicy, Namespace, StepFence, TreeBuilder,
    TreeReader, TreeWriter, prefix_tree,
};

fn base() -> Namespace {
    Namespace::default()
}

/// A writer that threads take turns at, over a tree of blocks of one position that holds `prompt`.
fn shared_writer(prompt: &[u32]) -> (Arc<Mutex<TreeWriter>>, TreeReader) {
    let (mut writer, reader) = prefix_tree(1).expect("a block size");
    put(&mut writer, prompt, 0);
    (Arc::new(Mutex::new(writer)), reader)
}

fn lock(writer: &Mutex<TreeWriter>) -> MutexGuard<'_, TreeWriter> {
    writer.lock().expect("no panic under the lock")
}

/// Runs `first` on a new thread and `second` on this one, both starting at the same time.
fn together<A: Send + 'static, B>(
    first: impl FnOnce() -> A + Send + 'static,
    second: impl FnOnce() -> B,
) -> (A, B) {
    let start = Arc::new(Barrier::new(2));
    let first = {
        let start = start.clone();
        thread::spawn(move || {
            start.wait();
            stagger(0);
            first()
        })
    };
    start.wait();
    stagger(1);
    let second = second();
    (first.join().expect("the first thread does not panic"), second)
}

/// A query, an acquire, and an eviction on another thread.
pub(crate) fn query_acquire_and_eviction() {
    query_acquire_and(|writer| writer.evict(2));
}

/// The same with an eviction of the prefix.
pub(crate) fn query_acquire_and_eviction_of_the_prefix() {
    query_acquire_and(|writer| writer.evict_prefix(&base(), &[1]));
}

fn query_acquire_and(evict: fn(&mut TreeWriter) -> EvictedBlocks) {
    let (writer, reader) = shared_writer(&[1, 2, 3]);
    let evictor = writer.clone();
    let (evicted, (hint, lease)) = together(
        move || evict(&mut lock(&evictor)),
        || {
            let hint = reader.query_match_len(&base(), &[1, 2, 3]);
            (hint, lock(&writer).acquire(&base(), &[1, 2, 3]))
        },
    );
    assert!(lease.len() <= hint, "nothing was added after the query");
    let kept = lease.blocks().iter().all(|block| evicted.iter().all(|gone| gone != block));
    assert!(kept, "an acquired block was evicted");
    assert_eq!(reader.query_match_len(&base(), &[1, 2, 3]), lease.len());
    assert_eq!(lease.len() + evicted.len(), 3);
    lock(&writer).audit().expect("consistent");
}

/// Goal: the answer of a query may be out of date; an acquired prefix stays, and is not evicted.
#[test]
fn evict_against_acquire() {
    repeat(query_acquire_and_eviction);
}

/// Goal: blocks that a request has acquired stay when its prefix is evicted on another thread.
#[test]
fn evict_prefix_against_acquire() {
    repeat(query_acquire_and_eviction_of_the_prefix);
}

/// Two requests of different priorities with one prefix, on two threads, and a third prefix.
pub(crate) fn priorities_of_two_requests() {
    let tree = TreeBuilder::new(1).eviction_policy(EvictionPolicy::Priority);
    let (mut writer, reader) = tree.build().expect("a block size");
    put(&mut writer, &[1, 2], 0);
    put(&mut writer, &[7], 10);
    writer.set_priority(&base(), &[7], 5);
    let writer = Arc::new(Mutex::new(writer));
    let request = |writer: Arc<Mutex<TreeWriter>>, priority: i32| {
        move || drop(lock(&writer).acquire_prioritized(&base(), &[1, 2], priority))
    };
    together(request(writer.clone(), 9), request(writer.clone(), 1));
    let mut writer = lock(&writer);
    assert_eq!(writer.evict(1), [BlockId(10)], "expected the order of priorities");
    assert_eq!(reader.query_match_len(&base(), &[1, 2]), 2);
    writer.audit().expect("consistent");
}

/// Goal: a prefix has the largest priority of its users, in any order of use.
#[test]
fn priorities_against_each_other() {
    repeat(priorities_of_two_requests);
}

/// Goal: a pin holds from the call on, with or without an eviction on another thread.
#[test]
fn evict_against_pin() {
    repeat(|| {
        let (writer, reader) = shared_writer(&[1, 2]);
        let evictor = writer.clone();
        let (_, pin) =
            together(move || lock(&evictor).evict(2), || lock(&writer).pin(&base(), &[1, 2]));
        let mut writer = lock(&writer);
        let held = writer.pins().first().map_or(0, |pin| pin.block_count);
        assert_eq!(pin.is_ok(), held == 2);
        let _ = writer.evict(2);
        assert_eq!(reader.query_match_len(&base(), &[1, 2]), held);
    });
}

/// Goal: a prefix whose lease ends on another thread is evicted after that, never before.
#[test]
fn evict_against_the_end_of_a_lease() {
    repeat(|| {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        put(&mut writer, &[1, 2], 0);
        let lease = writer.acquire(&base(), &[1, 2]);
        let in_use = Arc::new(AtomicBool::new(true));
        let end = in_use.clone();
        let (_, evicted) = together(
            move || {
                end.store(false, Ordering::Relaxed);
                drop(lease);
            },
            || {
                let evicted = writer.evict(2);
                let ended = !in_use.load(Ordering::Relaxed);
                assert!(evicted.is_empty() || ended, "evicted while in use");
                evicted
            },
        );
        assert_eq!(evicted.len() + writer.evict(2).len(), 2);
        writer.audit().expect("consistent");
    });
}

/// Goal: when two requests that computed the same prompt commit it at the same time, one copy
/// stays, and both continue with it.
#[test]
fn commit_against_commit() {
    repeat(|| {
        let (mut writer, _reader) = prefix_tree(1).expect("a block size");
        let [first, second] = [0, 1].map(|_| writer.acquire(&base(), &[1, 2, 3]));
        let writer = Arc::new(Mutex::new(writer));
        let commit = |writer: Arc<Mutex<TreeWriter>>, mut lease, ids: [u32; 3]| {
            move || {
                lock(&writer)
                    .commit(&mut lease, &[1, 2, 3], &ids.map(BlockId))
                    .expect("a valid commit")
            }
        };
        let commits = together(
            commit(writer.clone(), first, [0, 1, 2]),
            commit(writer.clone(), second, [10, 11, 12]),
        );
        assert_eq!(commits.0.blocks, commits.1.blocks);
        assert_eq!(commits.0.duplicates.len() + commits.1.duplicates.len(), 3);
        let mut writer = lock(&writer);
        assert_eq!((writer.counts().cached, writer.counts().evictable), (3, 3));
        writer.audit().expect("consistent");
    });
}

/// A step that uses `count` blocks, and a pool that gets them back with `give_back` and hands them
/// out again. Returns the blocks that were handed out before all was done, if there were any.
fn reuse_around_a_step(
    (pool, fence): (&mut BlockPool, &StepFence),
    count: usize,
    give_back: impl FnOnce(&mut BlockPool),
) -> Option<Vec<BlockId>> {
    let in_use = Arc::new(AtomicBool::new(true));
    let ticket = fence.begin();
    let step = in_use.clone();
    let ((), handed_out) = together(
        move || {
            // Represents the step's last access to the blocks.
            step.store(false, Ordering::Relaxed);
            drop(ticket);
        },
        || {
            give_back(pool);
            let again = pool.reserve(count).ok()?;
            assert!(!in_use.load(Ordering::Relaxed), "handed out during a running step");
            Some(again.blocks().to_vec())
        },
    );
    assert_eq!(pool.reserve(count).map(|lease| lease.len()), Ok(count), "free after the step");
    pool.audit().expect("consistent");
    handed_out
}

/// A step that uses a block, and a pool that gets the block back and hands it out again.
pub(crate) fn reuse_during_a_step() {
    let (mut pool, fence) = BlockPool::new(1).expect("a valid count");
    let lease = pool.reserve(1).expect("a free block");
    let again = reuse_around_a_step((&mut pool, &fence), 1, |_| drop(lease));
    assert!(again.is_none_or(|blocks| blocks == [BlockId(0)]));
}

/// Goal: a block that returns to the pool during a step is handed out only after that step.
#[test]
fn reuse_against_a_running_step() {
    repeat(reuse_during_a_step);
}

/// Goal: leases that end on two threads at once return every block exactly once.
#[test]
fn leases_that_end_on_other_threads() {
    repeat(|| {
        let (mut pool, _fence) = BlockPool::new(2).expect("a valid count");
        let [first, second] = [0, 1].map(|_| pool.reserve(1).expect("a free block"));
        let other = thread::spawn(move || drop(first));
        together(move || drop(second), || drop(pool.reserve(1)));
        other.join().expect("dropped");
        assert_eq!(pool.reserve(2).map(|lease| lease.len()), Ok(2));
        pool.audit().expect("consistent");
    });
}

/// A tree with checkpoints of `block_count` blocks, over a pool of six blocks of one position.
fn with_checkpoints(block_count: usize) -> (TreeWriter, TreeReader, BlockPool, StepFence) {
    let tree = TreeBuilder::new(1).checkpoint_blocks(block_count);
    let (mut writer, reader) = tree.build().expect("a block size");
    let (mut pool, fence) = BlockPool::new(6).expect("a valid count");
    let mut lease = writer.acquire(&base(), &[]);
    let mut private = pool.reserve(2).expect("free blocks");
    writer.commit_from(&mut lease, &[1, 2], &mut private).expect("a valid commit");
    (writer, reader, pool, fence)
}

fn checkpoint(writer: &mut TreeWriter, pool: &mut BlockPool, positions: &[u32]) {
    let mut private = pool.reserve(writer.checkpoint_blocks()).expect("free blocks");
    let lease = writer.commit_checkpoint(&base(), positions, &mut private).expect("valid");
    assert!(lease.is_some(), "its positions are cached");
}

/// A request that resumes from a checkpoint, and an eviction on another thread.
pub(crate) fn resume_and_eviction() {
    let (mut writer, reader, mut pool, _fence) = with_checkpoints(1);
    checkpoint(&mut writer, &mut pool, &[1]);
    let writer = Arc::new(Mutex::new(writer));
    let evictor = writer.clone();
    let (evicted, (hint, lease)) = together(
        move || lock(&evictor).evict(3),
        || {
            let hint = reader.query_resume(&base(), &[1, 2]);
            (hint, lock(&writer).acquire_checkpoint(&base(), &[1, 2], 0))
        },
    );
    let resume = lease.as_ref().map_or(0, |lease| lease.len());
    assert!(resume <= hint.resume && hint.resume <= hint.cached, "nothing was added");
    let blocks = lease.iter().flat_map(|lease| lease.blocks());
    let kept = blocks.into_iter().all(|block| evicted.iter().all(|gone| gone != block));
    assert!(kept, "an acquired checkpoint was evicted");
    assert_eq!(reader.query_resume(&base(), &[1, 2]).resume, resume);
    assert_eq!(evicted.len(), if resume == 1 { 1 } else { 3 });
    lock(&writer).audit().expect("consistent");
}

/// Goal: a checkpoint that a request has acquired stays, with its prefix.
#[test]
fn evict_against_resume() {
    repeat(resume_and_eviction);
}

/// A query while checkpoints of two blocks are published and evicted, and their blocks are used for
/// others.
pub(crate) fn query_and_checkpoints() {
    let (mut writer, reader, mut pool, _fence) = with_checkpoints(2);
    let change = move || {
        checkpoint(&mut writer, &mut pool, &[1]);
        pool.release(writer.evict(3));
        checkpoint(&mut writer, &mut pool, &[1]);
        writer.audit().expect("consistent");
    };
    let ((), found) = together(change, || reader.query_resume(&base(), &[1, 2, 3]));
    // The position after the first checkpoint is of no use to requests, so it is evicted first.
    let answers = [(2, 0), (2, 1), (1, 1), (1, 0)];
    assert!(
        answers.contains(&(found.cached, found.resume)),
        "expected a checkpoint, got {found:?}"
    );
}

/// Goal: a lock-free query sees a checkpoint whole or not at all, and never a length without one,
/// while checkpoints are published and evicted and their blocks are used for others.
#[test]
fn query_against_checkpoints() {
    repeat(query_and_checkpoints);
}

/// A step that resumes from a checkpoint whose request is canceled, so that its block is evicted
/// and handed out again.
pub(crate) fn reuse_of_a_checkpoint() {
    let (mut writer, _reader, mut pool, fence) = with_checkpoints(1);
    checkpoint(&mut writer, &mut pool, &[1]);
    let _others = pool.reserve(3).expect("the free blocks");
    let lease = writer.acquire_checkpoint(&base(), &[1, 2], 0).expect("it is cached");
    reuse_around_a_step((&mut pool, &fence), 3, |pool| {
        drop(lease);
        pool.release(writer.evict(3));
    });
}

/// Goal: the block of a checkpoint is reused only after the step that resumes from it.
#[test]
fn reuse_of_a_checkpoint_against_a_running_step() {
    repeat(reuse_of_a_checkpoint);
}
