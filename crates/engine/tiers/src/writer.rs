//! [`DiskWriter`]: writes to a [`DiskTier`] on a thread of its own.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use stolon_kvcache::Namespace;
use stolon_scheduler::{SaveRequest, yield_to_computing};

use crate::disk::DiskTier;
use crate::key::ChainKey;
use crate::shared::lock;
use crate::tier::Tier;
use crate::tokens::NamedTokens;

/// Maximum number of bytes of KV that are claimed and not written yet. When there are more, nothing
/// is claimed. Blocks that are not stored now are offered again when they are used again.
const CLAIMED_BYTES_MAX: usize = 256 << 20;

/// The queue of writes, and its thread. The thread ends when the queue and all claims are dropped
/// and everything in it was written.
#[derive(Clone, Debug)]
pub struct DiskWriter {
    tier: Arc<DiskTier>,
    queue: Sender<Write>,
    claims: Arc<Claims>,
}

/// The bytes of claimed blocks.
type Write = (Claim, Vec<u8>);

/// The claims that exist.
#[derive(Debug, Default)]
struct Claims {
    claimed: Mutex<Claimed>,
    /// Notified when a claim ends.
    ended: Condvar,
}

/// The records that are going to be written.
#[derive(Debug, Default)]
struct Claimed {
    keys: HashSet<ChainKey>,
    bytes: usize,
    /// The numbers of the claims that exist, and the next one.
    numbers: BTreeSet<u64>,
    next: u64,
}

/// Records of a prefix that are going to be written. They cannot be claimed again until they
/// were written or the claim is dropped.
#[derive(Debug)]
pub struct Claim {
    namespace: Namespace,
    tokens: NamedTokens,
    positions: Range<usize>,
    block_size: usize,
    priority: i32,
    keys: Vec<ChainKey>,
    bytes: usize,
    number: u64,
    queue: Sender<Write>,
    claims: Arc<Claims>,
}

impl DiskWriter {
    /// Starts the thread. It calls `on_written` with the keys of the records that it has written.
    ///
    /// # Errors
    /// If the operating system cannot start a thread.
    pub fn start(
        tier: Arc<DiskTier>,
        on_written: impl Fn(Vec<ChainKey>) + Send + 'static,
    ) -> io::Result<DiskWriter> {
        let (queue, writes) = mpsc::channel();
        let own_tier = Arc::clone(&tier);
        let work = move || {
            yield_to_computing();
            run(&own_tier, &writes, &on_written);
        };
        std::thread::Builder::new().name("stolon-disk".to_owned()).spawn(work)?;
        Ok(DiskWriter { tier, queue, claims: Arc::default() })
    }

    /// Claims the records in these positions of `tokens` that are to be stored
    /// ([`RecordShape::stored_places`](crate::RecordShape::stored_places)) and are neither stored
    /// nor claimed. `None` if there are none, or if a write has failed a short time ago. If too
    /// much is waiting to be written, the last ones are left out, and counted as skipped. Does no
    /// I/O.
    pub fn claim(
        &self,
        namespace: Namespace,
        tokens: &NamedTokens,
        positions: Range<usize>,
    ) -> Option<Claim> {
        let shape = self.tier.shape();
        if !self.tier.accepts_writes() {
            return None;
        }
        let places = shape.stored_places(&namespace, tokens, positions.end);
        let places: Vec<_> = places.filter(|place| place.first >= positions.start).collect();
        let mut claimed = lock(&self.claims.claimed);
        let free = |key: &ChainKey| !claimed.keys.contains(key) && !self.tier.contains(key);
        let first = places.iter().find(|place| free(&place.key))?.first;
        let room = CLAIMED_BYTES_MAX.saturating_sub(claimed.bytes);
        let bytes_to = |end: usize| (end - first) / shape.block_size * shape.block_bytes;
        let (mut keys, mut end) = (Vec::new(), first);
        let mut skipped = 0;
        for place in places.iter().filter(|place| free(&place.key)) {
            // Records in between that are stored or claimed are copied with the others.
            if bytes_to(place.end()) <= room {
                keys.push(place.key);
                end = end.max(place.end());
            } else {
                skipped += 1;
            }
        }
        self.tier.note_skipped(skipped);
        if keys.is_empty() {
            return None;
        }
        let bytes = bytes_to(end);
        claimed.keys.extend(&keys);
        claimed.bytes += bytes;
        let number = claimed.next;
        claimed.next += 1;
        claimed.numbers.insert(number);
        Some(Claim {
            namespace,
            tokens: tokens.clone(),
            positions: first..end,
            block_size: shape.block_size,
            priority: 0,
            keys,
            bytes,
            number,
            queue: self.queue.clone(),
            claims: Arc::clone(&self.claims),
        })
    }

    /// Waits until everything that was claimed before was written or given up. Blocks.
    pub fn flush(&self) {
        let claimed = lock(&self.claims.claimed);
        let next = claimed.next;
        let earlier = |claimed: &mut Claimed| claimed.numbers.first().is_some_and(|&n| n < next);
        let waited = self.claims.ended.wait_while(claimed, earlier);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Claim {
    /// The namespace of the prefix.
    pub fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// The tokens of the prefix; there may be more of them.
    pub fn tokens(&self) -> &Arc<Vec<u32>> {
        self.tokens.tokens()
    }

    /// Sets the priority of the request for which the blocks were computed; 0 by default.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Claim {
        self.priority = priority;
        self
    }

    /// The positions whose blocks [`Claim::write`] takes.
    pub fn positions(&self) -> Range<usize> {
        self.positions.clone()
    }

    /// The indices of these blocks in the prefix.
    pub fn blocks(&self) -> Range<usize> {
        self.positions.start / self.block_size..self.positions.end / self.block_size
    }

    /// A request to the scheduler to copy the claimed blocks out of the pool. They are written when
    /// they have been copied.
    pub(crate) fn save(self) -> SaveRequest {
        SaveRequest {
            namespace: self.namespace,
            tokens: Arc::clone(self.tokens()),
            blocks: self.blocks(),
            done: Box::new(|bytes| self.write(bytes)),
        }
    }

    /// Adds the bytes of the claimed positions' blocks, one after another, to the queue. They may
    /// be fewer. Does not block.
    pub fn write(self, blocks: Vec<u8>) {
        let queue = self.queue.clone();
        // Fails only if the thread has panicked; then nothing is stored any longer.
        let _ = queue.send((self, blocks));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = lock(&self.claims.claimed);
        for key in &self.keys {
            claimed.keys.remove(key);
        }
        claimed.bytes -= self.bytes;
        claimed.numbers.remove(&self.number);
        self.claims.ended.notify_all();
    }
}

fn run(tier: &DiskTier, writes: &Receiver<Write>, on_written: &dyn Fn(Vec<ChainKey>)) {
    while let Ok((claim, blocks)) = writes.recv() {
        let first = claim.positions.start;
        on_written(tier.write(&claim.namespace, &claim.tokens, first, &blocks, claim.priority));
    }
}
