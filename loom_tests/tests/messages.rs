//! The order of messages between admission, tree and allocator. An actor handles one message at a
//! time, to its end, in some order; here it is a lock, held for the length of a message. Calls go
//! one way, as in the engine: the allocator asks the tree in the middle of a message of its own,
//! and other messages to the tree may come in between. Leases and steps end on other threads.
#![cfg(all(loom, not(crossbeam_loom)))]

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;
use stolon_kvcache::{
    BlockId, BlockLease, BlockPool, Namespace, PrefixLease, StepFence, TreeWriter,
};
use stolon_loom_tests::{explore, must_fail, tree};

/// The two actors, and what the executor holds of them.
#[derive(Clone)]
struct Actors {
    tree: Arc<Mutex<TreeWriter>>,
    pool: Arc<Mutex<BlockPool>>,
    fence: StepFence,
}

impl Actors {
    /// A pool of so many blocks, with `prompt` in the first of them.
    fn new(block_count: usize, prompt: &[u32]) -> Actors {
        let (writer, _reader) = tree();
        let (pool, fence) = BlockPool::new(block_count);
        let tree = Arc::new(Mutex::new(writer));
        let actors = Actors { tree, pool: Arc::new(Mutex::new(pool)), fence };
        let lease = actors.acquire(prompt);
        let private = actors.reserve(prompt.len()).expect("all are free");
        drop(actors.commit(lease, private, prompt));
        actors
    }

    fn tree(&self) -> MutexGuard<'_, TreeWriter> {
        self.tree.lock().expect("no panic under the lock")
    }

    fn pool(&self) -> MutexGuard<'_, BlockPool> {
        self.pool.lock().expect("no panic under the lock")
    }

    fn acquire(&self, prompt: &[u32]) -> PrefixLease {
        self.tree().acquire(&Namespace::default(), prompt)
    }

    /// A message to the allocator, with two to the tree inside.
    fn reserve(&self, count: usize) -> Option<BlockLease> {
        let mut pool = self.pool();
        let missing = match pool.reserve(count) {
            Ok(lease) => return Some(lease),
            Err(shortage) => shortage.missing(),
        };
        let counts = self.tree().counts();
        if missing == 0 || counts.evictable + counts.detached < missing {
            return None;
        }
        let evicted = self.tree().evict(missing);
        pool.release(evicted);
        pool.reserve(count).ok()
    }

    fn commit(
        &self,
        mut lease: PrefixLease,
        mut private: BlockLease,
        prompt: &[u32],
    ) -> PrefixLease {
        let blocks = private.commit_front(prompt.len() - lease.len());
        let commit = self.tree().commit(&mut lease, prompt, &blocks);
        self.pool().release(commit.duplicates);
        lease
    }

    /// A message to the allocator, with one to the tree inside.
    fn flush(&self) {
        let mut pool = self.pool();
        let flushed = self.tree().flush();
        pool.release(flushed);
    }

    /// Nothing runs any more: every block is free or cached, and all can be had.
    fn check(&self, block_count: usize) {
        let detached = self.tree().counts().detached;
        let freed = self.tree().evict(detached);
        self.pool().release(freed);
        let counts = self.tree().counts();
        assert_eq!((counts.locked, counts.detached), (0, 0), "all leases have ended");
        assert_eq!(self.pool().counts().committed, counts.cached, "no block is lost");
        self.tree().audit().expect("consistent tree");
        self.pool().audit().expect("consistent pool");
        assert_eq!(self.reserve(block_count).map(|lease| lease.len()), Some(block_count));
    }
}

/// Goal: a request that runs out of blocks gets those of another only after that one has ended,
/// and never those that it has acquired itself.
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
        if let Some(private) = actors.reserve(2) {
            assert!(!running.load(Ordering::Relaxed), "took a block of a running request");
            assert!(private.blocks().iter().all(|block| !lease.blocks().contains(block)));
            drop(actors.commit(lease, private, &[1, 8, 9]));
        } else {
            drop(lease);
        }
        end.join().expect("it ends");
        actors.check(3);
    });
}

/// Goal: what a request has acquired is handed to nobody while it holds it, a flush or not; what
/// it commits after a flush is given back when it ends.
#[test]
fn a_request_against_flush() {
    explore(3, || {
        let actors = Actors::new(3, &[1, 2]);
        let flush = {
            let actors = actors.clone();
            thread::spawn(move || actors.flush())
        };
        let lease = actors.acquire(&[1, 2, 3]);
        let private = actors.reserve(3 - lease.len()).expect("the other is nobody's or comes back");
        assert!(private.blocks().iter().all(|block| !lease.blocks().contains(block)));
        let lease = actors.commit(lease, private, &[1, 2, 3]);
        assert_eq!(lease.len(), 3);
        flush.join().expect("flushed");
        drop(lease);
        actors.check(3);
    });
}

/// Goal: a pin that comes between the allocator's two questions to the tree holds; the allocator
/// gets fewer blocks than it was told, and gives nothing out that it does not have.
#[test]
fn reserve_against_pin() {
    explore(3, || {
        let actors = Actors::new(2, &[1, 2]);
        let pin = {
            let actors = actors.clone();
            thread::spawn(move || actors.tree().pin(&Namespace::default(), &[1]))
        };
        let private = actors.reserve(2);
        let pin = pin.join().expect("answered");
        assert!(private.is_none() || pin.is_err(), "the pinned block was handed out");
        drop(private);
        if let Ok(pin) = pin {
            assert_eq!(actors.acquire(&[1, 2]).blocks()[0], BlockId(0));
            assert!(actors.tree().unpin(pin));
        }
        actors.check(2);
    });
}

/// A step over a request's blocks beside a flush and a request that wants them.
fn reuse_beside_a_step(with_fence: bool) {
    let actors = Actors::new(1, &[1]);
    let lease = actors.acquire(&[1]);
    let reading = Arc::new(AtomicBool::new(true));
    let ticket = with_fence.then(|| actors.fence.begin());
    let step = {
        let (reading, actors) = (reading.clone(), actors.clone());
        thread::spawn(move || {
            // Cancelled while its step runs: the lease goes first.
            drop(lease);
            reading.store(false, Ordering::Relaxed);
            drop((ticket, actors));
        })
    };
    if actors.reserve(1).is_some() {
        assert!(!reading.load(Ordering::Relaxed), "handed out under a running step");
    }
    step.join().expect("it ends");
    actors.check(1);
}

/// Goal: blocks of a request that is cancelled while its step runs are reused after the step.
#[test]
fn cancel_against_a_running_step() {
    explore(3, || reuse_beside_a_step(true));
}

/// Goal: without a ticket that model fails.
#[test]
fn planted_step_without_a_ticket_is_caught() {
    let complaint = "handed out under a running step";
    let name = "planted_step_without_a_ticket_is_caught";
    must_fail(name, complaint, 3, || reuse_beside_a_step(false));
}

/// Goal: a request that takes its hint for the truth is caught.
#[test]
fn planted_trust_in_a_hint_is_caught() {
    let name = "planted_trust_in_a_hint_is_caught";
    must_fail(name, "expected what the hint said", 2, || {
        let actors = Actors::new(2, &[1, 2]);
        let other = {
            let actors = actors.clone();
            thread::spawn(move || drop(actors.reserve(1)))
        };
        let hint = actors.tree().reader().query_match_len(&Namespace::default(), &[1, 2]);
        let lease = actors.acquire(&[1, 2]);
        assert_eq!(lease.len(), hint, "expected what the hint said");
        drop(lease);
        other.join().expect("it ends");
    });
}
