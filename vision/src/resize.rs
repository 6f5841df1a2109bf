//! Resizing in RGB, with the filters and the rounding of Pillow and torchvision.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

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
    let from = ImageRef::new(from_width, from_height, picture.pixels(), PixelType::U8x3)
        .expect("a picture has the pixels of its size");
    let mut to = Image::new(width as u32, height as u32, PixelType::U8x3);
    Resizer::new().resize(&from, &mut to, &options).expect("both have the same type of pixels");
    Picture::from_rgb(width, height, to.into_vec()).expect("the pixels of the size")
}
