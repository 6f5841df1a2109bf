//! [`Loads`]: reads of stored KV that are in progress. Requests for the same prompt share one, and
//! the memory of all is bounded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::{BoxFuture, Shared};
use stolon_scheduler::StoredKv;

use crate::key::ChainKey;
use crate::shared::lock;

/// Minimum number of bytes that a read counts as, which bounds the number of reading threads.
const READ_BYTES_MIN: usize = 4 << 20;

/// A read that several requests may wait for.
type Load = Shared<oneshot::Receiver<Option<StoredKv>>>;
/// The key of the last record that is read, and the number of the first one.
pub(crate) type LoadKey = (ChainKey, usize);

/// The reads in progress.
#[derive(Debug)]
pub(crate) struct Loads {
    running: Mutex<HashMap<LoadKey, Load>>,
    /// Maximum memory in bytes for KV that was read and is not in the pool yet. If a prompt needs
    /// more, only its beginning is read; while all of it is in use, nothing is read.
    budget: usize,
    /// Bytes of all reads whose KV still exists. It guards no other memory, so all accesses are
    /// relaxed.
    used: Arc<AtomicUsize>,
}

/// Memory of KV that was read. It is returned when this is dropped.
#[derive(Debug)]
struct Memory {
    bytes: usize,
    used: Arc<AtomicUsize>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The end of a read. If it is dropped, the read has failed.
pub(crate) struct LoadEnd {
    loads: Arc<Loads>,
    key: LoadKey,
    /// Taken when the read is complete.
    result: Option<(oneshot::Sender<Option<StoredKv>>, Memory)>,
}

impl LoadEnd {
    /// Gives the KV that was read to all requests that wait for it.
    pub(crate) fn finish(mut self, kv: Option<StoredKv>) {
        if let Some((sender, memory)) = self.result.take() {
            // Remove the entry first, because it would keep the KV after all requests have used it.
            lock(&self.loads.running).remove(&self.key);
            // Fails only if all requests have gone.
            let _ = sender.send(kv.map(|kv| kv.holding(memory)));
        }
    }
}

impl Drop for LoadEnd {
    fn drop(&mut self) {
        if self.result.is_some() {
            lock(&self.loads.running).remove(&self.key);
        }
    }
}

impl Loads {
    /// No reads, with `budget` bytes of memory for what is read.
    pub(crate) fn new(budget: usize) -> Loads {
        Loads { running: Mutex::default(), budget, used: Arc::default() }
    }

    /// Number of bytes that can be read now.
    pub(crate) fn room(&self) -> usize {
        self.budget.saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Begins to read `bytes` bytes on a thread of its own, or joins a read that has begun. `None`
    /// if there is no memory or no thread for it now.
    pub(crate) fn begin(
        self: &Arc<Self>,
        key: LoadKey,
        bytes: usize,
        read: impl FnOnce(LoadEnd) + Send + 'static,
    ) -> Option<BoxFuture<'static, Option<StoredKv>>> {
        let flatten = |load: Load| Some(load.map(|kv| kv.ok().flatten()).boxed());
        let mut running = lock(&self.running);
        if let Some(load) = running.get(&key) {
            return flatten(load.clone());
        }
        let memory = self.take(bytes.max(READ_BYTES_MIN.min(self.budget)))?;
        let (sender, receiver) = oneshot::channel();
        let load = receiver.shared();
        running.insert(key, load.clone());
        // The lock must be free if the thread cannot be started, because in this case `end` is
        // dropped.
        drop(running);
        let end = LoadEnd { loads: Arc::clone(self), key, result: Some((sender, memory)) };
        let thread = std::thread::Builder::new().name("stolon-load".to_owned());
        thread.spawn(move || read(end)).ok()?;
        flatten(load)
    }

    fn take(&self, bytes: usize) -> Option<Memory> {
        let taken = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= self.budget);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).ok()?;
        Some(Memory { bytes, used: Arc::clone(&self.used) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures::executor::block_on;

    use super::*;

    const BUDGET: usize = 64 << 20;

    fn key(number: u32) -> LoadKey {
        (ChainKey::from_bytes([0; 32]).then(&[number]), 0)
    }

    fn kv() -> StoredKv {
        StoredKv::new(16, 0, vec![bytes::Bytes::from_static(b"kv")])
    }

    /// Goal: requests for the same records share a read, and its memory is returned with the KV.
    #[test]
    fn reads_are_shared_and_their_memory_is_bounded() {
        let loads = Arc::new(Loads::new(BUDGET));
        let (go, wait) = mpsc::channel::<()>();
        let first = loads.begin(key(1), BUDGET, move |end| {
            wait.recv().expect("the test continues");
            end.finish(Some(kv()));
        });
        let second = loads.begin(key(1), BUDGET, |_| panic!("it is being read"));
        assert_eq!(loads.room(), 0);
        assert!(loads.begin(key(2), 1, |_| panic!("there is no memory")).is_none());
        go.send(()).expect("it is being read");
        let read = [first, second].map(|load| block_on(load.expect("a read")).expect("KV"));
        assert_eq!(loads.room(), 0);
        drop(read);
        assert_eq!(loads.room(), BUDGET);
    }

    /// Goal: a read that fails, by a panic even, yields nothing, and can be tried again.
    #[test]
    fn failed_reads_yield_nothing() {
        let loads = Arc::new(Loads::new(BUDGET));
        let failed = loads.begin(key(1), 1, drop).expect("a read");
        assert!(block_on(failed).is_none());
        let again = loads.begin(key(1), 1, |end| end.finish(Some(kv()))).expect("a read");
        assert!(block_on(again).is_some());
    }
}
