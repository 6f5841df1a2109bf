//! Images of requests: they are decoded and prepared, and take their places among the tokens of the
//! prompt. Without the feature `images`, and for models that take text only, a request with images
//! fails.

#[cfg(not(feature = "images"))]
#[path = "images/absent.rs"]
mod processor;
#[cfg(feature = "images")]
mod processor;

use std::sync::Arc;

use serde_json::{Value, json};
use stolon_backend::ImageInput;
use stolon_scheduler::{EngineContext, PromptImage, Usage};

pub(crate) use processor::Images;

use crate::request::Prompt;
use crate::text::Text;
use crate::{ChatMessage, Error, MessageContent, Request};

/// The images of a request, ready to take their places.
#[derive(Debug)]
pub(crate) struct PreparedImages {
    /// What a chat template writes in the place of an image.
    pub(crate) placeholder: String,
    /// For each image the text that replaces the placeholder.
    pub(crate) texts: Vec<String>,
    /// The token that stands for a tile in these texts.
    image_token: u32,
    /// The tiles of all images.
    tiles: Vec<Arc<ImageInput>>,
}

impl Images {
    /// Decodes the images of a request and renders and tokenises its prompt. In the returned
    /// request, the prompt is token ids, and the images are where the model expects them.
    pub(crate) fn place(
        &self,
        request: Request,
        text: &Text,
        context: &EngineContext,
    ) -> Result<Request, Error> {
        let request = self.collect(request)?;
        let prepared = self.prepare(&request.images, context.prompt_limit())?;
        let tokens = text.tokens_with_images(&request, context.prompt_limit(), &prepared)?;
        let (tokens, placed) = prepared.place(tokens, context)?;
        let placed = placed.into();
        Ok(Request { placed, ..request.with_tokens(tokens) })
    }

    /// The request with all images of its conversation in `images`, in the order of the parts
    /// `{"type": "image"}` that are left of them.
    fn collect(&self, mut request: Request) -> Result<Request, Error> {
        let Prompt::Chat(messages) = request.prompt() else { return Ok(request) };
        let mut messages = messages.clone();
        add_parts(&mut messages, request.images.len());
        let mut given = std::mem::take(&mut request.images).into_iter();
        let mut images = Vec::new();
        for part in messages.iter_mut().flat_map(parts_mut) {
            if is_image(part) {
                let expected = "an image for each part of type image";
                let next = given.next();
                images.push(next.ok_or_else(|| Error::invalid("images", expected, images.len()))?);
            } else if is_url(part) {
                // OpenAI's clients send an object, some others the URL alone.
                let url = &part["image_url"];
                let url = url["url"].as_str().or(url.as_str()).unwrap_or_default();
                images.push(self.file_of(url, images.len() + 1)?);
                *part = json!({"type": "image"});
            }
        }
        Ok(Request { images, prompt: Arc::new(Prompt::Chat(messages)), ..request })
    }
}

impl PreparedImages {
    /// Replaces the placeholders in `text`, which has as many as there are images. Without any, the
    /// images come first.
    pub(crate) fn replace_in(&self, text: &str) -> Result<String, Error> {
        let parts: Vec<&str> = text.split(&self.placeholder).collect();
        if parts.len() == 1 {
            return Ok(self.texts.concat() + text);
        }
        self.check_count(parts.len() - 1)?;
        let replaced = parts.iter().zip(self.texts.iter().map(String::as_str).chain([""]));
        Ok(replaced.flat_map(|(part, image)| [part, image]).collect())
    }

    /// Checks that a prompt has as many placeholders as there are images.
    pub(crate) fn check_count(&self, placeholders: usize) -> Result<(), Error> {
        let images = self.texts.len();
        if placeholders == images {
            return Ok(());
        }
        let expected = format!("{placeholders} images, as many as the prompt has places for");
        Err(Error::invalid("images", expected, images))
    }

    /// Replaces the tokens of tiles by the positions of the tiles.
    fn place(
        self,
        tokens: Vec<u32>,
        context: &EngineContext,
    ) -> Result<(Vec<u32>, Vec<PromptImage>), Error> {
        let places = tokens.iter().filter(|token| **token == self.image_token).count();
        if places != self.tiles.len() {
            let expected = format!("{} image tokens in the prompt", self.tiles.len());
            return Err(Error::invalid("images", expected, places));
        }
        let mut tiles = self.tiles.into_iter();
        let (mut placed, mut images) = (Vec::with_capacity(tokens.len()), Vec::new());
        for token in tokens {
            match (token == self.image_token).then(|| tiles.next()).flatten() {
                Some(tile) => images.push(context.append_image(tile, &mut placed)?),
                None => placed.push(token),
            }
        }
        Ok((placed, images))
    }
}

/// The token counts of a prompt with these images.
pub(crate) fn prompt_usage(tokens: &[u32], images: &[PromptImage]) -> Usage {
    let image_tokens = images.iter().map(|image| image.input.kv_len).sum();
    Usage { prompt_tokens: tokens.len(), image_tokens, ..Usage::default() }
}

fn is_image(part: &Value) -> bool {
    part["type"] == "image"
}

fn is_url(part: &Value) -> bool {
    part["type"] == "image_url"
}

fn parts_mut(message: &mut ChatMessage) -> &mut [Value] {
    match &mut message.content {
        Some(MessageContent::Parts(parts)) => parts,
        _ => &mut [],
    }
}

/// Adds parts to a conversation, so that it has one for each of `images` images: those that have
/// none come first in the last message of the user.
fn add_parts(messages: &mut [ChatMessage], images: usize) {
    let parts = messages.iter_mut().flat_map(parts_mut);
    let missing = images.saturating_sub(parts.filter(|part| is_image(part)).count());
    let last = messages.iter_mut().rfind(|message| message.role == "user");
    let (1.., Some(message)) = (missing, last) else { return };
    let own = match message.content.take() {
        None => Vec::new(),
        Some(MessageContent::Text(text)) => vec![json!({"type": "text", "text": text})],
        Some(MessageContent::Parts(parts)) => parts,
    };
    let added = std::iter::repeat_n(json!({"type": "image"}), missing);
    message.content = Some(MessageContent::Parts(added.chain(own).collect()));
}

impl Request {
    /// Adds an image: the content of a PNG, JPEG, WebP, GIF or BMP file. Only for models that take
    /// images ([`ModelInfo::takes_images`](crate::ModelInfo::takes_images)), and with the feature
    /// `images`.
    ///
    /// In a conversation, the images take the places of the parts `{"type": "image"}` of its
    /// messages, in their order. Images without such a part come first in the last message of the
    /// user. A part may also have an image itself, as a data URL in base64:
    /// `{"type": "image_url", "image_url": {"url": "data:image/png;base64,.."}}`. In a text, images
    /// take the places of the model's placeholders, or come first if there are none. The KV of an
    /// image is cached and shared like that of text, by its pixels.
    pub fn image(mut self, file: impl Into<Arc<[u8]>>) -> Request {
        self.images.push(file.into());
        self
    }

    /// Whether it has images that are not in the prompt yet.
    pub(crate) fn has_images(&self) -> bool {
        let parts = |message: &ChatMessage| match &message.content {
            Some(MessageContent::Parts(parts)) => {
                parts.iter().any(|part| is_image(part) || is_url(part))
            }
            _ => false,
        };
        let in_messages =
            matches!(self.prompt(), Prompt::Chat(messages) if messages.iter().any(parts));
        in_messages || !self.images.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(texts: &[&str]) -> PreparedImages {
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        PreparedImages { placeholder: "<i>".to_owned(), texts, image_token: 9, tiles: Vec::new() }
    }

    /// Goal: images take the places of placeholders in order, or come first; any other number of
    /// placeholders is an error.
    #[test]
    fn placeholders_are_replaced_in_order() {
        let images = prepared(&["[one]", "[two <i>]"]);
        let replaced = |text| images.replace_in(text).map_err(|error| error.to_string());
        assert_eq!(replaced("a<i>b<i>"), Ok("a[one]b[two <i>]".to_owned()));
        assert_eq!(replaced("ab"), Ok("[one][two <i>]ab".to_owned()));
        let error = replaced("<i>").expect_err("one placeholder for two images");
        assert_eq!(error, "images: expected 1 images, as many as the prompt has places for, got 2");
    }

    /// Goal: images without a part come first in the last message of the user, whatever the form of
    /// its content.
    #[test]
    fn parts_are_added_for_images_without_one() {
        let image = || json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        let mut first = ChatMessage::user("");
        first.content = Some(MessageContent::Parts(vec![text("a"), image()]));
        let messages = [first, ChatMessage::assistant("b"), ChatMessage::user("c")];
        let with = |images: usize| {
            let mut messages = messages.clone();
            add_parts(&mut messages, images);
            messages
        };
        assert_eq!(with(1), messages);
        let added = MessageContent::Parts(vec![image(), image(), text("c")]);
        assert_eq!(with(3)[2].content, Some(added));
        assert_eq!(with(3)[..2], messages[..2]);
    }
}
