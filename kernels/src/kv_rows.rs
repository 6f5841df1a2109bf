//! The way of keys and values into the cache: rounded and written row by row as soon as they are
//! computed.
//!
//! What is stored is nearest to what was computed; a position's bits depend on itself alone.
#![allow(unsafe_code, reason = "tasks write disjoint places of one store")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own place")]

use std::marker::PhantomData;

use half::slice::HalfFloatSliceExt;

use super::lanes::{LANES, Lanes, dispatch};
use super::{KvLayout, Path};

/// The largest finite f16.
const F16_MAX: f32 = 65_504.0;
/// Adding it leaves the nearest integer in the low bits of the significand.
const ROUND: f32 = 12_582_912.0;

/// Values of a head that are rounded together before they are turned, even.
const TOGETHER: usize = 256;

/// Keys or values of one layer, to be written, in the order that their [`KvLayout`] says.
#[derive(Debug)]
pub enum KvSliceMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// The bits of bf16 values.
    Bf16(&'a mut [u16]),
    /// The bits of f16 values.
    F16(&'a mut [u16]),
    /// Integers of 8 bits, which the scale of their position and head multiplies.
    Int8 {
        /// The integers.
        values: &'a mut [i8],
        /// `[block_count, block_size, kv_heads]`.
        scales: &'a mut [f32],
    },
}

impl KvSliceMut<'_> {
    fn len(&self) -> usize {
        match self {
            KvSliceMut::F32(values) => values.len(),
            KvSliceMut::Bf16(values) | KvSliceMut::F16(values) => values.len(),
            KvSliceMut::Int8 { values, .. } => values.len(),
        }
    }
}

/// The places of a step's rows in the store: `block * block_size + offset`, or none for rows that are
/// not written. No two rows have one place. Reused between steps.
#[derive(Debug, Default)]
pub struct KvPlaces {
    places: Vec<Option<usize>>,
    sorted: Vec<usize>,
}

impl KvPlaces {
    /// Takes the places of all rows.
    ///
    /// # Panics
    /// If two rows have one place: a bug of the caller.
    pub fn fill(&mut self, places: impl Iterator<Item = Option<usize>>) {
        self.places.clear();
        self.places.extend(places);
        self.sorted.clear();
        self.sorted.extend(self.places.iter().flatten());
        self.sorted.sort_unstable();
        let distinct = self.sorted.windows(2).all(|pair| pair[0] < pair[1]);
        assert!(distinct, "two rows are to be written to one place");
    }

    /// One more than the last place.
    fn end(&self) -> usize {
        self.sorted.last().map_or(0, |last| last + 1)
    }

    /// The place of each row.
    #[must_use]
    pub fn as_slice(&self) -> &[Option<usize>] {
        &self.places
    }
}

/// Where the rows of one product, keys or values, go.
#[derive(Debug)]
pub struct KvRows<'a> {
    path: Path,
    memory: Memory,
    layout: KvLayout,
    places: &'a [Option<usize>],
    head_dim: usize,
    /// Values of a row.
    width: usize,
    store: PhantomData<&'a mut [f32]>,
}

#[derive(Clone, Copy, Debug)]
enum Memory {
    F32(*mut f32),
    Bf16(*mut u16),
    F16(*mut u16),
    Int8(*mut i8, *mut f32),
}

// SAFETY: the pointers stand for an exclusive borrow; whoever writes through a shared reference
// promises that no two threads write one place.
unsafe impl Send for KvRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for KvRows<'_> {}

impl<'a> KvRows<'a> {
    /// The rows that `places` says, in `store`, which has the layout; a row is `[kv_heads, head_dim]`.
    ///
    /// # Panics
    /// If a place is out of range: a bug of the caller.
    #[must_use]
    pub fn new(
        path: Path,
        store: KvSliceMut<'a>,
        layout: KvLayout,
        places: &'a KvPlaces,
        kv_heads: usize,
        head_dim: usize,
    ) -> KvRows<'a> {
        let width = kv_heads * head_dim;
        let end = match layout {
            KvLayout::Rows => places.end(),
            KvLayout::Turned { block_size } => {
                assert!(block_size.is_multiple_of(LANES), "{block_size} positions are not turned");
                let pairs = matches!(store, KvSliceMut::Bf16(_));
                assert!(!pairs || head_dim.is_multiple_of(2), "heads of {head_dim} have no pairs");
                places.end().next_multiple_of(block_size)
            }
        };
        let (end, len) = (end * width, store.len());
        assert!(end <= len, "{end} values are out of range for a store of {len}");
        if let KvSliceMut::Int8 { scales, .. } = &store {
            assert_eq!(scales.len() * head_dim, len, "one scale a head");
        }
        let memory = match store {
            KvSliceMut::F32(values) => Memory::F32(values.as_mut_ptr()),
            KvSliceMut::Bf16(values) => Memory::Bf16(values.as_mut_ptr()),
            KvSliceMut::F16(values) => Memory::F16(values.as_mut_ptr()),
            KvSliceMut::Int8 { values, scales } => {
                Memory::Int8(values.as_mut_ptr(), scales.as_mut_ptr())
            }
        };
        let places = &places.places;
        KvRows { path, memory, layout, places, head_dim, width, store: PhantomData }
    }

    /// Rows there are.
    pub(super) fn rows(&self) -> usize {
        self.places.len()
    }

    /// Values of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Writes a whole row, `[kv_heads, head_dim]`.
    ///
    /// # Panics
    /// If there is no such row or it is of another size.
    pub fn write_row(&mut self, row: usize, values: &[f32]) {
        assert_eq!(values.len(), self.width, "a row has {} values", self.width);
        // SAFETY: the exclusive borrow: nobody else writes.
        unsafe { self.write(row, 0, values) }
    }

    /// Writes whole heads of a row, beginning with the head of value `first`.
    ///
    /// # Safety
    /// Nobody else writes these heads of the row at the same time.
    pub(super) unsafe fn write(&self, row: usize, first: usize, values: &[f32]) {
        let Some(place) = self.places[row] else { return };
        debug_assert!(first.is_multiple_of(self.head_dim));
        debug_assert!(values.len().is_multiple_of(self.head_dim));
        assert!(first + values.len() <= self.width, "a row has {} values", self.width);
        let at = place * self.width + first;
        // SAFETY: places are distinct and in range, so these heads are this call's alone.
        unsafe {
            if let KvLayout::Turned { block_size } = self.layout {
                for (index, head) in values.chunks_exact(self.head_dim).enumerate() {
                    self.write_turned(place, first / self.head_dim + index, head, block_size);
                }
                return;
            }
            let (from, len) = (values.as_ptr(), values.len());
            match self.memory {
                Memory::F32(to) => std::ptr::copy_nonoverlapping(from, to.add(at), len),
                Memory::Bf16(to) => {
                    let to = std::slice::from_raw_parts_mut(to.add(at), len);
                    bf16_dispatch(self.path, values, to);
                }
                Memory::F16(to) => {
                    round_to_f16(values, std::slice::from_raw_parts_mut(to.add(at), len));
                }
                Memory::Int8(to, scales) => {
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
            }
        }
    }

    /// Writes one head, turned.
    ///
    /// # Safety
    /// The place and head are there, and this call's alone.
    unsafe fn write_turned(&self, place: usize, kv_head: usize, head: &[f32], block_size: usize) {
        let (block, offset, lane) =
            (place / block_size, place % block_size / LANES * LANES, place % LANES);
        let kv_heads = self.width / self.head_dim;
        let panel = ((block * kv_heads + kv_head) * block_size + offset) * self.head_dim;
        for (index, values) in head.chunks(TOGETHER).enumerate() {
            let (at, len) = (panel + index * TOGETHER * LANES, values.len());
            // SAFETY: the caller's promise; a panel is there as a whole.
            unsafe {
                match self.memory {
                    Memory::F32(to) => scatter::<_, 1>(values, to.add(at + lane)),
                    Memory::Bf16(to) => {
                        let mut rounded = [0; TOGETHER];
                        bf16_dispatch(self.path, values, &mut rounded[..len]);
                        scatter::<_, 2>(&rounded[..len], to.add(at + 2 * lane));
                    }
                    Memory::F16(to) => {
                        let mut rounded = [0; TOGETHER];
                        round_to_f16(values, &mut rounded[..len]);
                        scatter::<_, 1>(&rounded[..len], to.add(at + lane));
                    }
                    Memory::Int8(to, scales) => {
                        let (scale, inverse) = scale_of(head);
                        scales.add(place * kv_heads + kv_head).write(scale);
                        let mut rounded = [0; TOGETHER];
                        int8_dispatch(self.path, values, inverse, &mut rounded[..len]);
                        scatter::<_, 1>(&rounded[..len], to.add(at + lane));
                    }
                }
            }
        }
    }
}

/// Writes values, N at a time, each time one panel's step further.
///
/// # Safety
/// `to` is valid for as many values of a panel's lane.
unsafe fn scatter<T: Copy, const N: usize>(from: &[T], to: *mut T) {
    let (groups, _) = from.as_chunks::<N>();
    for (index, group) in groups.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(index * N * LANES).cast::<[T; N]>().write_unaligned(*group) }
    }
}

#[inline(always)]
unsafe fn bf16_lanes<L: Lanes>(from: &[f32], to: &mut [u16]) {
    round_to_bf16(from, to);
}
dispatch! {
    /// # Safety
    /// None.
    unsafe fn bf16_dispatch(from: &[f32], to: &mut [u16]) = bf16_lanes
}

#[inline(always)]
unsafe fn int8_lanes<L: Lanes>(from: &[f32], inverse: f32, to: &mut [i8]) {
    round_to_int8(from, inverse, to);
}
dispatch! {
    /// # Safety
    /// None.
    unsafe fn int8_dispatch(from: &[f32], inverse: f32, to: &mut [i8]) = int8_lanes
}

/// Rounds to the bits of bf16, to nearest even. Both are of one size.
#[inline(always)]
fn round_to_bf16(from: &[f32], to: &mut [u16]) {
    for (value, rounded) in from.iter().zip(to) {
        let bits = value.to_bits();
        // Written without a branch, so that it is compiled to vector code.
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        *rounded = if value.is_nan() { quiet_nan } else { nearest } as u16;
    }
}

/// Rounds to the bits of f16, to nearest even; what is too large becomes the largest. Both are of
/// one size.
fn round_to_f16(from: &[f32], to: &mut [u16]) {
    let mut near = [0.0; 64];
    let mut rounded = [half::f16::ZERO; 64];
    for (from, to) in from.chunks(near.len()).zip(to.chunks_mut(near.len())) {
        let (near, rounded) = (&mut near[..from.len()], &mut rounded[..from.len()]);
        for (near, value) in near.iter_mut().zip(from) {
            *near = value.clamp(-F16_MAX, F16_MAX);
        }
        rounded.convert_from_f32_slice(near);
        for (to, rounded) in to.iter_mut().zip(rounded) {
            *to = rounded.to_bits();
        }
    }
}

/// What the integers of a head are to be multiplied with, and its values before they are rounded to integers
/// from -127 to 127. A head with a NaN or an infinity gets the scale NaN.
fn scale_of(head: &[f32]) -> (f32, f32) {
    // Without the sign, bits are ordered as what they stand for; infinity and NaN come last.
    let largest = head.iter().fold(0, |largest, value| largest.max(value.abs().to_bits()));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return (f32::NAN, 0.0);
    }
    // The inverse of a number below 2^-120 or so would overflow: such a head is taken for zero.
    (largest / 127.0, if largest > 1e-36 { 127.0 / largest } else { 0.0 })
}

/// Rounds to integers what the inverse brings into their range. Both are of one size.
#[inline(always)]
fn round_to_int8(from: &[f32], inverse: f32, to: &mut [i8]) {
    for (value, rounded) in from.iter().zip(to) {
        // The low byte of the sum is the nearest integer, in two's complement.
        *rounded = (value * inverse + ROUND).to_bits() as i8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: bf16 rounding is that of the `half` crate, for every kind of value.
    #[test]
    fn bf16_rounds_as_half_does() {
        let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let mut to = vec![0; from.len()];
        round_to_bf16(&from, &mut to);
        for (value, bits) in from.iter().zip(to) {
            assert_eq!(bits, half::bf16::from_f32(*value).to_bits(), "{value}");
        }
    }

    /// Goal: f16 rounding is that of the `half` crate within its range, and ends at its largest.
    #[test]
    fn f16_rounds_as_half_does_and_saturates() {
        let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let mut to = vec![0; from.len()];
        round_to_f16(&from, &mut to);
        for (value, bits) in from.iter().zip(to) {
            let want = half::f16::from_f32(value.clamp(-F16_MAX, F16_MAX));
            let got = half::f16::from_bits(bits);
            assert!(got == want || got.is_nan() && value.is_nan(), "{value}: {got} for {want}");
        }
    }

    /// Goal: integers are off by at most 1/254 of the largest value; zeroes, tiny heads and what is
    /// not finite come back as what they are.
    #[test]
    fn integers_are_near() {
        for scale in [1e-42, 1e-30, 0.01, 1.0, 3e4, 1e38] {
            let from: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * scale).collect();
            let mut to = vec![0; 64];
            let (factor, inverse) = scale_of(&from);
            round_to_int8(&from, inverse, &mut to);
            let largest = from.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            for (value, integer) in from.iter().zip(&to) {
                let error = (f64::from(*value) - f64::from(*integer) * f64::from(factor)).abs();
                let bound = f64::from(largest) / 254.0 * 1.0001;
                assert!(error <= bound.max(1e-36), "{value}: {integer} x {factor}");
            }
        }
        let mut to = [7; 2];
        let (scale, inverse) = scale_of(&[0.0, -0.0]);
        round_to_int8(&[0.0, -0.0], inverse, &mut to);
        assert_eq!((scale, to), (0.0, [0, 0]));
        for wild in [f32::NAN, f32::INFINITY] {
            assert!(scale_of(&[1.0, wild]).0.is_nan(), "a NaN scale makes the whole head NaN");
        }
    }
}
