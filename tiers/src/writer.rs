//! [`DiskWriter`]: writes to a [`DiskTier`] on a thread of its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use stolon_kvcache::Namespace;

use crate::disk::DiskTier;
use crate::key::ChainKey;

/// Maximum number of bytes that wait to be written. When there are more, nothing is added: what is
/// not stored now is offered again when it is used again.
const QUEUE_BYTES: usize = 256 << 20;

/// Records to be written.
#[derive(Debug)]
pub struct DiskWrite {
    /// The namespace of the prefix.
    pub namespace: Namespace,
    /// The tokens of the prefix.
    pub tokens: Arc<Vec<u32>>,
    /// First position of `blocks`: the beginning of a record.
    pub first: usize,
    /// The bytes of the blocks, one after another.
    pub blocks: Vec<u8>,
}

/// The queue of writes, and its thread. The thread ends when the queue is dropped and everything in
/// it was written.
#[derive(Debug)]
pub struct DiskWriter {
    tier: Arc<DiskTier>,
    queue: Sender<Message>,
    /// Bytes that wait.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Message {
    Write(DiskWrite),
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
        let waiting = Arc::new(AtomicUsize::new(0));
        let (own_tier, own_waiting) = (Arc::clone(&tier), Arc::clone(&waiting));
        let work = move || run(&own_tier, &messages, &own_waiting, &on_written);
        std::thread::Builder::new().name("stolon-disk".to_owned()).spawn(work)?;
        Ok(DiskWriter { tier, queue, waiting })
    }

    /// Whether more may be added.
    pub fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < QUEUE_BYTES
    }

    /// Adds a write. If too much is waiting, it is dropped, and counted as skipped.
    pub fn push(&self, write: DiskWrite) {
        let bytes = write.blocks.len();
        if !self.has_room() {
            let shape = self.tier.shape();
            let record = shape.record_positions() / shape.block_size * shape.block_bytes;
            return self.tier.note_skipped((bytes / record.max(1)) as u64);
        }
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        // Fails only if the thread has panicked; then nothing is stored any more.
        let _ = self.queue.send(Message::Write(write));
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

fn run(
    tier: &DiskTier,
    messages: &Receiver<Message>,
    waiting: &AtomicUsize,
    on_written: &dyn Fn(Vec<ChainKey>),
) {
    while let Ok(message) = messages.recv() {
        match message {
            Message::Write(DiskWrite { namespace, tokens, first, blocks }) => {
                let written = tier.write(&namespace, &tokens, first, &blocks);
                waiting.fetch_sub(blocks.len(), Ordering::Relaxed);
                on_written(written);
            }
            // Fails only if nobody waits any more.
            Message::Flush(done) => drop(done.send(())),
        }
    }
}
