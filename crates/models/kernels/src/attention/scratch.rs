//! Division of one scratch buffer into pieces.

/// The starts of successive pieces of `memory` with the given lengths. Each pointer is valid for
/// its length, and the pieces do not overlap.
///
/// # Panics
/// If `memory` is shorter than all pieces together.
pub(super) fn pieces<const N: usize>(mut memory: &mut [f32], lengths: [usize; N]) -> [*mut f32; N] {
    lengths.map(|length| {
        let (piece, rest) = std::mem::take(&mut memory).split_at_mut(length);
        memory = rest;
        piece.as_mut_ptr()
    })
}
