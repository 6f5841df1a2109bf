//! Moondream 2 and 3.

use stolon_backend::ImageInput;

use super::{PreparedImage, content_hash};
use crate::config::{MoondreamTiles, ProcessorConfig};
use crate::picture::Picture;
use crate::resize::resize_shrunk;

/// Prepares a picture as `kestrel` does: the whole picture as a square, and tiles that overlap.
pub(super) fn prepare(
    config: &ProcessorConfig,
    tiles: &MoondreamTiles,
    picture: &Picture,
) -> PreparedImage {
    let MoondreamTiles { tile_edge: edge, margin, tiles_max, rows: kv_len } = *tiles;
    let step = edge - 2 * margin;
    let inner =
        [picture.width(), picture.height()].map(|length| length.saturating_sub(2 * margin).max(1));
    let [columns, rows] = tiling(inner, step, tiles_max);
    let fitted = resize_shrunk(picture, [columns, rows].map(|count| count * step + 2 * margin));
    let (_, mut pixels) = resize_shrunk(picture, [edge, edge]).into_parts();
    for row in 0..rows {
        for column in 0..columns {
            let tile = fitted.crop([column * step, row * step], [edge, edge]);
            pixels.extend_from_slice(tile.pixels());
        }
    }
    let size = [edge, edge * (1 + rows * columns)];
    let hash = content_hash(config, &format!("{size:?} [{columns}, {rows}] {kv_len}"), &pixels);
    let input = ImageInput {
        content_hash: hash,
        kv_len,
        full_attention: true,
        columns: 0,
        size,
        tiles: [columns, rows],
        pixels,
    };
    // The image comes before the text.
    PreparedImage { tiles: vec![input], text: String::new() }
}

/// The number of columns and rows of tiles of a picture whose size without margins is given. Each
/// tile has `step` pixels of its own in each direction.
fn tiling([width, height]: [usize; 2], step: usize, tiles_max: usize) -> [usize; 2] {
    if width <= step || height <= step {
        return [1, 1];
    }
    let least = [width.div_ceil(step), height.div_ceil(step)];
    let [columns, rows] = least;
    if columns * rows > tiles_max {
        let ratio = (tiles_max as f64 / (columns * rows) as f64).sqrt();
        return least.map(|count| ((count as f64 * ratio) as usize).max(1));
    }
    let most = tiles_max as f64;
    let fitting = |own: usize, other: usize| (most * own as f64 / other as f64).sqrt() as usize;
    let mut columns = fitting(width, height).max(columns);
    let mut rows = fitting(height, width).max(rows);
    if columns * rows > tiles_max {
        if columns > rows {
            columns = tiles_max / rows;
        } else {
            rows = tiles_max / columns;
        }
    }
    [columns.max(1), rows.max(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the tiling of pictures of all shapes equals the results of `kestrel` that are listed
    /// here, and has at most as many tiles as are allowed.
    #[test]
    fn pictures_are_divided_by_their_shape() {
        for (size, expected) in [
            ([266, 1000], [1, 1]),
            ([267, 267], [3, 3]),
            ([800, 600], [4, 3]),
            ([600, 800], [3, 4]),
            ([4000, 300], [9, 1]),
            ([3000, 3000], [3, 3]),
            ([5000, 600], [8, 1]),
            ([1000, 267], [6, 2]),
        ] {
            assert_eq!(tiling(size, 266, 12), expected, "{size:?}");
        }
        for width in (1..6000).step_by(97) {
            for height in (1..6000).step_by(89) {
                let [columns, rows] = tiling([width, height], 266, 12);
                assert!(columns >= 1 && rows >= 1 && columns * rows <= 12, "{width} x {height}");
            }
        }
    }
}
