//! Decodes images and prepares them for the encoder of the model.
//!
//! The headers of all images of a request are read before the first one is decoded, so that a
//! request whose pictures are too many or too large costs next to nothing.

use std::sync::Arc;

use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use base64::{DecodeError, Engine as _};
use stolon_scheduler::PromptLimit;
use stolon_vision::{ImageProcessor, Picture, PictureError, PictureLimits};

use super::{Fetch, Placement, PreparedImages};
use crate::request::ImageFile;
use crate::{Error, Request};

/// Maximum number of images of a request.
const IMAGES_MAX: usize = 256;
/// Maximum number of pixels of all images of a request: some twenty photos of a telephone. Decoding
/// them takes seconds.
const PIXELS_MAX: usize = 256 << 20;

/// The image processor of the model; none for a model that takes text only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images {
    processor: Option<Arc<ImageProcessor>>,
    /// The token that each image begins with, if there is one.
    first_token: Option<u32>,
    /// The program's function for URLs.
    pub(super) fetch: Fetch,
}

impl Images {
    pub(crate) fn new(model: Option<&stolon_checkpoint::ImageModel>) -> Images {
        let processor = model.map(|model| ImageProcessor::new(model.processor.clone()));
        let first_token = model.and_then(|model| model.encoder.first_token);
        Images { processor: processor.map(Arc::new), first_token, fetch: Fetch::default() }
    }

    /// The token that has the place of a tile; `None` for a model that takes text only.
    pub(crate) fn image_token(&self) -> Option<u32> {
        self.processor.as_ref().map(|processor| processor.image_token_id())
    }

    /// The placement of a request's images, with the files of all of them. They have the formats and
    /// sizes that can be decoded, and together at most [`PIXELS_MAX`] pixels.
    pub(crate) fn open(&self, request: Request) -> Result<Placement, Error> {
        let mut request = self.collect(request)?;
        let processor = Arc::clone(self.check(&request.images)?);
        let (mut files, mut pixels) = (Vec::new(), 0_usize);
        for (index, image) in std::mem::take(&mut request.images).into_iter().enumerate() {
            let number = index + 1;
            let file = match image {
                ImageFile::Bytes(bytes) => bytes,
                ImageFile::Url(url) => Self::file_of(&url, number)?,
            };
            let of_image = Picture::pixels_of(&file, &PictureLimits::default());
            pixels += of_image.map_err(|error| refused(number, &error))?;
            if pixels > PIXELS_MAX {
                let expected = format!("expected at most {PIXELS_MAX} pixels in a request");
                let reason = format!("{expected}, got {pixels} up to this image");
                return Err(Error::Image { number, reason });
            }
            files.push(file);
        }
        let prepared = PreparedImages {
            placeholder: processor.placeholder().to_owned(),
            texts: Vec::new(),
            digests: Vec::new(),
            tile_counts: Vec::new(),
            image_token: processor.image_token_id(),
            tiles: Vec::new(),
            first_token: self.first_token,
        };
        Ok(Placement { request, files: files.into_iter(), processor, prepared, positions: 0 })
    }

    /// The file in the data URL of image number `number` of a request.
    fn file_of(url: &str, number: usize) -> Result<Arc<[u8]>, Error> {
        /// Number of characters of another URL that an error shows.
        const SHOWN: usize = 40;
        let encoded =
            data_of(url).and_then(|data| data.split_once(',')).and_then(|(kind, data)| {
                let (_, encoding) = kind.rsplit_once(';')?;
                encoding.trim().eq_ignore_ascii_case("base64").then_some(data)
            });
        let refused = |got: String| Error::Image {
            number,
            reason: format!("expected a data URL in base64 (data:image/png;base64,..), got {got}"),
        };
        let Some(encoded) = encoded else {
            return Err(refused(format!("{:?}", url.chars().take(SHOWN).collect::<String>())));
        };
        decode_base64(encoded).map(Arc::from).map_err(|error| refused(error.to_string()))
    }

    /// The image processor, if the model takes images, and this number of them.
    pub(super) fn check(&self, images: &[ImageFile]) -> Result<&Arc<ImageProcessor>, Error> {
        let Some(processor) = &self.processor else {
            let expected = "none, because the model takes text only";
            return Err(Error::invalid("images", expected, images.len()));
        };
        if images.len() > IMAGES_MAX {
            let expected = format!("at most {IMAGES_MAX}");
            return Err(Error::invalid("images", expected, images.len()));
        }
        Ok(processor)
    }
}

impl Placement {
    /// Decodes the next image and cuts it into tiles. The tiles of all images together have at most
    /// as many positions as a prompt may have. Without a next image, nothing is done.
    pub(crate) fn decode_next(&mut self, limit: PromptLimit) -> Result<(), Error> {
        let Some(file) = self.files.next() else { return Ok(()) };
        let number = self.prepared.texts.len() + 1;
        let picture = Picture::decode(&file, &PictureLimits::default());
        let image = picture.and_then(|picture| self.processor.prepare(&picture));
        let image = image.map_err(|error| refused(number, &error))?;
        self.positions += image.tiles.iter().map(|tile| tile.kv_len).sum::<usize>();
        if self.positions > limit.tokens {
            return Err(limit.error(self.positions).into());
        }
        let mut digest = blake3::Hasher::new();
        for tile in &image.tiles {
            digest.update(&tile.content_hash.to_le_bytes());
        }
        self.prepared.digests.push(digest.finalize().to_hex().to_string());
        self.prepared.tile_counts.push(image.tiles.len());
        self.prepared.texts.push(image.text);
        self.prepared.tiles.extend(image.tiles.into_iter().map(Arc::new));
        Ok(())
    }
}

/// What follows the scheme of a data URL; `None` for another URL. Schemes have no case.
pub(super) fn data_of(url: &str) -> Option<&str> {
    let (scheme, rest) = url.split_once(':')?;
    scheme.eq_ignore_ascii_case("data").then_some(rest)
}

/// Decodes base64 as clients write it: with line breaks, with the alphabet for URLs, with and
/// without padding.
fn decode_base64(encoded: &str) -> Result<Vec<u8>, DecodeError> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    STANDARD.decode(encoded).or_else(|_| {
        let symbols = encoded.bytes().filter(|byte| !byte.is_ascii_whitespace());
        let symbols = symbols.map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            byte => byte,
        });
        LENIENT.decode(symbols.collect::<Vec<u8>>())
    })
}

fn refused(number: usize, error: &PictureError) -> Error {
    Error::Image { number, reason: error.to_string() }
}
