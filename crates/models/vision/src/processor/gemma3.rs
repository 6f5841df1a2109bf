//! Gemma 3.

use super::{PreparedImage, tile};
use crate::config::{Gemma3Tiles, PanAndScan, ProcessorConfig};
use crate::picture::Picture;
use crate::resize::resize;

const START: &str = "<start_of_image>";
const END: &str = "<end_of_image>";

/// Prepares a picture as `Gemma3Processor` does.
pub(super) fn prepare(
    config: &ProcessorConfig,
    tiles: &Gemma3Tiles,
    picture: &Picture,
) -> PreparedImage {
    let square = [tiles.tile_edge, tiles.tile_edge];
    let input = |picture: &Picture| {
        tile(config, resize(picture, square, config.resampling), tiles.tile_rows, true)
    };
    let mut list = vec![input(picture)];
    if let Some(options) = &tiles.pan_and_scan {
        list.extend(crops(options, picture).iter().map(input));
    }
    let one = format!("\n\n{START}{}{END}\n\n", config.image_token);
    let text = match list.len() {
        1 => one,
        count => {
            let crops = vec![one.as_str(); count - 1].join(" ");
            format!(
                "Here is the original image {one} and here are some crops to help you see better \
                 {crops}"
            )
        }
    };
    PreparedImage { tiles: list, text }
}

/// The crops of a picture; none if it is not long enough.
fn crops(options: &PanAndScan, picture: &Picture) -> Vec<Picture> {
    let size = [picture.width(), picture.height()];
    let (long, short) = if size[0] >= size[1] { (0, 1) } else { (1, 0) };
    let ratio = size[long] as f64 / size[short] as f64;
    if ratio < options.min_ratio {
        return Vec::new();
    }
    let wanted = (ratio + 0.5).floor() as usize;
    let count = wanted.min(size[long] / options.min_crop_edge).max(2).min(options.max_crops).max(1);
    let length = size[long].div_ceil(count);
    if length.min(size[short]) < options.min_crop_edge {
        return Vec::new();
    }
    let crop = |index: usize| {
        let (mut corner, mut size_of_crop) = ([0, 0], size);
        corner[long] = length * index;
        size_of_crop[long] = length.min(size[long].saturating_sub(corner[long]));
        (size_of_crop[long] > 0).then(|| picture.crop(corner, size_of_crop))
    };
    (0..count).filter_map(crop).collect()
}
