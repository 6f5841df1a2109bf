//! Pictures, for the tests with images.

use std::sync::Arc;

/// An uncompressed BMP file with pixels that follow from `seed`.
pub(crate) fn picture(width: u32, height: u32, seed: u32) -> Arc<[u8]> {
    let row = (3 * width).next_multiple_of(4);
    let (header, size) = (54_u32, row * height);
    let mut file = b"BM".to_vec();
    for word in [header + size, 0, header, 40, width, height, 24 << 16 | 1, 0, size, 0, 0, 0, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend((0..size).map(|at| (at.wrapping_mul(seed * 2 + 7) >> 3) as u8));
    file.into()
}
