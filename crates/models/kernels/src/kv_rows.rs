//! Writing keys and values into the KV cache. Each row is converted to the stored type and written
//! as soon as it is computed.
//!
//! A value is rounded to the nearest one that the stored type represents. The stored bits of a
//! position depend on that position's values alone.
#![allow(unsafe_code, reason = "tasks write disjoint slots of one store")]

mod rounding;

use std::marker::PhantomData;

use crate::int4::RoundedHeads;
use crate::kv_layout::KvLayout;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::path::Path;
pub use rounding::int8_head;
use rounding::{round_to_bf16, round_to_f16, round_to_int8, scale_of};

/// Values of a head that are rounded into a local array at a time before they are written
/// transposed. Even, so that a pair of bf16 values is never split.
const VALUES_PER_CHUNK: usize = 256;

/// Keys or values of one layer as a mutable slice. Their order is that of the [`KvLayout`] which
/// the slice is used with.
#[derive(Debug)]
pub enum KvSliceMut<'a> {
    /// f32 values.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
    /// The bits of f16 values.
    F16(&'a mut [u16]),
    /// Signed bytes from -127 to 127 with one scale per position and head.
    Int8 {
        /// The quantized values. The value itself is `values[i] * scale`.
        values: &'a mut [i8],
        /// `[block_count, block_size, kv_heads]`, in either layout.
        scales: &'a mut [f32],
    },
    /// Codes of 4 bits of rotated heads with one scale per position and head. Heads have an even
    /// length.
    Int4 {
        /// The codes of two successive values of a head in each byte, the first in the low bits.
        packed: &'a mut [u8],
        /// `[block_count, block_size, kv_heads]`, in either layout.
        scales: &'a mut [f32],
    },
}

impl KvSliceMut<'_> {
    fn len(&self) -> usize {
        match self {
            KvSliceMut::F32(values) => values.len(),
            KvSliceMut::Bf16(values) | KvSliceMut::F16(values) => values.len(),
            KvSliceMut::Int8 { values, .. } => values.len(),
            KvSliceMut::Int4 { packed, .. } => 2 * packed.len(),
        }
    }
}

/// The slot mapping of a step, as in vLLM: for each row of a batch, the slot of the KV cache that
/// its keys and values are written to. A slot is `block * block_size + offset`.
///
/// **Invariant**: no two rows have the same slot. [`KvRows`] relies on it to write rows from
/// several threads. The allocations are reused from step to step.
#[derive(Debug, Default)]
pub struct SlotMapping {
    /// The slot of each row; `None` for rows that are not written.
    slots: Vec<Option<usize>>,
    /// All slots in ascending order.
    sorted: Vec<usize>,
}

impl SlotMapping {
    /// Replaces the mapping: one item per row, `None` for rows that are not written.
    ///
    /// # Panics
    /// If two rows have the same slot.
    pub fn fill(&mut self, slots: impl Iterator<Item = Option<usize>>) {
        self.slots.clear();
        self.slots.extend(slots);
        self.sorted.clear();
        self.sorted.extend(self.slots.iter().flatten());
        self.sorted.sort_unstable();
        let distinct = self.sorted.windows(2).all(|pair| pair[0] < pair[1]);
        if !distinct {
            // The invariant must hold also if the panic is caught.
            self.slots.clear();
            self.sorted.clear();
        }
        assert!(distinct, "two rows are to be written to the same slot");
    }

    /// The highest slot plus one; 0 if there are none.
    fn end(&self) -> usize {
        self.sorted.last().map_or(0, |last| last + 1)
    }

    /// The slot of each row, in the order of the rows.
    #[must_use]
    pub fn as_slice(&self) -> &[Option<usize>] {
        &self.slots
    }
}

/// The destination of the key or value rows of one step in one layer of the KV cache.
///
/// A row is `[kv_heads, head_dim]`, the keys or values of one position. It is converted to the
/// stored type and written to the row's slot in the store's layout.
#[derive(Debug)]
pub struct KvRows<'a> {
    path: Path,
    store: StorePointer,
    layout: KvLayout,
    /// The slot of each row: distinct, and all within the store.
    slots: &'a [Option<usize>],
    head_dim: usize,
    /// Values of a row: `kv_heads * head_dim`.
    width: usize,
    /// The exclusive borrow of the memory that `store` points to.
    borrow: PhantomData<&'a mut [f32]>,
}

/// The start of a [`KvSliceMut`], with the start of the scales if there are any.
#[derive(Clone, Copy, Debug)]
enum StorePointer {
    F32(*mut f32),
    Bf16(*mut u16),
    F16(*mut u16),
    Int8(*mut i8, *mut f32),
    Int4(*mut u8, *mut f32),
}

// SAFETY: the pointers take the place of the exclusive borrow `&'a mut [..]` of plain numbers that
// `new` got, and such a borrow may move to another thread.
unsafe impl Send for KvRows<'_> {}
// SAFETY: through a shared reference only `write` accesses the store. It is unsafe, and its callers
// make sure that no two threads write the same heads of a row; different rows have different slots
// by the invariant of `SlotMapping`.
unsafe impl Sync for KvRows<'_> {}

impl<'a> KvRows<'a> {
    /// Creates the destination of as many rows as `slots` has.
    ///
    /// `store` holds all blocks of the layer in the order of `layout`. A row is `[kv_heads,
    /// head_dim]`.
    ///
    /// # Panics
    /// If a slot lies outside the store, if a store with scales does not have exactly one per head,
    /// if heads of 4 bits have an odd length, or if `layout` is transposed with a block size that is
    /// not a multiple of 16 or with bf16 heads of odd length.
    #[must_use]
    pub fn new(
        path: Path,
        store: KvSliceMut<'a>,
        layout: KvLayout,
        slots: &'a SlotMapping,
        kv_heads: usize,
        head_dim: usize,
    ) -> KvRows<'a> {
        let width = kv_heads * head_dim;
        let end = match layout {
            KvLayout::Rows => slots.end(),
            KvLayout::Transposed { block_size } => {
                assert!(
                    block_size.is_multiple_of(LANES),
                    "transposed blocks must be a multiple of {LANES} positions, got {block_size}"
                );
                let pairs = matches!(store, KvSliceMut::Bf16(_));
                assert!(
                    !pairs || head_dim.is_multiple_of(2),
                    "transposed bf16 heads must have an even length, got {head_dim}"
                );
                slots.end().next_multiple_of(block_size)
            }
        };
        let len = store.len();
        assert!(
            end.checked_mul(width).is_some_and(|values| values <= len),
            "{end} slots of {width} values are out of range for a store of {len} values"
        );
        if let KvSliceMut::Int8 { scales, .. } | KvSliceMut::Int4 { scales, .. } = &store {
            assert_eq!(scales.len() * head_dim, len, "expected one scale per position and head");
        }
        assert!(
            !matches!(store, KvSliceMut::Int4 { .. }) || head_dim.is_multiple_of(2),
            "heads of 4 bits must have an even length, got {head_dim}"
        );
        let store = match store {
            KvSliceMut::F32(values) => StorePointer::F32(values.as_mut_ptr()),
            KvSliceMut::Bf16(values) => StorePointer::Bf16(values.as_mut_ptr()),
            KvSliceMut::F16(values) => StorePointer::F16(values.as_mut_ptr()),
            KvSliceMut::Int8 { values, scales } => {
                StorePointer::Int8(values.as_mut_ptr(), scales.as_mut_ptr())
            }
            KvSliceMut::Int4 { packed, scales } => {
                StorePointer::Int4(packed.as_mut_ptr(), scales.as_mut_ptr())
            }
        };
        let slots = &slots.slots;
        KvRows { path, store, layout, slots, head_dim, width, borrow: PhantomData }
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.slots.len()
    }

    /// Values of a row: `kv_heads * head_dim`.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Writes a whole row, `[kv_heads, head_dim]`. Does nothing if the row has no slot.
    ///
    /// # Panics
    /// If `row` is not below the number of rows, or `values` has another length than a row.
    pub fn write_row(&mut self, row: usize, values: &[f32]) {
        assert_eq!(values.len(), self.width, "a row has {} values", self.width);
        // SAFETY: `&mut self` proves that no other thread writes.
        unsafe { self.write(row, 0, values) }
    }

    /// Writes whole heads of a row, of which the first begins at the row's value `first`. Does
    /// nothing if the row has no slot.
    ///
    /// # Safety
    /// No other thread writes these heads of this row at the same time.
    pub(super) unsafe fn write(&self, row: usize, first: usize, values: &[f32]) {
        let Some(slot) = self.slots[row] else { return };
        debug_assert!(first.is_multiple_of(self.head_dim), "{first} begins no head");
        debug_assert!(values.len().is_multiple_of(self.head_dim), "{} values", values.len());
        assert!(first + values.len() <= self.width, "a row has {} values", self.width);
        if let KvLayout::Transposed { block_size } = self.layout {
            for (index, head) in values.chunks_exact(self.head_dim).enumerate() {
                // SAFETY: the slot is one of `slots`. The heads are below `width / head_dim` by the
                // assertion above, and no other thread writes them: rows have distinct slots, and
                // for this row the caller makes sure of it.
                unsafe {
                    self.write_transposed(slot, first / self.head_dim + index, head, block_size);
                }
            }
            return;
        }
        let at = slot * self.width + first;
        let (from, len) = (values.as_ptr(), values.len());
        // SAFETY: `new` has checked that `(slot + 1) * width` values lie within the store and that
        // it has a scale for each `head_dim` of them, so `at..at + len` and their scales are in
        // bounds by the assertion above. No other thread accesses them: the store is exclusively
        // borrowed, rows have distinct slots, and for this row the caller makes sure of it.
        // `values` cannot overlap the store for the same reason. The dispatched functions have no
        // conditions.
        unsafe {
            match self.store {
                StorePointer::F32(to) => std::ptr::copy_nonoverlapping(from, to.add(at), len),
                StorePointer::Bf16(to) => {
                    let to = std::slice::from_raw_parts_mut(to.add(at), len);
                    bf16_dispatch(self.path, values, to);
                }
                StorePointer::F16(to) => {
                    round_to_f16(values, std::slice::from_raw_parts_mut(to.add(at), len));
                }
                StorePointer::Int8(to, scales) => {
                    let scales = scales.add(at / self.head_dim);
                    for (index, head) in values.chunks_exact(self.head_dim).enumerate() {
                        let to = std::slice::from_raw_parts_mut(
                            to.add(at + index * self.head_dim),
                            self.head_dim,
                        );
                        let (scale, inverse) = scale_of(head);
                        scales.add(index).write(scale);
                        int8_dispatch(self.path, head, inverse, to);
                    }
                }
                StorePointer::Int4(to, scales) => {
                    let RoundedHeads { packed, scales: own } =
                        RoundedHeads::new(self.path, values, self.head_dim);
                    packed.as_ptr().copy_to_nonoverlapping(to.add(at / 2), packed.len());
                    own.as_ptr().copy_to_nonoverlapping(scales.add(at / self.head_dim), own.len());
                }
            }
        }
    }

    /// Writes one head of `head_dim` values to a store of the layout [`KvLayout::Transposed`].
    ///
    /// # Safety
    /// `slot` is one of `self.slots`, `kv_head` is below `width / head_dim`, `block_size` is that
    /// of the layout, and no other thread writes this head of this slot at the same time.
    unsafe fn write_transposed(
        &self,
        slot: usize,
        kv_head: usize,
        head: &[f32],
        block_size: usize,
    ) {
        let (block, offset, lane) =
            (slot / block_size, slot % block_size / LANES * LANES, slot % LANES);
        let kv_heads = self.width / self.head_dim;
        let panel = ((block * kv_heads + kv_head) * block_size + offset) * self.head_dim;
        let chunks = head.chunks(VALUES_PER_CHUNK).enumerate();
        let chunks =
            chunks.map(|(index, values)| (panel + index * VALUES_PER_CHUNK * LANES, values));
        // SAFETY: `new` has checked that the store holds whole blocks up to the highest slot, so the
        // panel of `16 * head_dim` values at `panel` lies within it. The values of a chunk go to lane
        // `lane` of the panel's steps from `index * VALUES_PER_CHUNK` on, of which there are as many;
        // for bf16 and 4 bits, `head_dim` and so this number are even. Two codes of 4 bits are a
        // byte. `slot * kv_heads + kv_head` is below the number of scales. Other slots have other
        // lanes or panels, other heads other panels, and for this head of this slot the caller
        // excludes other threads. The dispatched functions have no conditions.
        unsafe {
            match self.store {
                StorePointer::F32(to) => {
                    for (at, values) in chunks {
                        scatter::<_, 1>(values, to.add(at + lane));
                    }
                }
                StorePointer::Bf16(to) => {
                    for (at, values) in chunks {
                        let mut rounded = [0; VALUES_PER_CHUNK];
                        bf16_dispatch(self.path, values, &mut rounded[..values.len()]);
                        scatter::<_, 2>(&rounded[..values.len()], to.add(at + 2 * lane));
                    }
                }
                StorePointer::F16(to) => {
                    for (at, values) in chunks {
                        let mut rounded = [0; VALUES_PER_CHUNK];
                        round_to_f16(values, &mut rounded[..values.len()]);
                        scatter::<_, 1>(&rounded[..values.len()], to.add(at + lane));
                    }
                }
                StorePointer::Int8(to, scales) => {
                    let (scale, inverse) = scale_of(head);
                    scales.add(slot * kv_heads + kv_head).write(scale);
                    for (at, values) in chunks {
                        let mut rounded = [0; VALUES_PER_CHUNK];
                        int8_dispatch(self.path, values, inverse, &mut rounded[..values.len()]);
                        scatter::<_, 1>(&rounded[..values.len()], to.add(at + lane));
                    }
                }
                StorePointer::Int4(to, scales) => {
                    let rounded = RoundedHeads::new(self.path, head, self.head_dim);
                    scales.add(slot * kv_heads + kv_head).write(rounded.scales[0]);
                    scatter::<_, 1>(&rounded.packed, to.add(panel / 2 + lane));
                }
            }
        }
    }
}

/// Writes groups of N successive values, each group `16 * N` values after the one before it: one
/// lane of a transposed panel. A remainder of fewer than N values is not written.
///
/// # Safety
/// `to + i * 16 * N` is writable for N values, for each `i` below `from.len() / N`, and no other
/// thread accesses them.
unsafe fn scatter<T: Copy, const N: usize>(from: &[T], to: *mut T) {
    let (groups, _) = from.as_chunks::<N>();
    for (index, group) in groups.iter().enumerate() {
        // SAFETY: `index` is below `from.len() / N`, for which the caller allows the write; it
        // needs no alignment beyond that of T, and takes none.
        unsafe { to.add(index * N * LANES).cast::<[T; N]>().write_unaligned(*group) }
    }
}

#[inline(always)]
unsafe fn bf16_lanes<L: Lanes>(from: &[f32], to: &mut [u16]) {
    round_to_bf16(from, to);
}
dispatch! {
    /// [`round_to_bf16`], compiled for the instruction set of `path`.
    ///
    /// # Safety
    /// There are no conditions; `dispatch!` makes unsafe functions only.
    unsafe fn bf16_dispatch(from: &[f32], to: &mut [u16]) = bf16_lanes
}

#[inline(always)]
unsafe fn int8_lanes<L: Lanes>(from: &[f32], inverse: f32, to: &mut [i8]) {
    round_to_int8(from, inverse, to);
}
dispatch! {
    /// [`round_to_int8`], compiled for the instruction set of `path`.
    ///
    /// # Safety
    /// There are no conditions; `dispatch!` makes unsafe functions only.
    unsafe fn int8_dispatch(from: &[f32], inverse: f32, to: &mut [i8]) = int8_lanes
}
