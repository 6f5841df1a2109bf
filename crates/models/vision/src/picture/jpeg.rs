//! JPEG files: their decoder, and the checks that it does not make itself.
//!
//! The pixels equal those of libjpeg-turbo, bit for bit, because models were trained on them:
//! decoders differ in how they interpolate colors of half the resolution.
//!
//! Headers are found by the two bytes of their markers, wherever they are. Markers never occur in
//! compressed data, and a file cannot hide a header from this search by damaged segments before it.

use image::error::UnsupportedErrorKind::GenericFeature;
use image::error::{DecodingError, ImageFormatHint, LimitError, LimitErrorKind, UnsupportedError};
use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageError, ImageFormat, ImageResult};
use libjpeg_turbo_rs::{DecodeLimits, Decoder, JpegError, PixelFormat};

/// Maximum number of scans of a progressive file: each takes the time of a whole picture. Usual files
/// have ten.
const SCANS_MAX: usize = 100;

/// Reads a picture in RGB.
pub(super) struct JpegDecoder<'a> {
    decoder: Decoder<'a>,
    is_cmyk: bool,
}

impl<'a> JpegDecoder<'a> {
    /// Reads the header.
    pub(super) fn new(bytes: &'a [u8]) -> ImageResult<Self> {
        let limits = DecodeLimits { max_scans: SCANS_MAX, ..DecodeLimits::default() };
        let mut decoder = Decoder::new_with_limits(bytes, limits).map_err(image_error)?;
        let is_cmyk = decoder.header().components.len() == 4;
        decoder.set_output_format(if is_cmyk { PixelFormat::Cmyk } else { PixelFormat::Rgb });
        Ok(Self { decoder, is_cmyk })
    }
}

impl ImageDecoder for JpegDecoder<'_> {
    fn dimensions(&self) -> (u32, u32) {
        let header = self.decoder.header();
        (header.width.into(), header.height.into())
    }

    fn color_type(&self) -> ColorType {
        ColorType::Rgb8
    }

    fn orientation(&mut self) -> ImageResult<Orientation> {
        let orientation = self.decoder.exif_orientation().and_then(Orientation::from_exif);
        Ok(orientation.unwrap_or(Orientation::NoTransforms))
    }

    fn read_image(self, buf: &mut [u8]) -> ImageResult<()> {
        if !self.is_cmyk {
            return self.decoder.decode_image_into(buf).map(drop).map_err(image_error);
        }
        let decoded = self.decoder.decode_image().map_err(image_error)?;
        for (pixel, inks) in buf.chunks_exact_mut(3).zip(decoded.data.chunks_exact(4)) {
            let black = u32::from(inks[3]);
            let channel = |ink: u8| ((u32::from(ink) * black + 127) / 255) as u8;
            pixel.copy_from_slice(&[inks[0], inks[1], inks[2]].map(channel));
        }
        Ok(())
    }

    fn read_image_boxed(self: Box<Self>, buf: &mut [u8]) -> ImageResult<()> {
        (*self).read_image(buf)
    }
}

fn image_error(error: JpegError) -> ImageError {
    let hint = ImageFormatHint::Exact(ImageFormat::Jpeg);
    match error {
        JpegError::Unsupported(what) => ImageError::Unsupported(
            UnsupportedError::from_format_and_kind(hint, GenericFeature(what)),
        ),
        JpegError::LimitExceeded { .. } => {
            ImageError::Limits(LimitError::from_kind(LimitErrorKind::InsufficientMemory))
        }
        JpegError::UnexpectedEof => {
            ImageError::Decoding(DecodingError::new(hint, "the end of the picture is missing"))
        }
        error => ImageError::Decoding(DecodingError::new(hint, error)),
    }
}

/// Start of a frame: sequential, sequential with up to 12 bits, progressive.
const FRAMES: [u8; 3] = [0xc0, 0xc1, PROGRESSIVE];
const PROGRESSIVE: u8 = 0xc2;
/// Start of a scan, which is followed by compressed data.
const SCAN: u8 = 0xda;
const END: u8 = 0xd9;

/// Whether the file ends before its last picture does. The decoder fills the missing part with
/// gray. The last start of compressed data must be followed by an end.
pub(super) fn is_cut_off(bytes: &[u8]) -> bool {
    let last = |marker: u8| bytes.windows(2).rposition(|pair| pair == [0xff, marker]);
    last(END) <= last(SCAN)
}

/// Maximum number of bytes of coefficients that the decoder holds at once. It holds the
/// coefficients of the whole picture if the file is progressive, or if a scan does not have all
/// components.
pub(super) fn coefficient_bytes(bytes: &[u8]) -> usize {
    // The scans are collected only once, so that the time is linear however many headers a hostile
    // file has.
    let mut scanned = [false; 256];
    let of_scans = after(bytes, SCAN).filter_map(|scan| scan.get(2).copied());
    of_scans.for_each(|components| scanned[usize::from(components)] = true);
    let has_partial_scan =
        |all: usize| scanned.iter().enumerate().any(|(components, is)| *is && components != all);
    let frames = FRAMES.into_iter().flat_map(|marker| {
        let frames = after(bytes, marker).filter_map(Frame::read);
        frames.filter(move |frame| marker == PROGRESSIVE || has_partial_scan(frame.components))
    });
    frames.map(|frame| frame.coefficient_bytes).max().unwrap_or(0)
}

/// The bytes after each place of a marker.
fn after(bytes: &[u8], marker: u8) -> impl Iterator<Item = &[u8]> {
    let places = bytes.windows(2).enumerate().filter(move |(_, pair)| *pair == [0xff, marker]);
    places.map(|(place, _)| &bytes[place + 2..])
}

/// The header of a frame.
struct Frame {
    /// Number of components, from 1 to 4.
    components: usize,
    coefficient_bytes: usize,
}

impl Frame {
    /// Reads a header, from its length on; `None` if the decoder would refuse it.
    fn read(bytes: &[u8]) -> Option<Self> {
        /// Edge of a block of coefficients. A coefficient has 16 bits.
        const BLOCK: usize = 8;
        let (header, rest) = bytes.split_first_chunk::<8>()?;
        let number = |at: usize| usize::from(u16::from_be_bytes([header[at], header[at + 1]]));
        let (length, height, width) = (number(0), number(3), number(5));
        let components = usize::from(header[7]);
        if !(1..=4).contains(&components) || length != 8 + 3 * components || header[2] != 8 {
            return None;
        }
        let factors = rest.get(..3 * components)?.chunks_exact(3);
        let factors = factors.map(|component| [component[1] >> 4, component[1] & 15]);
        let factors: Vec<_> = factors.map(|of| of.map(usize::from)).collect();
        let most = |axis: usize| factors.iter().map(|of| of[axis]).max().unwrap_or(0).max(1);
        let units = width.div_ceil(BLOCK * most(0)) * height.div_ceil(BLOCK * most(1));
        let blocks_of_unit: usize = factors.iter().map(|[x, y]| x * y).sum();
        let coefficients = units * blocks_of_unit * BLOCK * BLOCK;
        Some(Self { components, coefficient_bytes: coefficients * size_of::<i16>() })
    }
}
