//! Images of requests: they are decoded and prepared, and take their places among the tokens of the
//! prompt. For models that take text only, a request with images fails.
//!
//! A request goes through these steps:
//!
//! 1. [`Images::fetched`] fetches the files of images that it names by URL.
//! 2. [`Images::open`] reads the headers of all images and bounds their pixels.
//! 3. [`Placement::decode_next`] decodes one image.
//! 4. [`Placement::place`] renders and tokenizes the prompt, with the images in their places.
//!
//! Steps 2 to 4 are long work. Each call is a piece of its own, so that a client with many large
//! images takes turns with others, and so that decoding stops when a client has disconnected.

mod processor;
mod urls;

use std::sync::Arc;

use serde_json::{Value, json};
use stolon_backend::ImageInput;
use stolon_scheduler::{EngineContext, PrefixMark, PromptImage, PromptLimit, SessionContent};
use stolon_text::{RenderedChat, replace_in_order};
use stolon_vision::ImageProcessor;

pub(crate) use processor::Images;
pub(crate) use urls::Fetch;

use crate::marks::{up_to, useful};
use crate::prompt::{PromptTokens, common_len};
use crate::request::{ImageFile, Prompt, is_image, part_tokens, url_of};
use crate::text::Text;
use crate::{CacheMark, ChatMessage, Error, MessageContent, Request};

/// The images of a request, ready to take their places.
#[derive(Debug)]
struct PreparedImages {
    /// What a chat template writes in the place of an image.
    placeholder: String,
    /// For each image the text that replaces the placeholder.
    texts: Vec<String>,
    /// For each image its digest, as hexadecimal digits.
    digests: Vec<String>,
    /// For each image the number of its tiles.
    tile_counts: Vec<usize>,
    /// The token that has the place of a tile in these texts.
    image_token: u32,
    /// The tiles of all images.
    tiles: Vec<Arc<ImageInput>>,
    /// The token that begins a sequence, if the model takes one image, whose tokens include this
    /// one and come before all text (Moondream).
    first_token: Option<u32>,
}

/// A request on the way to its prompt: its images are being decoded.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The request. Its conversation has a part `{"type": "image"}` for each image.
    request: Request,
    /// The files of the images that have not been decoded yet.
    files: std::vec::IntoIter<Arc<[u8]>>,
    processor: Arc<ImageProcessor>,
    /// The images that have been decoded.
    prepared: PreparedImages,
    /// Number of positions that their tiles have in the prompt.
    positions: usize,
}

impl Placement {
    /// Whether there are images that have not been decoded yet.
    pub(crate) fn has_files(&self) -> bool {
        self.files.len() > 0
    }

    /// Renders and tokenizes the prompt, when all images have been decoded. In the returned
    /// request, the prompt is token ids, and the images are where the model expects them. The
    /// content of the session that the request is appended to comes before them.
    pub(crate) fn place(
        self,
        before: &SessionContent,
        text: &Text,
        context: &EngineContext,
    ) -> Result<Request, Error> {
        let Self { request, prepared, .. } = self;
        let limit = context.prompt_limit();
        let begins = before.tokens.is_empty();
        let PromptTokens { tokens, exchange } = prepared.tokens(&request, begins, text, limit)?;
        let tokens = prepared.begin(tokens, begins)?;
        let marks = prepared.marks(&request, &tokens, text, limit);
        let (tokens, placed) = prepared.place(tokens, before, context)?;
        let (placed, placed_marks) = (placed.into(), marks.into());
        Ok(Request { placed, placed_marks, exchange, ..request.with_tokens(tokens) })
    }
}

impl Images {
    /// The request with all images of its conversation in `images`, in the order of the parts
    /// `{"type": "image"}` that replace them.
    fn collect(&self, mut request: Request) -> Result<Request, Error> {
        // The request has the prompt for itself, unless its caller has kept a clone of it. Data URLs
        // are large.
        let mut messages = match Arc::unwrap_or_clone(request.prompt) {
            Prompt::Chat(messages) => messages,
            prompt => return Ok(Request { prompt: Arc::new(prompt), ..request }),
        };
        add_parts(&mut messages, request.images.len());
        let mut given = std::mem::take(&mut request.images).into_iter();
        let mut images = Vec::new();
        for part in messages.iter_mut().flat_map(parts_mut) {
            if is_image(part) {
                let expected = "an image for each part of type image";
                let next = given.next();
                images.push(next.ok_or_else(|| Error::invalid("images", expected, images.len()))?);
            } else if let Some(url) = url_of(part) {
                images.push(ImageFile::Url(url.into()));
                *part = json!({"type": "image"});
            }
        }
        Ok(Request { images, prompt: Arc::new(Prompt::Chat(messages)), ..request })
    }
}

impl PreparedImages {
    /// The token ids of a request's prompt, with one token for each tile. A prompt that `begins`
    /// may get the model's first token.
    fn tokens(
        &self,
        request: &Request,
        begins: bool,
        text: &Text,
        limit: PromptLimit,
    ) -> Result<PromptTokens, Error> {
        text.check_len(request.prompt().len_bytes(), limit)?;
        let tokens = match request.prompt() {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(prompt) => text.encode(&self.replace_in(prompt)?, begins),
            Prompt::Chat(messages) => {
                let identified = self.identified(messages);
                let place = |chat: RenderedChat| {
                    let (chat, places) = chat.replace_in_order(&self.placeholder, &self.texts);
                    self.check_count(places)?;
                    Ok(chat)
                };
                let is_whole = |tokens: &[u32]| self.count_tiles(tokens) == self.tiles.len();
                return text.placed_chat_tokens(
                    request,
                    (messages, &identified),
                    place,
                    is_whole,
                    limit,
                );
            }
            Prompt::Parts(parts) => part_tokens(parts, &self.texts, begins, text),
            Prompt::Skill(skill) => text.skills.tokens(skill, text),
            Prompt::Infill(_) => {
                Err(Error::invalid("images", "none next to a gap in a text", self.texts.len()))
            }
            Prompt::Pair(..) => {
                let expected = "a prompt that is not a pair of texts, with images";
                Err(Error::invalid("images", expected, "a pair"))
            }
        };
        Ok(PromptTokens { tokens: tokens?, exchange: None })
    }

    /// A conversation whose parts `{"type": "image"}` say which image they are, so that a history
    /// can compare them.
    fn identified(&self, messages: &[ChatMessage]) -> Vec<ChatMessage> {
        let mut messages = messages.to_vec();
        let parts = messages.iter_mut().flat_map(parts_mut).filter(|part| is_image(part));
        for (part, digest) in parts.zip(&self.digests) {
            part["digest"] = digest.as_str().into();
        }
        messages
    }

    /// Number of tokens that have the place of a tile.
    fn count_tiles(&self, tokens: &[u32]) -> usize {
        tokens.iter().filter(|token| **token == self.image_token).count()
    }

    /// The ends of the marked parts of a conversation, in positions of its prompt, whose tokens these
    /// are, with one token for each tile. Parts that cannot be found, and those that are the whole
    /// prompt, are left out.
    fn marks(
        &self,
        request: &Request,
        tokens: &[u32],
        text: &Text,
        limit: PromptLimit,
    ) -> Vec<PrefixMark> {
        let Prompt::Chat(_) = request.prompt() else { return Vec::new() };
        let marks = useful(&request.marks).into_iter().filter(|mark| !mark.is_whole());
        let end = |mark: CacheMark| {
            let part = up_to(request, &mark);
            let Prompt::Chat(messages) = part.prompt() else { return None };
            let images = messages.iter().flat_map(image_parts).count().min(self.texts.len());
            let tiles = self.tile_counts[..images].iter().sum::<usize>();
            let own = Self {
                placeholder: self.placeholder.clone(),
                texts: self.texts[..images].to_vec(),
                digests: self.digests[..images].to_vec(),
                tile_counts: self.tile_counts[..images].to_vec(),
                tiles: self.tiles[..tiles].to_vec(),
                ..*self
            };
            let part = own.tokens(&part, true, text, limit).ok()?.tokens;
            let part = own.begin(part, true).ok()?;
            let mut tiles = self.tiles.iter();
            let positions = |token: &u32| match *token == self.image_token {
                true => tiles.next().map_or(1, |tile| tile.kv_len),
                false => 1,
            };
            let len = tokens[..common_len(&part, tokens)].iter().map(positions).sum();
            Some(PrefixMark { len, ttl: mark.ttl })
        };
        marks.filter_map(end).collect()
    }

    /// Puts the image of a model with one image before the tokens of a prompt that begins a
    /// sequence.
    fn begin(&self, tokens: Vec<u32>, begins: bool) -> Result<Vec<u32>, Error> {
        let Some(first) = self.first_token else { return Ok(tokens) };
        if !begins {
            let expected = "none after the beginning of a session with this model";
            return Err(Error::invalid("images", expected, self.tiles.len()));
        }
        if self.tiles.len() != 1 {
            return Err(Error::invalid("images", "one image", self.tiles.len()));
        }
        let rest = match tokens.split_first() {
            Some((token, rest)) if *token == first => rest,
            _ => &tokens[..],
        };
        Ok(std::iter::once(self.image_token).chain(rest.iter().copied()).collect())
    }

    /// Replaces the placeholders in `text`, which has as many as there are images. Without any, the
    /// images come first.
    fn replace_in(&self, text: &str) -> Result<String, Error> {
        let (replaced, places) = replace_in_order(text, &self.placeholder, &self.texts);
        if places == 0 {
            return Ok(self.texts.concat() + text);
        }
        self.check_count(places)?;
        Ok(replaced)
    }

    /// Checks that a prompt has as many placeholders as there are images.
    fn check_count(&self, placeholders: usize) -> Result<(), Error> {
        let images = self.texts.len();
        if placeholders == images {
            return Ok(());
        }
        let expected = format!("{placeholders} images, as many as the prompt has places for");
        Err(Error::invalid("images", expected, images))
    }

    /// Replaces the tokens of tiles by the positions of the tiles, and puts the content of a
    /// session before them.
    fn place(
        self,
        tokens: Vec<u32>,
        before: &SessionContent,
        context: &EngineContext,
    ) -> Result<(Vec<u32>, Vec<PromptImage>), Error> {
        let places = tokens.iter().filter(|token| **token == self.image_token).count();
        if places != self.tiles.len() {
            let expected = format!("{} image tokens in the prompt", self.tiles.len());
            return Err(Error::invalid("images", expected, places));
        }
        let mut tiles = self.tiles.into_iter();
        let (mut placed, mut images) = (before.tokens.to_vec(), before.images.to_vec());
        for token in tokens {
            match (token == self.image_token).then(|| tiles.next()).flatten() {
                Some(tile) => images.push(context.append_image(tile, &mut placed)?),
                None => placed.push(token),
            }
        }
        Ok((placed, images))
    }
}

fn image_parts(message: &ChatMessage) -> impl Iterator<Item = &Value> {
    let parts = match &message.content {
        Some(MessageContent::Parts(parts)) => parts.as_slice(),
        _ => &[],
    };
    parts.iter().filter(|part| is_image(part))
}

fn parts_mut(message: &mut ChatMessage) -> &mut [Value] {
    match &mut message.content {
        Some(MessageContent::Parts(parts)) => parts,
        _ => &mut [],
    }
}

/// Adds parts to a conversation until it has one for each of `images` images. The added parts come
/// first in the last message of the user.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(texts: &[&str]) -> PreparedImages {
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        let placeholder = "<i>".to_owned();
        let (image_token, first_token) = (9, None);
        PreparedImages {
            placeholder,
            texts,
            digests: Vec::new(),
            tile_counts: Vec::new(),
            image_token,
            tiles: Vec::new(),
            first_token,
        }
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
