//! [`ImageProcessor`]: makes tiles from a picture, and the string that takes their place in the
//! prompt.

mod gemma3;
mod idefics3;
mod moondream;
mod qwen3_vl;

use stolon_backend::ImageInput;

use crate::config::{ProcessorConfig, Tiling};
use crate::error::PictureError;
use crate::picture::Picture;

/// Prepares pictures for one model. See [`ImageProcessor::prepare`].
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    config: ProcessorConfig,
}

/// A picture that is ready for a model.
#[derive(Clone, Debug)]
pub struct PreparedImage {
    /// The tiles, in the order of their tokens in `text`; at least one.
    pub tiles: Vec<ImageInput>,
    /// The string that takes the place of the image's placeholder before the prompt is tokenized.
    /// It has the image token once per tile, while transformers repeats it [`ImageInput::kv_len`]
    /// times. Empty for Moondream, whose image comes before all text.
    pub text: String,
}

impl ImageProcessor {
    /// A processor for the model that `config` describes.
    #[must_use]
    pub fn new(config: ProcessorConfig) -> Self {
        Self { config }
    }

    /// The settings for the preparation of images from the model's files.
    #[must_use]
    pub fn config(&self) -> &ProcessorConfig {
        &self.config
    }

    /// The string that the chat template writes in the place of an image.
    #[must_use]
    pub fn placeholder(&self) -> &str {
        &self.config.placeholder
    }

    /// The string of the token that stands for the embeddings of a tile.
    #[must_use]
    pub fn image_token(&self) -> &str {
        &self.config.image_token
    }

    /// The id of this token.
    #[must_use]
    pub fn image_token_id(&self) -> u32 {
        self.config.image_token_id
    }

    /// Cuts and resizes a picture as the model's processor in transformers does, in the variant
    /// that uses torchvision: all pixels of the test cases are equal (`tests/processors.rs`). The
    /// variant that uses Pillow 13 differs by up to 2, and in some high pictures by up to 5 (0.3 on
    /// average), because it resizes their columns first. For Moondream, the pixels are those of
    /// `kestrel`.
    ///
    /// Takes some ten milliseconds for a picture of some megapixels.
    ///
    /// # Errors
    /// [`PictureError::Shape`] if the model's processor refuses the shape of the picture.
    pub fn prepare(&self, picture: &Picture) -> Result<PreparedImage, PictureError> {
        match &self.config.tiling {
            Tiling::Idefics3(tiles) => Ok(idefics3::prepare(&self.config, tiles, picture)),
            Tiling::Gemma3(tiles) => Ok(gemma3::prepare(&self.config, tiles, picture)),
            Tiling::Moondream(tiles) => Ok(moondream::prepare(&self.config, tiles, picture)),
            Tiling::Qwen3Vl(tiles) => qwen3_vl::prepare(&self.config, tiles, picture),
        }
    }
}

/// A tile as input of the encoder. `kv_len` is its number of rows of embeddings.
fn tile(
    config: &ProcessorConfig,
    tile: Picture,
    kv_len: usize,
    full_attention: bool,
) -> ImageInput {
    let (size, pixels) = tile.into_parts();
    let content_hash =
        content_hash(config, &format!("{size:?} {kv_len} {full_attention}"), &pixels);
    ImageInput { content_hash, kv_len, full_attention, columns: 0, size, tiles: [0, 0], pixels }
}

/// The hash of an image: of its pixels, and of the settings with which they become embeddings.
/// Everything else that the embeddings depend on is the same for all images of a model.
fn content_hash(config: &ProcessorConfig, image: &str, pixels: &[u8]) -> u128 {
    let mut hash = hmac_sha256::Hash::new();
    let parameters = format!("{:?} {image}", config.tiling);
    hash.update((parameters.len() as u64).to_le_bytes());
    hash.update(parameters);
    hash.update(pixels);
    let digest = hash.finalize();
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    u128::from_be_bytes(first)
}
