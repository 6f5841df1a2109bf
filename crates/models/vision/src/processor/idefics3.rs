//! Idefics 3 and SmolVLM.

use super::{PreparedImage, tile};
use crate::config::{Idefics3Tiles, ProcessorConfig};
use crate::picture::Picture;
use crate::resize::resize;

const FAKE_TOKEN: &str = "<fake_token_around_image>";
const GLOBAL: &str = "<global-img>";

/// Maximum length of an edge after the first resizing.
const EDGE_MAX: usize = 4096;

/// Prepares a picture as `Idefics3Processor` and `SmolVLMProcessor` do.
pub(super) fn prepare(
    config: &ProcessorConfig,
    tiles: &Idefics3Tiles,
    picture: &Picture,
) -> PreparedImage {
    let edge = tiles.tile_edge;
    let sized = tiles.longest_edge.map(|longest| {
        let size = longest_edge_size([picture.width(), picture.height()], longest);
        resize(picture, size, config.resampling)
    });
    let sized = sized.as_ref().unwrap_or(picture);
    let whole = |picture: &Picture| resize(picture, [edge, edge], config.resampling);
    let input = |picture| tile(config, picture, tiles.tile_rows, false);
    let token = &config.image_token;
    if !tiles.splits {
        let text = format!("{FAKE_TOKEN}{GLOBAL}{token}{FAKE_TOKEN}");
        return PreparedImage { tiles: vec![input(whole(sized))], text };
    }
    let fitted =
        resize(sized, multiple_size([sized.width(), sized.height()], edge), config.resampling);
    let (columns, rows) = (fitted.width() / edge, fitted.height() / edge);
    let mut list = Vec::with_capacity(rows * columns + 1);
    let mut text = String::new();
    if rows * columns > 1 {
        for row in 0..rows {
            for column in 0..columns {
                list.push(input(fitted.crop([column * edge, row * edge], [edge, edge])));
                text += &format!("{FAKE_TOKEN}<row_{}_col_{}>{token}", row + 1, column + 1);
            }
            text.push('\n');
        }
        text.push('\n');
    }
    list.push(input(whole(&fitted)));
    text += &format!("{FAKE_TOKEN}{GLOBAL}{token}{FAKE_TOKEN}");
    PreparedImage { tiles: list, text }
}

/// The size of a picture whose longer edge is `longest`. The other edge keeps the ratio and is then
/// rounded up to an even number.
fn longest_edge_size([width, height]: [usize; 2], longest: usize) -> [usize; 2] {
    let (mut width, mut height) = (width, height);
    let ratio = width as f64 / height as f64;
    if width >= height {
        width = longest;
        height = (longest as f64 / ratio) as usize;
        height += height % 2;
    } else {
        height = longest;
        width = (longest as f64 * ratio) as usize;
        width += width % 2;
    }
    [width, height] = [width.max(1), height.max(1)];
    let ratio = width as f64 / height as f64;
    if width >= height && width > EDGE_MAX {
        [width, height] = [EDGE_MAX, (EDGE_MAX as f64 / ratio) as usize];
    } else if height > width && height > EDGE_MAX {
        [width, height] = [(EDGE_MAX as f64 * ratio) as usize, EDGE_MAX];
    }
    [width.max(1), height.max(1)]
}

/// The size of a picture whose edges are rounded up to multiples of `edge`: first the longer one,
/// and then the other one, which has followed the ratio.
fn multiple_size([width, height]: [usize; 2], edge: usize) -> [usize; 2] {
    let ratio = width as f64 / height as f64;
    if width >= height {
        let width = width.next_multiple_of(edge);
        let height = (width as f64 / ratio) as usize;
        [width, height.max(1).next_multiple_of(edge)]
    } else {
        let height = height.next_multiple_of(edge);
        let width = (height as f64 * ratio) as usize;
        [width.max(1).next_multiple_of(edge), height]
    }
}
