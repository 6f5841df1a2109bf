//! Replaces the preparation of images in a build without the feature `images`.

use std::sync::Arc;

use stolon_scheduler::PromptLimit;

use super::PreparedImages;
use crate::Error;

/// Prepares no images.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images {}

impl Images {
    pub(crate) fn new(_: Option<&stolon_model::ImageModel>) -> Images {
        Images {}
    }

    pub(crate) fn file_of(&self, _: &str, number: usize) -> Result<Arc<[u8]>, Error> {
        Err(refused(number))
    }

    pub(crate) fn prepare(
        &self,
        images: &[Arc<[u8]>],
        _: PromptLimit,
    ) -> Result<PreparedImages, Error> {
        Err(refused(images.len()))
    }
}

fn refused(images: usize) -> Error {
    let expected = "none, because the library was built without the feature `images`";
    Error::invalid("images", expected, images)
}
