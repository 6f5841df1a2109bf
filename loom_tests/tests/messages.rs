//! The order of messages between the admission, prefix tree and block allocator actors.
//!
//! The models drive the code of the engine: [`BlockAllocator`] reserves, evicts, settles and
//! flushes, and [`commit`] adds blocks to the tree. An actor handles one message at a time, from
//! start to end; here an actor is a lock that is held for as long as it handles a message. The
//! allocator calls the tree while it handles its own messages. Each of these calls takes the tree's
//! lock anew, so other messages to the tree can come between two of them. Leases and steps end on
//! other threads.
#![cfg(all(loom, not(crossbeam_loom)))]

use std::convert::Infallible;

use futures::FutureExt;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;
use stolon_kvcache::{
    BlockId, BlockLease, BlockPool, EvictedBlocks, Namespace, PrefixLease, StepFence, TreeCounts,
    TreeWriter,
};
use stolon_loom_tests::{explore, must_fail, tree};
use stolon_scheduler::{
    BlockAllocator, CommitItem, Committed, Evicted, EvictionDemand, Removal, TreeAccess, commit,
    evict, remove,
};

/// The prefix tree's actor, as the allocator's actor uses it: it takes the lock once for each
/// message.
#[derive(Clone)]
struct TreeActor(Arc<Mutex<TreeWriter>>);

impl TreeActor {
    fn lock(&self) -> MutexGuard<'_, TreeWriter> {
        self.0.lock().expect("no panic under the lock")
    }
}

impl TreeAccess for TreeActor {
    type Error = Infallible;

    async fn evict(&mut self, demand: EvictionDemand, note: bool) -> Result<Evicted, Infallible> {
        Ok(evict(&mut self.lock(), demand, note))
    }

    async fn flush(&mut self) -> Result<EvictedBlocks, Infallible> {
        Ok(self.lock().flush())
    }

    async fn remove(&mut self, removal: Removal) -> Result<EvictedBlocks, Infallible> {
        Ok(remove(&mut self.lock(), &removal))
    }

    async fn audit(&mut self) -> Result<Result<TreeCounts, String>, Infallible> {
        let mut tree = self.lock();
        let checked = tree.audit().map_err(|error| error.to_string());
        Ok(checked.map(|_| tree.counts()))
    }
}

/// The two actors, and the fence that the executor's steps hold.
#[derive(Clone)]
struct Actors {
    tree: TreeActor,
    allocator: Arc<Mutex<BlockAllocator>>,
    fence: StepFence,
}

/// The result of a call whose every await completes at once, because locks block instead.
fn answered<T>(call: impl Future<Output = Result<T, Infallible>>) -> T {
    let result = call.now_or_never().expect("the tree answers at once");
    result.unwrap_or_else(|never| match never {})
}

impl Actors {
    /// The actors of a pool of `block_count` blocks. The first blocks hold the cached `prompt`.
    fn new(block_count: usize, prompt: &[u32]) -> Actors {
        let (writer, _reader) = tree();
        let (pool, fence) = BlockPool::new(block_count).expect("a valid count");
        let actors = Actors {
            tree: TreeActor(Arc::new(Mutex::new(writer))),
            allocator: Arc::new(Mutex::new(BlockAllocator::new(pool, 0))),
            fence,
        };
        let lease = actors.acquire(prompt);
        let reserved = actors.reserve(prompt.len()).expect("all blocks are free");
        drop(actors.commit(lease, reserved, prompt));
        actors
    }

    fn allocator(&self) -> MutexGuard<'_, BlockAllocator> {
        self.allocator.lock().expect("no panic under the lock")
    }

    /// A message to the tree.
    fn acquire(&self, prompt: &[u32]) -> PrefixLease {
        self.tree.lock().acquire(&Namespace::default(), prompt)
    }

    /// A message to the allocator, which sends at most one to the tree.
    fn reserve(&self, count: usize) -> Option<BlockLease> {
        answered(self.allocator().reserve(&mut self.tree.clone(), count, None)).lease
    }

    /// A message to the tree, then one to the allocator.
    fn commit(&self, lease: PrefixLease, reserved: BlockLease, prompt: &[u32]) -> PrefixLease {
        let tokens = std::sync::Arc::new(prompt.to_vec());
        let item = CommitItem { tokens, len: prompt.len(), lease, reserved };
        let Committed { lease, reserved } = commit(&mut self.tree.lock(), item);
        drop(reserved);
        lease
    }

    /// A message to the allocator, which sends one to the tree.
    fn flush(&self) {
        answered(self.allocator().flush(&mut self.tree.clone()));
    }

    /// Checks an engine in which nothing runs: each block is free or cached, and all of them can
    /// be reserved.
    fn check(&self, block_count: usize) {
        let mut tree = self.tree.clone();
        answered(self.allocator().settle(&mut tree));
        let counts = self.tree.lock().counts();
        assert_eq!((counts.locked, counts.detached), (0, 0), "all leases have ended");
        assert_eq!(self.allocator().pool_counts().committed, counts.cached, "no block is lost");
        let audit = answered(self.allocator().audit(&mut tree));
        audit.expect("tree and pool are consistent");
        assert_eq!(self.reserve(block_count).map(|lease| lease.len()), Some(block_count));
    }
}

/// Goal: a request that reserves blocks gets those of another request only after that one has
/// ended, and never those that it has locked itself.
#[test]
fn reserve_against_the_end_of_another_request() {
    explore(3, || {
        let actors = Actors::new(3, &[1, 2]);
        let other = actors.acquire(&[1, 2]);
        let running = Arc::new(AtomicBool::new(true));
        let end = {
            let running = running.clone();
            thread::spawn(move || {
                running.store(false, Ordering::Relaxed);
                drop(other);
            })
        };
        let lease = actors.acquire(&[1, 8, 9]);
        assert_eq!(lease.blocks(), [BlockId(0)]);
        if let Some(reserved) = actors.reserve(2) {
            assert!(!running.load(Ordering::Relaxed), "took a block of a running request");
            assert!(reserved.blocks().iter().all(|block| !lease.blocks().contains(block)));
            drop(actors.commit(lease, reserved, &[1, 8, 9]));
        } else {
            drop(lease);
        }
        end.join().expect("the thread does not panic");
        actors.check(3);
    });
}

/// Goal: blocks that a request has locked are not handed out while it holds them, even if the cache
/// is flushed. Blocks that it commits after the flush are released when it ends.
#[test]
fn a_request_against_flush() {
    explore(3, || {
        let actors = Actors::new(3, &[1, 2]);
        let flush = {
            let actors = actors.clone();
            thread::spawn(move || actors.flush())
        };
        let lease = actors.acquire(&[1, 2, 3]);
        let reserved =
            actors.reserve(3 - lease.len()).expect("the missing blocks are free or can be evicted");
        assert!(reserved.blocks().iter().all(|block| !lease.blocks().contains(block)));
        let lease = actors.commit(lease, reserved, &[1, 2, 3]);
        assert_eq!(lease.len(), 3);
        flush.join().expect("the thread does not panic");
        drop(lease);
        actors.check(3);
    });
}

/// Part of the cache is removed while a request acquires, reserves and commits.
fn request_against_removal(removal: Removal, through_the_allocator: bool) {
    let actors = Actors::new(3, &[1, 2]);
    let remove = {
        let actors = actors.clone();
        thread::spawn(move || {
            if through_the_allocator {
                answered(actors.allocator().remove(&mut actors.tree.clone(), removal));
            } else {
                drop(remove(&mut actors.tree.lock(), &removal));
            }
        })
    };
    let lease = actors.acquire(&[1, 2, 3]);
    let reserved = actors.reserve(3 - lease.len()).expect("what lacks is free, or a block is lost");
    assert!(reserved.blocks().iter().all(|block| !lease.blocks().contains(block)));
    let lease = actors.commit(lease, reserved, &[1, 2, 3]);
    assert_eq!(lease.len(), 3);
    remove.join().expect("the thread does not panic");
    drop(lease);
    actors.check(3);
}

/// Goal: the removal of a prefix or of a namespace takes no block that a request holds, and each
/// block that it removes is free afterward.
#[test]
fn a_request_against_removals() {
    let prefix = Removal::Prefix(Namespace::default(), vec![1]);
    for removal in [prefix, Removal::Namespace(Namespace::default())] {
        explore(3, move || request_against_removal(removal.clone(), true));
    }
}

/// Goal: the model above fails if the tree removes blocks and the allocator does not learn of them.
#[test]
fn planted_removal_without_the_allocator_is_caught() {
    let name = "planted_removal_without_the_allocator_is_caught";
    must_fail(name, "block is lost", 3, || {
        request_against_removal(Removal::Prefix(Namespace::default(), vec![1]), false);
    });
}

/// Goal: a pin that arrives while the allocator reserves blocks takes effect. From then on the tree
/// evicts nothing, and the allocator hands out only blocks that it has.
#[test]
fn reserve_against_pin() {
    explore(3, || {
        let actors = Actors::new(2, &[1, 2]);
        let pin = {
            let actors = actors.clone();
            thread::spawn(move || actors.tree.lock().pin(&Namespace::default(), &[1]))
        };
        let reserved = actors.reserve(2);
        let pin = pin.join().expect("the thread does not panic");
        assert!(reserved.is_none() || pin.is_err(), "the pinned block was handed out");
        drop(reserved);
        if let Ok(pin) = pin {
            assert_eq!(actors.acquire(&[1, 2]).blocks()[0], BlockId(0));
            assert!(actors.tree.lock().unpin(pin));
        }
        actors.check(2);
    });
}

/// A step reads the block of a canceled request while another request tries to reserve this block.
fn reserve_during_a_step(with_fence: bool) {
    let actors = Actors::new(1, &[1]);
    let lease = actors.acquire(&[1]);
    let reading = Arc::new(AtomicBool::new(true));
    let ticket = with_fence.then(|| actors.fence.begin());
    let step = {
        let (reading, actors) = (reading.clone(), actors.clone());
        thread::spawn(move || {
            // The request is canceled while its step runs, so its lease ends before the step.
            drop(lease);
            reading.store(false, Ordering::Relaxed);
            drop((ticket, actors));
        })
    };
    if actors.reserve(1).is_some() {
        assert!(!reading.load(Ordering::Relaxed), "handed out during a step that uses it");
    }
    step.join().expect("the thread does not panic");
    actors.check(1);
}

/// Goal: blocks of a request that is canceled during its step are reused only after the step.
#[test]
fn cancel_against_a_running_step() {
    explore(3, || reserve_during_a_step(true));
}

/// Goal: the model above fails if the step holds no ticket of the fence.
#[test]
fn planted_step_without_a_ticket_is_caught() {
    let message = "handed out during a step that uses it";
    let name = "planted_step_without_a_ticket_is_caught";
    must_fail(name, message, 3, || reserve_during_a_step(false));
}

/// For each block of a pool, the token whose KV it holds.
fn kv<const BLOCKS: usize>(tokens: [u32; BLOCKS]) -> Arc<[AtomicU32; BLOCKS]> {
    Arc::new(tokens.map(AtomicU32::new))
}

/// The blocks of a cached prefix are copied out while another request reserves blocks and writes to
/// those that it gets.
fn copy_out_against_reserve(with_lease: bool) {
    let actors = Actors::new(2, &[1, 2]);
    let kv = kv([1, 2]);
    let lease = actors.acquire(&[1, 2]);
    let blocks = lease.blocks().to_vec();
    let lease = with_lease.then_some(lease);
    let copy = {
        let kv = kv.clone();
        thread::spawn(move || {
            for (block, token) in blocks.iter().zip(1..) {
                let copied = kv[block.0 as usize].load(Ordering::Relaxed);
                assert_eq!(copied, token, "copied the KV of another request");
            }
            drop(lease);
        })
    };
    if let Some(reserved) = actors.reserve(1) {
        let block = reserved.blocks()[0].0 as usize;
        kv[block].store(9, Ordering::Relaxed);
    }
    copy.join().expect("the thread does not panic");
    actors.check(2);
}

/// Goal: blocks that are copied out are not evicted before the copy has ended.
#[test]
fn copy_out_against_eviction() {
    explore(3, || copy_out_against_reserve(true));
}

/// Goal: the model above fails if the copy holds no lease.
#[test]
fn planted_copy_without_a_lease_is_caught() {
    let message = "copied the KV of another request";
    let name = "planted_copy_without_a_lease_is_caught";
    must_fail(name, message, 3, || copy_out_against_reserve(false));
}

/// A request is canceled while stored KV is copied into its block, which another request wants.
fn copy_in_against_cancel(with_fence: bool) {
    let actors = Actors::new(1, &[1]);
    let kv = kv([1]);
    let reserved = actors.reserve(1).expect("the cached block can be evicted");
    let ticket = with_fence.then(|| actors.fence.begin());
    let step = {
        let (kv, actors) = (kv.clone(), actors.clone());
        thread::spawn(move || {
            drop(reserved);
            kv[0].store(2, Ordering::Relaxed);
            drop((ticket, actors));
        })
    };
    let other = actors.reserve(1);
    if other.is_some() {
        kv[0].store(9, Ordering::Relaxed);
    }
    step.join().expect("the thread does not panic");
    if other.is_some() {
        let held = kv[0].load(Ordering::Relaxed);
        assert_eq!(held, 9, "a canceled copy has overwritten the KV of another request");
    }
    drop(other);
    actors.check(1);
}

/// Goal: a block that stored KV is copied into is handed out again only after the copy, also when
/// its request was canceled.
#[test]
fn cancel_against_a_copy_into_the_pool() {
    explore(3, || copy_in_against_cancel(true));
}

/// Goal: the model above fails if the copy's step holds no ticket of the fence.
#[test]
fn planted_copy_without_a_ticket_is_caught() {
    let message = "a canceled copy has overwritten the KV of another request";
    let name = "planted_copy_without_a_ticket_is_caught";
    must_fail(name, message, 3, || copy_in_against_cancel(false));
}

/// Goal: two requests that have loaded the same prefix into blocks of their own add it to the tree
/// once, and the blocks of the second are free when it ends.
#[test]
fn two_loads_of_one_prefix() {
    explore(2, || {
        let actors = Actors::new(3, &[7]);
        let load = |actors: &Actors| {
            let lease = actors.acquire(&[1]);
            let reserved = actors.reserve(1 - lease.len()).expect("a block for each");
            let lease = actors.commit(lease, reserved, &[1]);
            assert_eq!(lease.len(), 1);
        };
        let other = {
            let actors = actors.clone();
            thread::spawn(move || load(&actors))
        };
        load(&actors);
        other.join().expect("the thread does not panic");
        answered(actors.allocator().settle(&mut actors.tree.clone()));
        assert_eq!(actors.tree.lock().counts().cached, 2, "[7] and [1]");
        actors.check(3);
    });
}

/// Goal: the model finds a request that relies on the hint of a lock-free query, because the match
/// can shrink before it is locked.
#[test]
fn planted_trust_in_a_hint_is_caught() {
    let name = "planted_trust_in_a_hint_is_caught";
    must_fail(name, "expected the length of the hint", 2, || {
        let actors = Actors::new(2, &[1, 2]);
        let other = {
            let actors = actors.clone();
            thread::spawn(move || drop(actors.reserve(1)))
        };
        let hint = actors.tree.lock().reader().query_match_len(&Namespace::default(), &[1, 2]);
        let lease = actors.acquire(&[1, 2]);
        assert_eq!(lease.len(), hint, "expected the length of the hint");
        drop(lease);
        other.join().expect("the thread does not panic");
    });
}
