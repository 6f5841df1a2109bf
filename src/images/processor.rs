//! Decodes images and prepares them for the encoder of the model.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use stolon_scheduler::PromptLimit;
use stolon_vision::{ImageProcessor, Picture, PictureLimits};

use super::{Fetch, PreparedImages};
use crate::Error;
use crate::request::ImageFile;

/// Maximum number of images of a request.
const IMAGES_MAX: usize = 256;

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
    pub(crate) fn new(model: Option<&stolon_model::ImageModel>) -> Images {
        let processor = model.map(|model| ImageProcessor::new(model.processor.clone()));
        let first_token = model.and_then(|model| model.encoder.first_token);
        Images { processor: processor.map(Arc::new), first_token, fetch: Fetch::default() }
    }

    /// The token that has the place of a tile; `None` for a model that takes text only.
    pub(crate) fn image_token(&self) -> Option<u32> {
        self.processor.as_ref().map(|processor| processor.image_token_id())
    }

    /// The file in a data URL, which is that of image number `number` of a request.
    fn file_of(url: &str, number: usize) -> Result<Arc<[u8]>, Error> {
        /// How much of another URL an error shows.
        const SHOWN: usize = 40;
        let data = url.strip_prefix("data:").and_then(|data| data.split_once(','));
        let encoded = data.and_then(|(kind, data)| kind.ends_with(";base64").then_some(data));
        let refused = |got: String| Error::Image {
            number,
            reason: format!("expected a data URL in base64 (data:image/png;base64,..), got {got}"),
        };
        let Some(encoded) = encoded else {
            return Err(refused(format!("{:?}", url.chars().take(SHOWN).collect::<String>())));
        };
        STANDARD.decode(encoded.trim_end()).map(Arc::from).map_err(|e| refused(e.to_string()))
    }

    /// The image processor, if the model takes images, and as many.
    pub(super) fn check(&self, images: &[ImageFile]) -> Result<&ImageProcessor, Error> {
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

    /// Decodes images and cuts them into tiles, which together have at most as many positions as a
    /// prompt may have.
    pub(super) fn prepare(
        &self,
        images: &[ImageFile],
        limit: PromptLimit,
    ) -> Result<PreparedImages, Error> {
        let processor = self.check(images)?;
        let (mut texts, mut tiles, mut positions) = (Vec::new(), Vec::new(), 0_usize);
        for (index, file) in images.iter().enumerate() {
            let refused = |error: stolon_vision::PictureError| Error::Image {
                number: index + 1,
                reason: error.to_string(),
            };
            let file = match file {
                ImageFile::Bytes(bytes) => Arc::clone(bytes),
                ImageFile::Url(url) => Self::file_of(url, index + 1)?,
            };
            let picture = Picture::decode(&file, &PictureLimits::default()).map_err(refused)?;
            let prepared = processor.prepare(&picture).map_err(refused)?;
            positions += prepared.tiles.iter().map(|tile| tile.kv_len).sum::<usize>();
            if positions > limit.tokens {
                return Err(limit.error(positions).into());
            }
            texts.push(prepared.text);
            tiles.extend(prepared.tiles.into_iter().map(Arc::new));
        }
        let placeholder = processor.placeholder().to_owned();
        let (image_token, first_token) = (processor.image_token_id(), self.first_token);
        Ok(PreparedImages { placeholder, texts, image_token, tiles, first_token })
    }
}
