//! [`Picture`]: decoding of files that may be hostile.

mod jpeg;

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::{DynamicImage, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits};

use crate::error::PictureError;
use jpeg::JpegDecoder;

/// The limits of decoding. All are checked before the pixels are decoded, against the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureLimits {
    /// Maximum size of the file in bytes.
    pub bytes_max: usize,
    /// Maximum width and maximum height in pixels.
    pub edge_max: usize,
    /// Maximum number of pixels.
    pub pixels_max: usize,
    /// Maximum size of the decoded picture in bytes, together with the coefficients of a JPEG file
    /// that has to be read as a whole before pixels are computed (a progressive one). It is also
    /// about the maximum that another decoder allocates in addition to the picture, so decoding
    /// takes at most about twice this, if it has room for 4 bytes per pixel.
    pub memory_max: usize,
}

impl Default for PictureLimits {
    /// 32 MiB, edges of 16,384 pixels, 64 Mi pixels, and 256 MiB of memory.
    fn default() -> Self {
        Self { bytes_max: 32 << 20, edge_max: 1 << 14, pixels_max: 64 << 20, memory_max: 256 << 20 }
    }
}

/// A decoded picture in RGB.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    width: usize,
    height: usize,
    /// `[height, width, 3]`.
    pixels: Vec<u8>,
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Picture({} x {})", self.width, self.height)
    }
}

impl Picture {
    /// Decodes a PNG, JPEG, WebP, GIF or BMP file; the format is found from the content.
    ///
    /// The picture is turned as its EXIF orientation says. Transparent pixels are blended with a
    /// white background. 16 bits per channel are reduced to 8, and gray, palettes and CMYK are
    /// converted to RGB. Only the first frame of an animation is used.
    ///
    /// # Errors
    /// [`PictureError`]. A JPEG file without an end is refused as cut off.
    pub fn decode(bytes: &[u8], limits: &PictureLimits) -> Result<Self, PictureError> {
        guarded(bytes, limits, |format| decode(bytes, format, limits))
    }

    /// The number of pixels of a file, from its header. No pixel is decoded, so this takes
    /// microseconds, or milliseconds for a JPEG file of megabytes. A file that is refused here is
    /// refused by [`Picture::decode`] for the same reason.
    ///
    /// # Errors
    /// [`PictureError`] for all problems that the header shows: an unknown format and every limit.
    pub fn pixels_of(bytes: &[u8], limits: &PictureLimits) -> Result<usize, PictureError> {
        guarded(bytes, limits, |format| {
            let (width, height) = open(bytes, format, limits)?.dimensions();
            Ok(width as usize * height as usize)
        })
    }

    /// A picture of RGB pixels, `[height, width, 3]`; `None` if their number does not match the
    /// size, or the size is 0.
    #[must_use]
    pub fn from_rgb(width: usize, height: usize, pixels: Vec<u8>) -> Option<Self> {
        let bytes = width.checked_mul(height)?.checked_mul(3)?;
        let is_valid = bytes == pixels.len() && bytes > 0 && width.max(height) <= 1 << 16;
        is_valid.then_some(Self { width, height, pixels })
    }

    /// Width in pixels, at least 1.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Height in pixels, at least 1.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// The pixels, `[height, width, 3]`.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// The rectangle of `size` (width and height) whose upper left corner is at `corner` (x and y).
    /// It lies within the picture.
    pub(crate) fn crop(&self, corner: [usize; 2], size: [usize; 2]) -> Self {
        let ([x, y], [width, height]) = (corner, size);
        let mut pixels = Vec::with_capacity(3 * width * height);
        for row in self.pixels.chunks_exact(3 * self.width).skip(y).take(height) {
            pixels.extend_from_slice(&row[3 * x..3 * (x + width)]);
        }
        Self { width, height, pixels }
    }

    /// Width, height and pixels.
    pub(crate) fn into_parts(self) -> ([usize; 2], Vec<u8>) {
        ([self.width, self.height], self.pixels)
    }
}

/// Runs a decoder on a file of an admitted size, with the format of the file. The decoders are meant
/// not to panic. If one has a defect, only the picture is lost.
fn guarded<T>(
    bytes: &[u8],
    limits: &PictureLimits,
    work: impl FnOnce(ImageFormat) -> Result<T, PictureError>,
) -> Result<T, PictureError> {
    check_size("bytes", limits.bytes_max, bytes.len())?;
    let format = format_of(bytes)?;
    catch_unwind(AssertUnwindSafe(|| work(format))).unwrap_or_else(|_| {
        let reason = "the decoder failed".to_owned();
        Err(PictureError::Malformed { format: name(format), reason })
    })
}

fn check_size(what: &'static str, max: usize, got: usize) -> Result<(), PictureError> {
    match got <= max {
        true => Ok(()),
        false => Err(PictureError::TooLarge { what, max: max as u64, got: got as u64 }),
    }
}

/// The format of the file, by its first bytes.
fn format_of(bytes: &[u8]) -> Result<ImageFormat, PictureError> {
    let known = [
        ImageFormat::Png,
        ImageFormat::Jpeg,
        ImageFormat::WebP,
        ImageFormat::Gif,
        ImageFormat::Bmp,
    ];
    let format = image::guess_format(bytes).ok().filter(|format| known.contains(format));
    format.ok_or(PictureError::UnknownFormat)
}

fn name(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Png => "PNG",
        ImageFormat::Jpeg => "JPEG",
        ImageFormat::WebP => "WebP",
        ImageFormat::Gif => "GIF",
        _ => "BMP",
    }
}

/// A decoder that has read the header of a picture within the limits.
fn open<'a>(
    bytes: &'a [u8],
    format: ImageFormat,
    limits: &PictureLimits,
) -> Result<Box<dyn ImageDecoder + 'a>, PictureError> {
    let decoder = match format {
        ImageFormat::Jpeg => JpegDecoder::new(bytes).map(|decoder| Box::new(decoder) as Box<_>),
        _ => {
            let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
            // The limits also hold for the memory that the decoder allocates for the header.
            let mut decoder_limits = Limits::default();
            decoder_limits.max_alloc = Some(limits.memory_max as u64);
            reader.limits(decoder_limits);
            reader.into_decoder().map(|decoder| Box::new(decoder) as Box<_>)
        }
    };
    let decoder: Box<dyn ImageDecoder + 'a> = decoder.map_err(|error| wrong(format, &error))?;
    let (width, height) = decoder.dimensions();
    check_size("pixels of width", limits.edge_max, width as usize)?;
    check_size("pixels of height", limits.edge_max, height as usize)?;
    check_size("pixels", limits.pixels_max, width as usize * height as usize)?;
    let decoded = usize::try_from(decoder.total_bytes()).unwrap_or(usize::MAX);
    check_size("bytes of decoded pixels", limits.memory_max, decoded)?;
    if format == ImageFormat::Jpeg {
        // The decoder allocates coefficients without regard to its limits.
        let coefficients = jpeg::coefficient_bytes(bytes);
        let what = "bytes of decoded pixels and JPEG coefficients";
        check_size(what, limits.memory_max, decoded.saturating_add(coefficients))?;
        if jpeg::is_cut_off(bytes) {
            let reason = "the end of the picture is missing".to_owned();
            return Err(PictureError::Malformed { format: name(format), reason });
        }
    }
    Ok(decoder)
}

fn decode(
    bytes: &[u8],
    format: ImageFormat,
    limits: &PictureLimits,
) -> Result<Picture, PictureError> {
    let mut decoder = open(bytes, format, limits)?;
    // A picture with a broken orientation is not refused.
    let orientation = decoder.orientation().ok();
    let decoded = DynamicImage::from_decoder(decoder);
    let mut decoded = decoded.map_err(|error| wrong(format, &error))?;
    orientation.into_iter().for_each(|orientation| decoded.apply_orientation(orientation));
    let (width, height) = (decoded.width() as usize, decoded.height() as usize);
    Picture::from_rgb(width, height, rgb(decoded)).ok_or_else(|| PictureError::Malformed {
        format: name(format),
        reason: "it has no pixels".to_owned(),
    })
}

/// The pixels in RGB, blended with white where they are transparent.
fn rgb(decoded: DynamicImage) -> Vec<u8> {
    if !decoded.color().has_alpha() {
        return decoded.into_rgb8().into_raw();
    }
    let blended = |pixel: &[u8]| -> [u8; 3] {
        let alpha = u32::from(pixel[3]);
        let blend = |channel: u8| (u32::from(channel) * alpha + 255 * (255 - alpha) + 127) / 255;
        [pixel[0], pixel[1], pixel[2]].map(|channel| blend(channel) as u8)
    };
    decoded.into_rgba8().into_raw().chunks_exact(4).flat_map(blended).collect()
}

fn wrong(format: ImageFormat, error: &ImageError) -> PictureError {
    let format = name(format);
    match error {
        ImageError::Unsupported(error) => {
            PictureError::Unsupported { format, reason: error.to_string() }
        }
        error => PictureError::Malformed { format, reason: error.to_string() },
    }
}
