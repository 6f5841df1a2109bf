//! Tokens with the names of their images, so that they have the same meaning in every process.
//!
//! In a prompt, the positions of an image have a number that its process has assigned
//! ([`TokenSpan`]). [`NamedTokens`] adds the images that the numbers of a prompt stand for. In a
//! record, images are numbered in the order in which they first occur, and are named in a list:
//! [`RecordTokens`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use stolon_kvcache::{ImageSpan, TokenSpan, TokenSpanInterner};

/// The tokens of a prompt, and its images by their numbers.
#[derive(Clone, Debug)]
pub struct NamedTokens {
    tokens: Arc<Vec<u32>>,
    images: Arc<HashMap<u32, ImageSpan>>,
}

impl NamedTokens {
    /// The tokens of a prompt whose images `interner` has numbered. Tokens after an image that it
    /// has forgotten are not stored.
    #[must_use]
    pub fn new(tokens: Arc<Vec<u32>>, interner: &TokenSpanInterner) -> NamedTokens {
        let (mut images, mut last) = (HashMap::new(), None);
        for &position in &*tokens {
            let number = TokenSpan::image_number(position);
            if let Some(number) = number
                && last != Some(number)
                && let Some(image) = interner.image_at(position)
            {
                images.insert(number, image);
            }
            last = number;
        }
        NamedTokens { tokens, images: Arc::new(images) }
    }

    /// Whether all images have a name.
    #[must_use]
    pub fn are_all_named(&self) -> bool {
        let mut numbers = self.tokens.iter().filter_map(|&token| TokenSpan::image_number(token));
        numbers.all(|number| self.images.contains_key(&number))
    }

    /// The tokens with the numbers of images that this process has assigned.
    #[must_use]
    pub fn tokens(&self) -> &Arc<Vec<u32>> {
        &self.tokens
    }

    /// Its first `len` tokens, or all if it has fewer, followed by `more`, which contains no image.
    pub(crate) fn prefix_with(&self, len: usize, more: &[u32]) -> NamedTokens {
        let tokens = [&self.tokens[..len.min(self.tokens.len())], more].concat();
        NamedTokens { tokens: Arc::new(tokens), images: Arc::clone(&self.images) }
    }

    /// The tokens in `range` as a record has them; `None` if there are fewer, or if one is part of
    /// an image without a name.
    pub(crate) fn record(&self, range: Range<usize>) -> Option<RecordTokens> {
        let mut record =
            RecordTokens { tokens: Vec::with_capacity(range.len()), images: Vec::new() };
        for &position in self.tokens.get(range)? {
            record.push(position, |number| self.images.get(&number).copied())?;
        }
        Some(record)
    }
}

impl From<Vec<u32>> for NamedTokens {
    /// The tokens of a prompt without images. Tokens after an image are not stored.
    fn from(tokens: Vec<u32>) -> NamedTokens {
        NamedTokens { tokens: Arc::new(tokens), images: Arc::default() }
    }
}

/// Tokens with numbers of images that are indices of a list, in which each image is once and in the
/// order of the first positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordTokens {
    /// The token ids.
    pub tokens: Vec<u32>,
    /// The images.
    pub images: Vec<ImageSpan>,
}

impl RecordTokens {
    /// Adds a position; `image` returns the image with a number. `None` if there is no such image.
    fn push(&mut self, position: u32, image: impl Fn(u32) -> Option<ImageSpan>) -> Option<()> {
        let Some(number) = TokenSpan::image_number(position) else {
            self.tokens.push(position);
            return Some(());
        };
        let image = image(number)?;
        // A record has at most as many images as positions, so the list is short.
        let index = self.images.iter().position(|known| *known == image).unwrap_or_else(|| {
            self.images.push(image);
            self.images.len() - 1
        });
        self.tokens.push(TokenSpan::with_image_number(position, index as u32));
        Some(())
    }

    /// Whether the images are numbered in the order in which they occur, and each occurs.
    pub(crate) fn is_canonical(&self) -> bool {
        let mut again = RecordTokens::default();
        let named = self.tokens.iter().try_for_each(|&position| {
            again.push(position, |number| self.images.get(number as usize).copied())
        });
        named.is_some() && again == *self
    }

    /// Each position, with the image that it is part of.
    pub(crate) fn named(&self) -> impl Iterator<Item = (u32, Option<ImageSpan>)> {
        self.tokens.iter().map(|&position| {
            let number = TokenSpan::image_number(position);
            (position, number.and_then(|number| self.images.get(number as usize).copied()))
        })
    }
}
