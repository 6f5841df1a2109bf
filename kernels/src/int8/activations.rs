//! Rows of activations as signed bytes: each 32 successive values of a row share a scale, their
//! largest magnitude's 127th part. A row's bytes depend on the row alone.
#![allow(unsafe_code, reason = "writes packed activations by pointer")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::dots::Dots;
use crate::operand::Source;
use crate::quant::{PART, round_to_byte};

/// Thirty-two values as bytes.
struct Part {
    /// Value of one step; NaN if a value is infinite or NaN, zero for values too small to divide.
    scale: f32,
    bytes: [i8; PART],
    /// The values' sum, negative.
    sum: f32,
}

impl Part {
    const ZERO: Part = Part { scale: 0.0, bytes: [0; PART], sum: 0.0 };

    #[inline(always)]
    fn of(values: &[f32; PART]) -> Part {
        // As integers, so that what is no number is the largest.
        let mut largest = 0;
        for value in values {
            largest = largest.max(value.to_bits() & 0x7fff_ffff);
        }
        let scale = if largest >= f32::INFINITY.to_bits() {
            f32::NAN
        } else {
            f32::from_bits(largest) / 127.0
        };
        if scale < f32::MIN_POSITIVE {
            return Part::ZERO;
        }
        let inverse = 1.0 / scale;
        let mut bytes = [0; PART];
        let mut sum = 0;
        for (byte, value) in bytes.iter_mut().zip(values) {
            *byte = round_to_byte(value * inverse);
            sum += i32::from(*byte);
        }
        #[allow(clippy::cast_precision_loss, reason = "at most 32 * 127")]
        Part { scale, bytes, sum: -(scale * sum as f32) }
    }
}

/// Where a part of a group's columns goes.
#[derive(Clone, Copy)]
pub(crate) struct PackedGroup {
    /// `[inner / 4][rows]` words, or `[inner / 32][rows][32]` bytes.
    pub words: *mut u8,
    /// `[inner / 32][rows]`.
    pub scales: *mut f32,
    /// As the scales.
    pub sums: *mut f32,
}

/// Rows that become a group.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// At most `size` rows, a multiple of 32 columns.
    pub source: Source<'a>,
    /// Rows of the group. Those that do not exist are zero.
    pub size: usize,
}

impl Rows<'_> {
    /// Calls `put` with each part, its place and its row in the group.
    #[inline(always)]
    fn each(&self, packed: &PackedGroup, mut put: impl FnMut(&[i8; PART], usize, usize)) {
        for index in 0..self.source.columns / PART {
            for row in 0..self.size {
                let part = if row < self.source.rows {
                    let values = self.source.row(row)[index * PART..].first_chunk();
                    values.map_or(Part::ZERO, Part::of)
                } else {
                    Part::ZERO
                };
                let at = index * self.size + row;
                // SAFETY: whoever made `packed` gives room for the group.
                unsafe {
                    packed.scales.add(at).write(part.scale);
                    packed.sums.add(at).write(part.sum);
                }
                put(&part.bytes, index, row);
            }
        }
    }
}

/// Packs a group for the dot products of `D`.
///
/// # Safety
/// The set of `D` is available; `packed` has room for the group.
#[inline(always)]
pub(super) unsafe fn pack<D: Dots>(rows: Rows<'_>, packed: PackedGroup) {
    rows.each(&packed, |bytes, index, row| {
        for (i, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let at = (index * PART / 4 + i) * rows.size + row;
            // SAFETY: the caller's promise.
            unsafe { D::put(*word, packed.words.add(at * D::WORD)) }
        }
    });
}

/// Packs a group as the rows of tiles.
///
/// # Safety
/// `packed` has room for the group.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn pack_tiles(rows: Rows<'_>, packed: PackedGroup) {
    rows.each(&packed, |bytes, index, row| {
        let at = (index * rows.size + row) * PART;
        // SAFETY: the caller's promise.
        unsafe { packed.words.add(at).cast::<[i8; PART]>().write_unaligned(*bytes) }
    });
}

/// `x`, rounded as the products see it.
#[cfg(test)]
pub(crate) fn rounded(x: &[f32]) -> Vec<f32> {
    let parts = x.as_chunks::<PART>().0.iter().map(Part::of);
    parts.flat_map(|part| part.bytes.map(|byte| f32::from(byte) * part.scale)).collect()
}
