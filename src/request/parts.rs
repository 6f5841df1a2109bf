//! Prompts of parts: text, token ids, images, coordinates and sizes in any order.

use super::{Prompt, Request};
use crate::Error;
use crate::text::Text;

/// A part of a prompt ([`Request::parts`]).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PromptPart {
    /// Text, which is tokenized apart from the other parts. As the first part, it gets the model's
    /// beginning-of-sequence token, if it has one.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
    /// The next image of the request ([`Request::image`]).
    Image,
    /// A coordinate, from 0, the left or the upper edge, to 1. It is one token, the nearest of the
    /// model's bins ([`ModelInfo::regions`](crate::ModelInfo::regions)).
    Coordinate(f32),
    /// The size of a thing, each from 0 to 1 as a fraction of the image. It is one token, of the
    /// nearest bins.
    Size {
        /// The width.
        width: f32,
        /// The height.
        height: f32,
    },
}

impl From<&str> for PromptPart {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl PromptPart {
    /// Size in bytes of the parts that become text.
    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            _ => 0,
        }
    }
}

impl Request {
    /// Continues a sequence of parts. Coordinates and sizes are for models that were trained with
    /// them ([`ModelInfo::regions`](crate::ModelInfo::regions)).
    pub fn parts(parts: impl Into<Vec<PromptPart>>) -> Request {
        Request::new(Prompt::Parts(parts.into()))
    }
}

/// The token ids of a prompt of parts, which `begins` a sequence or follows other tokens. `images`
/// are the texts that have the places of the request's images.
pub(crate) fn tokens(
    parts: &[PromptPart],
    images: &[String],
    begins: bool,
    text: &Text,
) -> Result<Vec<u32>, Error> {
    let mut places = images.iter();
    let mut tokens = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            PromptPart::Text(part) => tokens.extend(text.encode(part, begins && index == 0)?),
            PromptPart::Tokens(ids) => tokens.extend(ids),
            PromptPart::Image => {
                let place = places.next();
                let expected = "an image for each part that is one";
                let place =
                    place.ok_or_else(|| Error::invalid("images", expected, images.len()))?;
                tokens.extend(text.encode(place, false)?);
            }
            PromptPart::Coordinate(_) | PromptPart::Size { .. } => {
                tokens.push(text.skills.value(part)?);
            }
        }
    }
    if places.len() > 0 {
        let expected =
            format!("{}, as many as the prompt has parts for", images.len() - places.len());
        return Err(Error::invalid("images", expected, images.len()));
    }
    Ok(tokens)
}
