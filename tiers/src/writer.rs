//! [`DiskWriter`]: writes to a [`DiskTier`] on a thread of its own.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};

use stolon_kvcache::Namespace;

use crate::disk::DiskTier;
use crate::key::ChainKey;
use crate::shared::lock;

/// Maximum number of bytes of KV that are claimed and not written yet. When there are more, nothing
/// is claimed: what is not stored now is offered again when it is used again.
const CLAIMED_BYTES_MAX: usize = 256 << 20;

/// The queue of writes, and its thread. The thread ends when the queue and all claims are dropped
/// and everything in it was written.
#[derive(Debug)]
pub struct DiskWriter {
    tier: Arc<DiskTier>,
    queue: Sender<Message>,
    claimed: Arc<Mutex<Claimed>>,
}

/// What is going to be written.
#[derive(Debug, Default)]
struct Claimed {
    keys: HashSet<ChainKey>,
    bytes: usize,
}

/// Full records of a prefix that are going to be written. They cannot be claimed again until they
/// were written or the claim is dropped.
#[derive(Debug)]
pub struct Claim {
    namespace: Namespace,
    tokens: Arc<Vec<u32>>,
    positions: Range<usize>,
    keys: Vec<ChainKey>,
    bytes: usize,
    queue: Sender<Message>,
    claimed: Arc<Mutex<Claimed>>,
}

#[derive(Debug)]
enum Message {
    Write(Claim, Vec<u8>),
    /// Answered when everything before it was written.
    Flush(Sender<()>),
}

impl DiskWriter {
    /// Starts the thread. It calls `on_written` with the keys of what it has written.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn start(
        tier: Arc<DiskTier>,
        on_written: impl Fn(Vec<ChainKey>) + Send + 'static,
    ) -> io::Result<DiskWriter> {
        let (queue, messages) = mpsc::channel();
        let own_tier = Arc::clone(&tier);
        let work = move || run(&own_tier, &messages, &on_written);
        std::thread::Builder::new().name("stolon-disk".to_owned()).spawn(work)?;
        Ok(DiskWriter { tier, queue, claimed: Arc::default() })
    }

    /// Claims the full records of the first `len` positions of `tokens` that are neither stored nor
    /// claimed; `None` if there are none. If too much is waiting to be written, the last ones are
    /// left out, and counted as skipped. Does no I/O.
    pub fn claim(&self, namespace: Namespace, tokens: &Arc<Vec<u32>>, len: usize) -> Option<Claim> {
        let shape = self.tier.shape();
        let record = shape.record_positions();
        let record_bytes = record / shape.block_size * shape.block_bytes;
        let places: Vec<_> = self.tier.places(&namespace, &tokens[..len]).collect();
        let mut claimed = lock(&self.claimed);
        let free = |key: &ChainKey| !claimed.keys.contains(key) && !self.tier.contains(key);
        let first = places.iter().find(|place| free(&place.key))?.first;
        let room = CLAIMED_BYTES_MAX.saturating_sub(claimed.bytes) / record_bytes.max(1);
        let (mut keys, mut end) = (Vec::new(), first);
        let mut skipped = 0;
        for place in places.iter().filter(|place| free(&place.key)) {
            // Records in between that are stored or claimed are copied with the others.
            if (place.first + record - first) / record <= room {
                keys.push(place.key);
                end = place.first + record;
            } else {
                skipped += 1;
            }
        }
        self.tier.note_skipped(skipped);
        if keys.is_empty() {
            return None;
        }
        let bytes = (end - first) / record * record_bytes;
        claimed.keys.extend(&keys);
        claimed.bytes += bytes;
        Some(Claim {
            namespace,
            tokens: Arc::clone(tokens),
            positions: first..end,
            keys,
            bytes,
            queue: self.queue.clone(),
            claimed: Arc::clone(&self.claimed),
        })
    }

    /// Waits until everything that was added before was written. Blocks.
    pub fn flush(&self) {
        let (done, finished) = mpsc::channel();
        if self.queue.send(Message::Flush(done)).is_ok() {
            // Fails only if the thread has panicked.
            let _ = finished.recv();
        }
    }
}

impl Claim {
    /// The positions whose blocks [`Claim::write`] takes.
    pub fn positions(&self) -> Range<usize> {
        self.positions.clone()
    }

    /// Adds the bytes of the claimed positions' blocks, one after another, to the queue. They may
    /// be fewer. Does not block.
    pub fn write(self, blocks: Vec<u8>) {
        let queue = self.queue.clone();
        // Fails only if the thread has panicked; then nothing is stored any more.
        let _ = queue.send(Message::Write(self, blocks));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = lock(&self.claimed);
        for key in &self.keys {
            claimed.keys.remove(key);
        }
        claimed.bytes -= self.bytes;
    }
}

fn run(tier: &DiskTier, messages: &Receiver<Message>, on_written: &dyn Fn(Vec<ChainKey>)) {
    while let Ok(message) = messages.recv() {
        match message {
            Message::Write(claim, blocks) => {
                let (namespace, first) = (&claim.namespace, claim.positions.start);
                let written = tier.write(namespace, &claim.tokens, first, &blocks);
                drop(blocks);
                drop(claim);
                on_written(written);
            }
            // Fails only if the caller does not wait any more.
            Message::Flush(done) => drop(done.send(())),
        }
    }
}
