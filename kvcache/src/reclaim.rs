//! When memory that readers may still look at is freed. The tree is written against
//! [`Reclaimer`]; [`Epoch`] (crossbeam-epoch's default collector) is the one in use, and the loom
//! models put a smaller one in its place where several readers would make the real one explode.
#![allow(unsafe_code, reason = "deferred frees of nodes and child tables")]

/// What a tree gives to its reclaimer.
pub trait Retired: Send + 'static {
    /// Called instead of a free by reclaimers that check rather than free; see the loom models.
    fn mark_freed(&self);
}

/// Frees what the writer has unlinked once no reader can hold it any more.
///
/// # Safety
///
/// An item given to [`retire`](Reclaimer::retire) may be freed only when every guard that was
/// alive at that call has been dropped.
pub unsafe trait Reclaimer: Clone + Send + Sync + 'static {
    /// Keeps everything alive that is reachable while it lives.
    type Guard;

    /// Takes a guard. Readers hold one for the length of a query.
    fn pin(&self) -> Self::Guard;

    /// Frees `item` after all guards now alive.
    ///
    /// # Safety
    ///
    /// `item` came from `Box::into_raw`, can no longer be reached by a reader that pins from now
    /// on, and is retired once.
    unsafe fn retire<T: Retired>(&self, guard: &Self::Guard, item: *mut T);
}

/// crossbeam-epoch's default collector: pinning costs a few nanoseconds and writes only memory of
/// the pinning thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epoch;

// SAFETY: `defer_unchecked` runs a function only after every guard alive at the call is gone.
unsafe impl Reclaimer for Epoch {
    type Guard = crossbeam_epoch::Guard;

    #[inline(always)]
    fn pin(&self) -> Self::Guard {
        crossbeam_epoch::pin()
    }

    unsafe fn retire<T: Retired>(&self, guard: &Self::Guard, item: *mut T) {
        let free = move || {
            // SAFETY: by the contract of `retire`, `item` is a box that nobody reaches any more.
            drop(unsafe { Box::from_raw(item) });
        };
        // SAFETY: `T: Retired` is `Send + 'static`, so the drop may run on any thread at any later time.
        unsafe { guard.defer_unchecked(free) };
    }
}
