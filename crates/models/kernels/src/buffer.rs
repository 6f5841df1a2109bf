//! Cache-line aligned memory for packed weights, scratch space, and keys and values.
//!
//! A [`Buffer`] is filled with zeroes when it is allocated and never grows. Scratch buffers are
//! allocated and recycled by [`Threads`](crate::threads::Threads), so that a decoding step
//! allocates nothing once all its sizes have occurred.
#![allow(unsafe_code, reason = "views aligned memory as slices of plain numbers")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use memmap2::MmapMut;

/// Alignment of every buffer in bytes: a cache line, and the width of an AVX-512 register.
pub(super) const BUFFER_ALIGN: usize = 64;

/// Bytes of a huge page on x86-64, and on aarch64 with base pages of 4 KiB.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Advises the operating system to back `memory` with huge pages. This must be done before the
/// memory is first touched. Kernels stream through weights so fast that with 4 KiB pages they are
/// limited by TLB misses, most of all in a virtual machine. If the system refuses, only speed is
/// lost.
///
/// The advice covers only the huge pages that lie entirely within `memory`, so that it does not
/// affect memory outside the slice.
fn prefer_huge_pages<T>(memory: &[T]) {
    #[cfg(target_os = "linux")]
    {
        let bytes = memory.as_ptr().cast::<u8>();
        let before = bytes.align_offset(HUGE_PAGE_BYTES).min(size_of_val(memory));
        let whole = (size_of_val(memory) - before) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if whole > 0 {
            let start = bytes.wrapping_add(before).cast_mut();
            // SAFETY: `before + whole` is at most the size of the slice, so the range lies within
            // it, and `start` is aligned to a page. MADV_HUGEPAGE changes no content and no
            // mapping.
            let _ = unsafe { libc::madvise(start.cast(), whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Number types for which every bit pattern is a valid value, so that a [`Buffer`] of zeroed bytes
/// can be viewed as a slice of them.
///
/// # Safety
/// The type has no padding, no invalid bit patterns, no drop glue, a size above 0, and an alignment
/// of at most 64 bytes.
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: u8 is a primitive integer: 1 byte, alignment 1, no padding, every bit pattern is valid.
unsafe impl Plain for u8 {}
// SAFETY: i8 is a primitive integer: 1 byte, alignment 1, no padding, every bit pattern is valid.
unsafe impl Plain for i8 {}
// SAFETY: u16 is a primitive integer: 2 bytes, alignment 2, no padding, every bit pattern is valid.
unsafe impl Plain for u16 {}
// SAFETY: f32 is a primitive float: 4 bytes, alignment 4, no padding, every bit pattern is valid
// (some are NaNs).
unsafe impl Plain for f32 {}

/// Owned memory, initialized with zeroes and aligned to 64 bytes.
///
/// A buffer has no element type. [`Buffer::slice`] and [`Buffer::slice_mut`] view it as a slice of
/// any [`Plain`] type. Buffers of 2 MiB or more begin at a huge-page boundary and are backed by
/// huge pages if the operating system allows it; their pages become resident when they are first
/// touched.
pub struct Buffer {
    /// First byte: dangling if `len` is 0, otherwise valid for `len` bytes.
    start: NonNull<u8>,
    /// Size in bytes.
    len: usize,
    /// The anonymous mapping that contains the memory of a large buffer; `None` if the memory came
    /// from the global allocator. The operating system fills a page with zeroes when a thread first
    /// touches it.
    map: Option<MmapMut>,
}

// SAFETY: the buffer is the only owner of its memory (an allocation or a mapping), neither of which
// is bound to a thread.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives out only shared slices of plain numbers; writing needs `&mut Buffer`.
unsafe impl Sync for Buffer {}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Buffer {
    /// Allocates a buffer of `count` zeroes of type `T`.
    ///
    /// If the system does not have enough memory, the process ends by [`handle_alloc_error`];
    /// [`Buffer::try_zeroed`] returns `None` in that case.
    ///
    /// # Panics
    /// If the size in bytes overflows `isize`.
    pub fn zeroed<T: Plain>(count: usize) -> Buffer {
        Self::try_zeroed::<T>(count).unwrap_or_else(|| {
            let len = count.checked_mul(size_of::<T>()).expect("a buffer's size fits in memory");
            handle_alloc_error(Self::layout(len))
        })
    }

    /// Allocates a buffer of `count` zeroes of type `T`; `None` if the size in bytes overflows or
    /// the system does not have enough memory.
    pub fn try_zeroed<T: Plain>(count: usize) -> Option<Buffer> {
        let len = count.checked_mul(size_of::<T>())?;
        if len == 0 {
            return Some(Buffer { start: NonNull::<u8>::dangling(), len: 0, map: None });
        }
        if len >= HUGE_PAGE_BYTES
            && let Some(buffer) = Self::mapped(len)
        {
            return Some(buffer);
        }
        let layout = Layout::from_size_align(len, BUFFER_ALIGN).ok()?;
        // SAFETY: the layout's size is `len`, which was found to be above 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { start, len, map: None })
    }

    /// Maps a buffer whose first byte is the first byte of a huge page.
    fn mapped(len: usize) -> Option<Buffer> {
        let mut map = MmapMut::map_anon(len.checked_add(HUGE_PAGE_BYTES)?).ok()?;
        let skipped = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let aligned = map.get_mut(skipped..skipped + len)?;
        prefer_huge_pages(aligned);
        let start = NonNull::from(aligned).cast::<u8>();
        Some(Buffer { start, len, map: Some(map) })
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BUFFER_ALIGN).expect("a buffer's size fits in memory")
    }

    /// Size in bytes.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// The memory as a slice of `byte_len() / size_of::<T>()` elements; a shorter remainder at the
    /// end is not part of the slice.
    pub fn slice<T: Plain>(&self) -> &[T] {
        let count = self.len / size_of::<T>();
        if count == 0 {
            return &[];
        }
        // SAFETY: `start` is valid for `len` bytes, which `count` Ts do not exceed. All bytes are
        // initialized: with zeroes at first, and written as plain numbers since. `start` is aligned
        // to BUFFER_ALIGN, which no `Plain` type exceeds, and every bit pattern is a valid T. The
        // borrow of `self` keeps the memory allocated and excludes writers.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<T>(), count) }
    }

    /// The memory as a mutable slice of `byte_len() / size_of::<T>()` elements; a shorter remainder
    /// at the end is not part of the slice.
    pub fn slice_mut<T: Plain>(&mut self) -> &mut [T] {
        let count = self.len / size_of::<T>();
        if count == 0 {
            return &mut [];
        }
        // SAFETY: `start` is valid for `len` bytes, which `count` Ts do not exceed. All bytes are
        // initialized, `start` is aligned to BUFFER_ALIGN, which no `Plain` type exceeds, and every
        // bit pattern is a valid T. The exclusive borrow of `self` keeps the memory allocated and
        // excludes every other view of it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<T>(), count) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len > 0 && self.map.is_none() {
            // SAFETY: without a mapping, `try_zeroed` got `start` from `alloc_zeroed` with the
            // layout of `len` bytes and BUFFER_ALIGN, as here. The buffer owns it, so it is freed
            // only once.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
        }
    }
}

/// A pointer to the first element of an exclusively borrowed slice, which the tasks of one parallel
/// call share so that each can write its own elements.
///
/// Code that dereferences the pointer must make sure that the borrowed slice is still alive, that
/// it stays within the slice, and that no two threads access the same element.
pub(super) struct SharedMut<T>(*mut T);

// SAFETY: sharing the wrapper only copies the pointer. Each `unsafe` block that dereferences it has
// to show that no other thread accesses the same element; elements may be written from another
// thread than the one that owns the slice because `T` is `Send`.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T: Plain> SharedMut<T> {
    pub(super) fn new(slice: &mut [T]) -> SharedMut<T> {
        Self::at(slice.as_mut_ptr())
    }

    /// Wraps the pointer `first` to a slice, a part of which the caller has borrowed exclusively.
    pub(super) fn at(first: *mut T) -> SharedMut<T> {
        SharedMut(first)
    }

    /// The pointer. This is a method because a closure that named the field would capture the bare
    /// pointer, which is not `Sync`.
    pub(super) fn get(&self) -> *mut T {
        self.0
    }
}
