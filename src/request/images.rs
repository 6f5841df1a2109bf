//! The images of a request.

use std::sync::Arc;

use serde_json::Value;
use stolon_scheduler::{PromptImage, Usage};

use super::{Prompt, Request};
use crate::{ChatMessage, MessageContent};

/// The file of an image. The content is read in builds with the feature `images` only.
#[cfg_attr(not(feature = "images"), allow(dead_code, reason = "refused without being read"))]
#[derive(Clone, Debug)]
pub(crate) enum ImageFile {
    /// Its content.
    Bytes(Arc<[u8]>),
    /// A data URL.
    Url(Arc<str>),
}

impl Request {
    /// Adds an image: the content of a PNG, JPEG, WebP, GIF or BMP file. Only for models that take
    /// images ([`ModelInfo::takes_images`](crate::ModelInfo::takes_images)), and with the feature
    /// `images`.
    ///
    /// In a conversation, the images take the places of the parts `{"type": "image"}` of its
    /// messages, in their order. Images without such a part come first in the last message of the
    /// user. A part may also have an image itself, as a data URL in base64: `{"type": "image_url",
    /// "image_url": {"url": "data:image/png;base64,.."}}`. In a text, images take the places of the
    /// model's placeholders, or come first if there are none. Moondream takes one image, which
    /// always comes first. The KV of an image is cached and shared by its pixels, as KV of text is
    /// by its tokens.
    pub fn image(mut self, file: impl Into<Arc<[u8]>>) -> Request {
        self.images.push(ImageFile::Bytes(file.into()));
        self
    }

    /// As [`Request::image`], with the file as a data URL in base64: `data:image/png;base64,..`. It
    /// is decoded on the threads that prepare images. Other URLs are refused, unless
    /// `EngineBuilder::image_urls` is set.
    pub fn image_url(mut self, url: impl Into<Arc<str>>) -> Request {
        self.images.push(ImageFile::Url(url.into()));
        self
    }

    /// Whether it has images that are not in the prompt yet.
    pub(crate) fn has_images(&self) -> bool {
        let parts = |message: &ChatMessage| match &message.content {
            Some(MessageContent::Parts(parts)) => {
                parts.iter().any(|part| is_image(part) || url_of(part).is_some())
            }
            _ => false,
        };
        let in_messages =
            matches!(self.prompt(), Prompt::Chat(messages) if messages.iter().any(parts));
        in_messages || !self.images.is_empty()
    }
}

/// Whether a part of a message is the place of an image of [`Request::image`].
pub(crate) fn is_image(part: &Value) -> bool {
    part["type"] == "image"
}

/// The URL in a part of a message that contains an image; empty if the URL is not a string.
pub(crate) fn url_of(part: &Value) -> Option<&str> {
    // OpenAI's clients send an object, some others the URL alone.
    let url = &part["image_url"];
    let url = || url["url"].as_str().or(url.as_str()).unwrap_or_default();
    (part["type"] == "image_url").then(url)
}

/// The token counts of a prompt with these images.
pub(crate) fn prompt_usage(tokens: &[u32], images: &[PromptImage]) -> Usage {
    let image_tokens = images.iter().map(|image| image.input.kv_len).sum();
    Usage { prompt_tokens: tokens.len(), image_tokens, ..Usage::default() }
}
