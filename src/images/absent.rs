//! Replaces the images of a build without the feature `images`: a request with images fails.

use stolon_checkpoint::ImageModel;
use stolon_scheduler::{EngineContext, PromptLimit, SessionContent};

use crate::long_work::Slot;
use crate::text::Text;
use crate::{Error, Request};

/// Prepares no images.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images {}

/// Fetches no images.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fetch {}

impl Fetch {
    pub(crate) fn is_set(&self) -> bool {
        false
    }
}

impl Images {
    pub(crate) fn new(_: Option<&ImageModel>) -> Images {
        Images {}
    }

    pub(crate) fn with(self, _: Fetch) -> Images {
        self
    }

    #[allow(clippy::unused_async, reason = "there is nothing to fetch")]
    pub(crate) async fn fetched(&self, request: Request) -> Result<(Request, Option<Slot>), Error> {
        Ok((request, None))
    }

    pub(crate) fn image_token(&self) -> Option<u32> {
        None
    }

    pub(crate) fn open(&self, request: Request) -> Result<Placement, Error> {
        let expected = "none, because the library was built without the feature `images`";
        Err(Error::invalid("images", expected, request.images.len().max(1)))
    }
}

/// A request with images, which cannot exist in this build.
#[derive(Debug)]
pub(crate) enum Placement {}

impl Placement {
    pub(crate) fn has_files(&self) -> bool {
        match *self {}
    }

    pub(crate) fn decode_next(&mut self, _: PromptLimit) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn place(
        self,
        _: &SessionContent,
        _: &Text,
        _: &EngineContext,
    ) -> Result<Request, Error> {
        match self {}
    }
}
