//! One step of the online softmax: turns the scores of a row group in a tile into weights.
#![allow(unsafe_code, reason = "accesses scratch memory through raw pointers")]

use std::ops::Range;

use super::arithmetic::Arithmetic;
use super::work::RowGroup;
use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::attention::softmax_state::SoftmaxState;
use crate::attention::tile_view::TileScales;
use crate::lanes::{self, LANES, Lanes};

/// The properties of a tile that the softmax needs.
pub(super) struct TileScores<'a> {
    /// The scales of keys and values, if they are bytes.
    pub(super) scales: Option<&'a TileScales>,
    /// Soft-capping, in the units of the scores.
    pub(super) softcap: Option<f32>,
}

/// Bounds of scores: minus infinity for hidden positions, infinity for those that are seen. The 64
/// bounds of a tile in which the positions from `start` on are seen begin at `64 - start`; those in
/// which the positions from `end` on are hidden begin at `128 - end`.
static BOUNDS: [f32; 3 * POSITIONS_PER_TILE] = {
    let mut bounds = [f32::NEG_INFINITY; 3 * POSITIONS_PER_TILE];
    let mut i = POSITIONS_PER_TILE;
    while i < 2 * POSITIONS_PER_TILE {
        bounds[i] = f32::INFINITY;
        i += 1;
    }
    bounds
};

impl TileScores<'_> {
    /// Turns the scores of a row group into weights relative to the largest score of each query so
    /// far, and rescales the queries' states to it. `seen` gives the positions of the tile that a
    /// row sees, counted from the tile's first; it is `None` if all rows see the whole tile. Other
    /// positions get the weight zero. The scales of bytes are applied here, once per position:
    /// those of keys to scores, those of values to weights.
    ///
    /// # Safety
    /// `scores` is valid for 64 values for each live row of the group, and holds the scores of
    /// `group.panels` panels, all 4 if `seen` is `None`. `state` has at least `group.first +
    /// group.live` queries, its memory is valid, and no other thread accesses it. What the methods
    /// of A need is available.
    #[inline(always)]
    pub(super) unsafe fn step<A: Arithmetic>(
        &self,
        scores: *mut f32,
        group: &RowGroup,
        state: &SoftmaxState,
        seen: Option<impl Fn(usize) -> Range<usize>>,
    ) {
        // SAFETY: the conditions are those of this function.
        unsafe {
            if seen.is_none() && self.scales.is_none() && self.softcap.is_none() {
                self.step_of_rows::<A, true>(scores, group, state, seen);
            } else {
                self.step_of_rows::<A, false>(scores, group, state, seen);
            }
        }
    }

    /// [`Self::step`]. `PLAIN` says that scores are neither masked nor scaled nor capped.
    ///
    /// # Safety
    /// As for [`Self::step`].
    #[inline(always)]
    unsafe fn step_of_rows<A: Arithmetic, const PLAIN: bool>(
        &self,
        scores: *mut f32,
        group: &RowGroup,
        state: &SoftmaxState,
        seen: Option<impl Fn(usize) -> Range<usize>>,
    ) {
        let mut in_tile = [f32::NEG_INFINITY; LANES];
        let (mut before, mut after, mut factors) = (in_tile, in_tile, in_tile);
        // SAFETY: a row group has at most 16 rows, of which `live` have a row of scores and a query
        // in `state` from number `first` on. The arrays have 16 values. The instruction set is
        // available.
        unsafe {
            let largest = state.largest.add(group.first);
            std::ptr::copy_nonoverlapping(largest, before.as_mut_ptr(), group.live);
            for (row, in_tile) in in_tile.iter_mut().enumerate().take(group.live) {
                let scores = scores.add(row * POSITIONS_PER_TILE);
                *in_tile = if PLAIN {
                    largest_of_tile::<A>(scores)
                } else {
                    let seen = seen.as_ref().map_or(0..POSITIONS_PER_TILE, |seen| seen(row));
                    self.prepare::<A>(scores, group.panels, seen)
                };
            }
            let old = A::Lanes::load(before.as_ptr());
            let new = old.max(A::Lanes::load(in_tile.as_ptr()));
            new.store(after.as_mut_ptr());
            std::ptr::copy_nonoverlapping(after.as_ptr(), largest, group.live);
            // If a query has seen nothing yet, any finite number makes its weights and sums zero.
            let relative = A::Lanes::splat(f32::MIN).max(new);
            relative.store(after.as_mut_ptr());
            lanes::exp2(old.sub(relative)).store(factors.as_mut_ptr());
            for row in 0..group.live {
                let scores = scores.add(row * POSITIONS_PER_TILE);
                let sum = if PLAIN {
                    exponentials_of_tile::<A>(scores, after[row])
                } else {
                    self.exponentials::<A>(scores, group.panels, after[row])
                };
                let sums = state.sums.add(group.first + row);
                *sums = *sums * factors[row] + sum;
                state.scale::<A::Lanes>(group.first + row, factors[row]);
            }
        }
    }

    /// Applies scales, soft-capping and the mask to a row of scores, and returns the largest.
    ///
    /// # Safety
    /// `scores` is valid for 64 values, `panels` is at most 4, and `seen` lies within `0..64`. The instruction set is
    /// available.
    #[inline(always)]
    unsafe fn prepare<A: Arithmetic>(
        &self,
        scores: *mut f32,
        panels: usize,
        seen: Range<usize>,
    ) -> f32 {
        // SAFETY: the offsets of panels are below 64, as many as there are scores and scales. Both
        // reads of 64 bounds lie within the 192, because `start` and `end` are at most 64.
        unsafe {
            let mut largest = A::Lanes::splat(f32::NEG_INFINITY);
            for panel in (0..panels * LANES).step_by(LANES) {
                let at = scores.add(panel);
                let mut score = A::Lanes::load(at);
                if let Some(scales) = self.scales {
                    score = score.mul(A::Lanes::load(scales.keys.as_ptr().add(panel)));
                }
                if let Some(cap) = self.softcap {
                    score = lanes::soft_cap(score, cap);
                }
                let bounds = BOUNDS.as_ptr().add(POSITIONS_PER_TILE + panel);
                let from = A::Lanes::load(bounds.sub(seen.start));
                let to = A::Lanes::load(bounds.add(POSITIONS_PER_TILE - seen.end));
                // A hidden score may be NaN. The smaller of a NaN and a bound is the bound.
                score = score.min(from.min(to));
                score.store(at);
                largest = largest.max(score);
            }
            largest.reduce_max()
        }
    }

    /// Turns a row of scores into weights relative to the score `largest`, and returns their sum.
    ///
    /// # Safety
    /// `scores` is valid for 64 values, `panels` is at most 4, and what the methods of A need is available.
    #[inline(always)]
    unsafe fn exponentials<A: Arithmetic>(
        &self,
        scores: *mut f32,
        panels: usize,
        largest: f32,
    ) -> f32 {
        // SAFETY: the offsets of panels are below 64. The two panels of a pair are loaded before
        // their weights are stored, at most as far as their scores reach.
        unsafe {
            let largest = A::Lanes::splat(largest);
            let mut sum = A::Lanes::splat(0.0);
            for first in (0..panels).step_by(2) {
                let mut weights = [A::Lanes::splat(0.0); 2];
                for (weight, panel) in weights.iter_mut().zip(first..panels) {
                    let score = A::Lanes::load(scores.add(panel * LANES));
                    *weight = A::exp2(score.sub(largest));
                    sum = sum.add(*weight);
                    if let Some(scales) = self.scales {
                        let scale = A::Lanes::load(scales.values.as_ptr().add(panel * LANES));
                        *weight = weight.mul(scale);
                    }
                }
                A::store_weights(scores, first, weights);
            }
            sum.reduce_add()
        }
    }
}

/// The largest of 64 scores.
///
/// # Safety
/// `scores` is readable for 64 values, and the instruction set is available.
#[inline(always)]
unsafe fn largest_of_tile<A: Arithmetic>(scores: *const f32) -> f32 {
    // SAFETY: the four vectors are the 64 scores.
    unsafe {
        let [a, b, c, d] = load_tile::<A>(scores);
        a.max(b).max(c.max(d)).reduce_max()
    }
}

/// Turns 64 scores into weights relative to the score `largest`, and returns their sum. The weights
/// and their order of addition are those of [`TileScores::exponentials`] without scales.
///
/// # Safety
/// `scores` is valid for 64 values, and what the methods of A need is available.
#[inline(always)]
unsafe fn exponentials_of_tile<A: Arithmetic>(scores: *mut f32, largest: f32) -> f32 {
    // SAFETY: the four vectors are the 64 scores. All are loaded before weights are stored.
    unsafe {
        let largest = A::Lanes::splat(largest);
        let [a, b, c, d] = load_tile::<A>(scores);
        let (a, b) = (A::exp2(a.sub(largest)), A::exp2(b.sub(largest)));
        let (c, d) = (A::exp2(c.sub(largest)), A::exp2(d.sub(largest)));
        A::store_weights(scores, 0, [a, b]);
        A::store_weights(scores, 2, [c, d]);
        a.add(b).add(c).add(d).reduce_add()
    }
}

/// The 64 scores of a row.
///
/// # Safety
/// `scores` is readable for 64 values, and the instruction set is available.
#[inline(always)]
unsafe fn load_tile<A: Arithmetic>(scores: *const f32) -> [A::Lanes; 4] {
    // SAFETY: the four vectors are the 64 scores.
    unsafe {
        [
            A::Lanes::load(scores),
            A::Lanes::load(scores.add(LANES)),
            A::Lanes::load(scores.add(2 * LANES)),
            A::Lanes::load(scores.add(3 * LANES)),
        ]
    }
}
