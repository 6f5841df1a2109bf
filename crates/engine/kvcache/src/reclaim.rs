//! Deferred freeing of nodes and tables that readers may still be looking at.
//!
//! A reader holds a [`Guard`] for the length of one query. Something that the writer has unlinked
//! may be freed once every guard that existed at that time has been dropped: its *grace period* is
//! over. Only the writer frees, so a query never pays for what the writer has removed.
//!
//! Life of an unlinked node or table:
//! 1. The writer adds it to the *open batch* of its [`Garbage`].
//! 2. When the open batch is full and no sealed batch is waiting, it becomes the *sealed batch*: the
//!    writer defers a function to the end of its grace period.
//! 3. crossbeam-epoch calls this function on the thread that notices the end of the grace period,
//!    which may be a reader's: every 128th pin of a thread looks. The function stores the number of
//!    the batch and does nothing else.
//! 4. The writer finds the number at a later operation and frees the batch.
//!
//! Items that still wait when the writer is dropped are freed with the tree's last handle.
//!
//! [`Epochs`] has two implementations: crossbeam-epoch, and a double for the loom models, which
//! ends each grace period at the earliest moment that the contract allows and keeps the number of
//! interleavings small. `--cfg crossbeam_loom` in addition to `--cfg loom` selects crossbeam-epoch
//! in the models, too. [`Garbage`] is the same code everywhere; but in the models it marks memory as
//! freed and keeps it, so that a later access is reported and is not undefined behavior.
#![allow(unsafe_code, reason = "frees the nodes and tables that the writer has unlinked")]

#[cfg(all(loom, not(crossbeam_loom)))]
mod checked;
#[cfg(any(not(loom), crossbeam_loom))]
mod epoch;

#[cfg(all(loom, not(crossbeam_loom)))]
pub(crate) use checked::Epochs;
#[cfg(any(not(loom), crossbeam_loom))]
pub(crate) use epoch::Epochs;

#[cfg(loom)]
use crate::sync::planted;
use crate::sync::{Arc, AtomicU64, Ordering, hand_over_order};
use std::ptr::NonNull;

/// The number of items at which the open batch is sealed.
#[cfg(not(loom))]
const BATCH: usize = 256;
/// Small values, so that the models reach every step within few operations. On crossbeam-epoch,
/// which adds many interleavings, only some models reach them.
#[cfg(loom)]
const BATCH: usize = if cfg!(crossbeam_loom) { 2 } else { 1 };

/// The maximum number of items that one call of [`Garbage::collect`] frees. A flush can unlink a
/// million nodes at once. This bounds the time that a later operation spends on them, and is
/// larger than [`BATCH`], so that the backlog shrinks.
const FREED_AT_ONCE: usize = 2 * BATCH;

/// A type whose values can be unlinked.
pub(crate) trait Retired: std::fmt::Debug + Send + 'static {
    /// Marks the value as freed. The loom models call this instead of freeing, so that any later
    /// access is reported.
    #[cfg(loom)]
    fn mark_freed(&self);
}

/// A node or a table that the writer has unlinked and not freed yet.
#[derive(Debug)]
pub(crate) struct Unlinked(NonNull<dyn Retired>);

// SAFETY: `Retired` types are `Send`, and the pointer is the only one through which the
// value will be freed.
unsafe impl Send for Unlinked {}

impl Unlinked {
    /// Frees the value.
    ///
    /// # Safety
    ///
    /// No thread can reach the value any longer.
    pub(crate) unsafe fn free(self) {
        // SAFETY: the pointer came from a box by the contract of `Garbage::add`, and the caller
        // says that it is the last one.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// The nodes and tables that the writer has unlinked and not freed yet.
#[derive(Debug)]
pub(crate) struct Garbage {
    epochs: Epochs,
    open: Vec<Unlinked>,
    sealed: Vec<Unlinked>,
    /// Number of batches that were sealed so far, which is the number of the last one.
    seal_count: u64,
    /// The number of the last sealed batch whose grace period is over. Stored with Release by the
    /// thread that notices it, after all accesses under the guards that the batch had to wait for,
    /// and loaded with Acquire by the writer before it frees the batch.
    expired: Arc<AtomicU64>,
    /// Values that the models have marked as freed.
    #[cfg(loom)]
    freed: Vec<Unlinked>,
}

impl Garbage {
    /// Nothing is unlinked yet. `epochs` are those in which the tree's readers pin.
    pub(crate) fn new(epochs: &Epochs) -> Garbage {
        Garbage {
            epochs: epochs.clone(),
            open: Vec::new(),
            sealed: Vec::new(),
            seal_count: 0,
            expired: Arc::new(AtomicU64::new(0)),
            #[cfg(loom)]
            freed: Vec::new(),
        }
    }

    /// Number of unlinked nodes and tables that are not freed yet.
    pub(crate) fn len(&self) -> usize {
        self.open.len() + self.sealed.len()
    }

    /// Frees `item` after all guards that exist now have been dropped.
    ///
    /// # Safety
    ///
    /// `item` came from `Box::into_raw`, a reader that pins from now on cannot reach it, the writer
    /// does not access it any longer, and it is added only once.
    pub(crate) unsafe fn add<T: Retired>(&mut self, item: NonNull<T>) {
        self.open.push(Unlinked(item));
        #[cfg(loom)]
        if planted::is(planted::Bug::EagerFree) {
            return self.free_open();
        }
        // A full batch that has to wait keeps growing. It is checked once per `BATCH` items.
        if self.open.len().is_multiple_of(BATCH) {
            self.collect();
        }
    }

    /// Frees the sealed batch if its grace period is over, and seals the open one if it is full.
    /// Called at each operation of the writer. Costs two comparisons if there is nothing to do.
    pub(crate) fn collect(&mut self) {
        if self.sealed.is_empty() && self.open.len() < BATCH {
            return;
        }
        if !self.sealed.is_empty() {
            if self.expired.load(hand_over_order()) < self.seal_count {
                self.epochs.advance(&self.epochs.pin());
            }
            if self.expired.load(hand_over_order()) == self.seal_count {
                self.free_sealed();
            }
        }
        if self.sealed.is_empty() && self.open.len() >= BATCH {
            std::mem::swap(&mut self.open, &mut self.sealed);
            self.seal_count += 1;
            let (number, expired) = (self.seal_count, self.expired.clone());
            let guard = self.epochs.pin();
            self.epochs.defer(&guard, move || expired.store(number, Ordering::Release));
            self.epochs.advance(&guard);
        }
    }

    fn free_sealed(&mut self) {
        let kept = self.sealed.len().saturating_sub(FREED_AT_ONCE);
        for item in self.sealed.drain(kept..) {
            #[cfg(not(loom))]
            // SAFETY: by the contract of `add` only guards that existed when the item was added
            // could reach it, and all of them have been dropped before `expired` was stored. The
            // writer's load of it was an Acquire.
            unsafe {
                item.free();
            }
            #[cfg(loom)]
            {
                item.mark_freed();
                self.freed.push(item);
            }
        }
        #[cfg(loom)]
        if planted::is(planted::Bug::FreeOpenBatch) {
            self.free_open();
        }
    }

    /// Takes out everything that is not freed yet, because the writer is dropped.
    pub(crate) fn take(&mut self) -> Vec<Unlinked> {
        let mut rest = std::mem::take(&mut self.sealed);
        rest.append(&mut self.open);
        #[cfg(loom)]
        rest.append(&mut self.freed);
        rest
    }
}

#[cfg(loom)]
impl Unlinked {
    fn mark_freed(&self) {
        // SAFETY: the models free no memory before the tree's last handle is dropped.
        unsafe { self.0.as_ref() }.mark_freed();
    }
}

#[cfg(loom)]
impl Garbage {
    /// Frees the open batch, whose grace period has not begun: a defect that some models plant.
    fn free_open(&mut self) {
        self.open.iter().for_each(Unlinked::mark_freed);
        self.freed.append(&mut self.open);
    }
}
