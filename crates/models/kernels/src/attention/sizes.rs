//! The sizes in which attention divides a context. They are part of the definition of a result,
//! because they fix the order of its sums.

/// Positions of a tile on SIMD lanes: their scores for one query are computed together.
pub(super) const POSITIONS_PER_TILE: usize = 64;
/// Positions of a span, which share one running softmax: a multiple of the tile sizes.
pub(super) const POSITIONS_PER_SPAN: usize = 512;
const _: () = assert!(POSITIONS_PER_SPAN.is_multiple_of(POSITIONS_PER_TILE));
