//! Resizing in RGB, with the filters and the rounding of Pillow, torchvision and `kestrel`.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use crate::config::Resampling;
use crate::picture::Picture;

/// The picture in another size, at least 1 x 1.
pub(crate) fn resize(picture: &Picture, size: [usize; 2], resampling: Resampling) -> Picture {
    let [width, height] = size.map(|edge| edge.max(1));
    // torchvision resizes rows before columns. It rounds in between, where results of Lanczos may
    // exceed the range of bytes. The library begins with the columns, so it is called for each
    // direction.
    let rows = resize_once(picture, [width, picture.height()], resampling);
    resize_once(&rows, [width, height], resampling)
}

/// The picture in another size, at least 1 x 1, as in `kestrel`: where it shrinks a lot, squares of
/// whole pixels are averaged first. Then columns are resized before rows.
pub(crate) fn resize_shrunk(picture: &Picture, size: [usize; 2]) -> Picture {
    /// Up to this quotient of the sizes, the filter alone is used.
    const RATIO_MAX: f64 = 2.5;
    let from = [picture.width(), picture.height()];
    let [x, y] = [0, 1].map(|axis| {
        let ratio = from[axis] as f64 / size[axis].max(1) as f64;
        if ratio > RATIO_MAX { ratio as usize } else { 1 }
    });
    match [x, y] {
        [1, 1] => resize_once(picture, size, Resampling::Lanczos),
        square => resize_once(&averaged(picture, square), size, Resampling::Lanczos),
    }
}

/// The means of rectangles of `x` x `y` pixels. The picture has at least one. The rest on the right
/// and at the bottom is cut off.
fn averaged(picture: &Picture, [x, y]: [usize; 2]) -> Picture {
    let (width, height) = (picture.width() / x, picture.height() / y);
    // The quotient is computed as a product, which rounds as in `kestrel`.
    let reciprocal = (1_u64 << 16).div_ceil((x * y) as u64);
    let mut pixels = Vec::with_capacity(3 * width * height);
    let mut sums = vec![0_u64; 3 * width];
    for rows in picture.pixels().chunks_exact(3 * picture.width() * y) {
        sums.fill(0);
        for row in rows.chunks_exact(3 * picture.width()) {
            for (sum, pixels) in sums.chunks_exact_mut(3).zip(row.chunks_exact(3 * x)) {
                for pixel in pixels.chunks_exact(3) {
                    sum.iter_mut().zip(pixel).for_each(|(sum, value)| *sum += u64::from(*value));
                }
            }
        }
        pixels.extend(sums.iter().map(|sum| ((sum * reciprocal) >> 16).min(255) as u8));
    }
    Picture::from_rgb(width, height, pixels).expect("the pixels of the size")
}

/// The picture in a size that has another width or another height.
fn resize_once(picture: &Picture, [width, height]: [usize; 2], resampling: Resampling) -> Picture {
    if [picture.width(), picture.height()] == [width, height] {
        return picture.clone();
    }
    let filter = match resampling {
        Resampling::Bilinear => FilterType::Bilinear,
        Resampling::Bicubic => FilterType::CatmullRom,
        Resampling::Lanczos => FilterType::Lanczos3,
    };
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
    // Pictures have at most 2^16 pixels on each side, and sizes of tiles are smaller.
    let [from_width, from_height] = [picture.width(), picture.height()].map(|edge| edge as u32);
    // With the type of pixels, the code for all other types is not compiled.
    let from = TypedImageRef::<U8x3>::from_buffer(from_width, from_height, picture.pixels())
        .expect("a picture has the pixels of its size");
    let mut pixels = vec![0; 3 * width * height];
    let mut to = TypedImage::<U8x3>::from_buffer(width as u32, height as u32, &mut pixels)
        .expect("as many pixels");
    Resizer::new().resize_typed(&from, &mut to, &options).expect("no part is cut out");
    Picture::from_rgb(width, height, pixels).expect("the pixels of the size")
}
