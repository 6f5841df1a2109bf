//! Qwen3-VL and Qwen3.5.

use stolon_backend::ImageInput;

use super::{PreparedImage, tile};
use crate::config::{ProcessorConfig, Qwen3VlTiles};
use crate::error::PictureError;
use crate::picture::Picture;
use crate::resize::resize;

/// Maximum quotient of the longer and the shorter edge of a picture.
const RATIO_MAX: usize = 200;

/// Prepares a picture as `Qwen2VLImageProcessor` does, which Qwen3-VL uses, too.
///
/// # Errors
/// [`PictureError::Shape`] if the picture is too narrow.
pub(super) fn prepare(
    config: &ProcessorConfig,
    tiles: &Qwen3VlTiles,
    picture: &Picture,
) -> Result<PreparedImage, PictureError> {
    let [width, height] = [picture.width(), picture.height()];
    if width.max(height) > RATIO_MAX * width.min(height) {
        let expected = format!("edges of which one is at most {RATIO_MAX} times the other");
        return Err(PictureError::Shape { expected, width, height });
    }
    let size = resized(tiles, [width, height]);
    let [columns, rows] = size.map(|edge| edge / tiles.square_edge);
    let fitted = resize(picture, size, config.resampling);
    let input = ImageInput { columns, ..tile(config, fitted, columns * rows, false) };
    // In the placeholder, the image token is between the tokens of the beginning and the end.
    Ok(PreparedImage { tiles: vec![input], text: config.placeholder.clone() })
}

/// The size of a picture whose edges are multiples of a square and whose number of pixels is within
/// the bounds, as far as the squares permit. The shape is about the same (`smart_resize`).
fn resized(tiles: &Qwen3VlTiles, size: [usize; 2]) -> [usize; 2] {
    let Qwen3VlTiles { square_edge, pixels_min, pixels_max } = *tiles;
    let square = square_edge as f64;
    let edges = size.map(|edge| edge as f64);
    // Python rounds halves to even numbers, too.
    let rounded = edges.map(|edge| (edge / square).round_ties_even() * square);
    let (pixels, area) = (edges[0] * edges[1], rounded[0] * rounded[1]);
    let resized = if area > pixels_max as f64 {
        let factor = (pixels / pixels_max as f64).sqrt();
        edges.map(|edge| (edge / factor / square).floor() * square)
    } else if area < pixels_min as f64 {
        let factor = (pixels_min as f64 / pixels).sqrt();
        edges.map(|edge| (edge * factor / square).ceil() * square)
    } else {
        rounded
    };
    resized.map(|edge| (edge as usize).max(square_edge))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TILES: Qwen3VlTiles =
        Qwen3VlTiles { square_edge: 32, pixels_min: 65_536, pixels_max: 4096 * 1024 };

    /// Goal: pictures of all shapes have the sizes that `smart_resize` of transformers gives them.
    #[test]
    fn sizes_are_those_of_transformers() {
        for (size, expected) in [
            ([640, 480], [640, 480]),
            ([1, 1], [256, 256]),
            ([1, 200], [32, 3648]),
            ([200, 1], [3648, 32]),
            ([48, 48], [256, 256]),
            ([80, 3000], [64, 3008]),
            ([272, 240], [256, 256]),
            ([5000, 4000], [2272, 1824]),
            ([16_384, 4096], [4096, 1024]),
            ([4000, 20], [4000, 32]),
            ([3, 599], [32, 3648]),
            ([1024, 16_384], [512, 8192]),
        ] {
            assert_eq!(resized(&TILES, size), expected, "{size:?}");
        }
    }

    /// Goal: no picture that the processor accepts has many more pixels than the maximum, and each
    /// has whole squares.
    #[test]
    fn the_number_of_pixels_is_bounded() {
        let lengths = [1, 2, 31, 33, 199, 1000, 5555, 16_384];
        for pixels_max in [1024, 65_536, 4096 * 1024] {
            let tiles = Qwen3VlTiles { pixels_min: pixels_max.min(65_536), pixels_max, ..TILES };
            for size in lengths.iter().flat_map(|width| lengths.map(|height| [*width, height])) {
                if size[0].max(size[1]) > RATIO_MAX * size[0].min(size[1]) {
                    continue;
                }
                let [width, height] = resized(&tiles, size);
                assert!(width.is_multiple_of(32) && height.is_multiple_of(32), "{size:?}");
                let bound = pixels_max + 32 * (width + height);
                assert!(width > 0 && height > 0 && width * height <= bound, "{size:?}");
            }
        }
    }
}
