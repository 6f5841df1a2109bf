//! Cache-line aligned memory for packed weights, scratch, and keys and values.
//!
//! A buffer is zeroed when made and never grows. Scratch buffers are lent out by
//! [`Threads`](super::Threads) and go back to it, so a step allocates nothing once warm.
#![allow(unsafe_code, reason = "views aligned memory as slices of plain numbers")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use memmap2::MmapMut;

/// Bytes of a cache line, and of an AVX-512 register.
pub(super) const ALIGN: usize = 64;

/// Bytes of a huge page on x86-64, and on aarch64 with pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages, before the memory is touched: the kernels walk through weights faster than
/// small pages can be looked up, above all in a virtual machine. A refusal costs only that speed.
///
/// The ends that do not fill a page stay as they are, so that no memory beyond the slice is taken.
fn prefer_huge_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        let bytes = memory.as_ptr().cast::<u8>();
        let before = bytes.align_offset(HUGE_PAGE).min(size_of_val(memory));
        let whole = (size_of_val(memory) - before) / HUGE_PAGE * HUGE_PAGE;
        if whole > 0 {
            let start = bytes.wrapping_add(before).cast_mut();
            // SAFETY: the range is a part of one allocation; the advice changes no content.
            let _ = unsafe { libc::madvise(start.cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Plain numbers for which every bit pattern, zero included, is a value.
///
/// # Safety
/// The type has no padding, no invalid bit pattern, no drop, and an alignment of at most [`ALIGN`].
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: an integer or float type: no padding, all bit patterns valid.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// Zero-initialised bytes aligned to [`ALIGN`].
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// What a large buffer lies in: memory that the system fills with zeroes page by page, when a
    /// page is first touched, by whichever thread does.
    map: Option<MmapMut>,
}

// SAFETY: the buffer owns its memory and hands it out under the usual borrow rules.
unsafe impl Send for Buffer {}
// SAFETY: shared access gives shared slices only.
unsafe impl Sync for Buffer {}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Buffer {
    /// A buffer of `count` zeroes of `T`.
    ///
    /// # Panics
    /// If the size in bytes overflows. If the system refuses the memory, the process is ended by
    /// [`handle_alloc_error`]; [`Buffer::try_zeroed`] reports that instead.
    pub fn zeroed<T: Plain>(count: usize) -> Buffer {
        Self::try_zeroed::<T>(count).unwrap_or_else(|| {
            let len = count.checked_mul(size_of::<T>()).expect("a buffer's size fits in memory");
            handle_alloc_error(Self::layout(len))
        })
    }

    /// As [`Buffer::zeroed`]; `None` where the system refuses so much.
    pub fn try_zeroed<T: Plain>(count: usize) -> Option<Buffer> {
        let len = count.checked_mul(size_of::<T>())?;
        if len == 0 {
            return Some(Buffer { start: NonNull::<u8>::dangling(), len: 0, map: None });
        }
        if len >= HUGE_PAGE
            && let Some(buffer) = Self::mapped(len)
        {
            return Some(buffer);
        }
        let layout = Layout::from_size_align(len, ALIGN).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { start, len, map: None })
    }

    /// A buffer that begins with a huge page.
    fn mapped(len: usize) -> Option<Buffer> {
        let mut map = MmapMut::map_anon(len.checked_add(HUGE_PAGE)?).ok()?;
        let skipped = map.as_ptr().align_offset(HUGE_PAGE);
        let part = map.get_mut(skipped..skipped + len)?;
        prefer_huge_pages(part);
        let start = NonNull::from(part).cast::<u8>();
        Some(Buffer { start, len, map: Some(map) })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, ALIGN).expect("a buffer's size fits in memory")
    }

    /// Size in bytes.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// The memory as `T`s; a remainder too short for one is left out.
    pub fn slice<T: Plain>(&self) -> &[T] {
        let count = self.len / size_of::<T>();
        if count == 0 {
            return &[];
        }
        // SAFETY: `count` Ts lie within the allocation, which is initialised and aligned for any
        // `Plain` type, whose every bit pattern is valid; the borrow of self keeps it alive.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<T>(), count) }
    }

    /// The memory as mutable `T`s; a remainder too short for one is left out.
    pub fn slice_mut<T: Plain>(&mut self) -> &mut [T] {
        let count = self.len / size_of::<T>();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: as in `slice`, and the exclusive borrow makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<T>(), count) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len > 0 && self.map.is_none() {
            // SAFETY: allocated in `zeroed` with this very layout, and freed only here.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
        }
    }
}

/// A raw pointer that tasks of one parallel call share, each writing its own part.
pub(super) struct SharedMut<T>(*mut T);

// SAFETY: only a pointer; whoever dereferences it must prove that no two tasks touch one element.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T: Plain> SharedMut<T> {
    pub(super) fn new(slice: &mut [T]) -> SharedMut<T> {
        SharedMut(slice.as_mut_ptr())
    }

    /// The pointer; a method so that closures capture the whole wrapper.
    pub(super) fn get(&self) -> *mut T {
        self.0
    }
}
