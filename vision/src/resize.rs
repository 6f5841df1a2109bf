//! Resizing in RGB, with the filters and the rounding of Pillow and torchvision.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

use crate::config::Resampling;
use crate::picture::Picture;

/// The picture in another size, at least 1 x 1.
pub(crate) fn resize(picture: &Picture, size: [usize; 2], resampling: Resampling) -> Picture {
    let [width, height] = size.map(|edge| edge.max(1));
    // torchvision resizes rows before columns, and rounds in between, where Lanczos may exceed the
    // range of bytes. The library begins with the columns, so it is called for each direction.
    let rows = resize_once(picture, [width, picture.height()], resampling);
    resize_once(&rows, [width, height], resampling)
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
