//! Atomic token spans: parts of a prompt that are not text, an image for example. A span is written
//! as one position for each position that its KV occupies. No match ends inside one.
//!
//! Encoding of a position of a span: bit 31 is set, which distinguishes it from a token id. Bit 30
//! says that more positions of the same span follow, so that the end of a span can be recognized
//! without looking at the next position. The other 30 bits identify the span: its kind and its
//! value, or a number that a [`TokenSpanInterner`] has assigned to its value. One kind is not for
//! prompts: the tree writes it for checkpoints (`checkpoint.rs`).
//!
//! Two prompts may differ first in the block in which an image ends. They share the blocks before
//! it, so a node of the tree may end inside an image. This concerns storage only: matches, leases,
//! pins and commits all end where [`whole_spans`] says. When an eviction has removed the end of a
//! span, the rest of the span is evicted before anything else, because no match can use it.

mod runs;

pub use runs::PositionRun;

use crate::sync::{Mutex, lock};
use std::collections::HashMap;
use thiserror::Error;

/// Set in every position of a span. Token ids are smaller.
const SPAN: u32 = 1 << 31;
/// Set in all positions of a span except the last.
const MORE: u32 = 1 << 30;
/// Number of bits for the value. The two bits above hold the kind.
const VALUE_BITS: u32 = 28;
const VALUE_MASK: u32 = (1 << VALUE_BITS) - 1;
const KIND_IMAGE: u32 = 0;
/// The kinds from 1 to this one are of values.
const KIND_VALUE_MAX: u32 = 2;
const KIND_CHECKPOINT: u32 = 3;

/// An atomic token span: a part of a prompt that is not text. It occupies one or more positions,
/// and no match, lease, pin or commit ends inside it.
///
/// [`TokenSpanInterner::append`] writes it into a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenSpan {
    /// A value whose meaning the backend knows, a coordinate in an image for example. It occupies
    /// one position.
    Value {
        /// 1 or 2.
        kind: u32,
        /// Below 2^28.
        value: u32,
    },
    /// An image, identified by its content and its length.
    Image {
        /// A 128-bit hash of everything that the KV of the image depends on.
        content_hash: u128,
        /// Number of positions that the image occupies, at least 1. The same content with another
        /// length is a different span.
        kv_len: u32,
        /// Number of columns of the grid that its positions form, row by row, for models with
        /// rotary positions in two dimensions; 0 for others. It follows from the content, and is
        /// kept because the rotary positions after the image depend on it.
        columns: u32,
    },
}

impl TokenSpan {
    /// Whether a match may end right after `position`: it is a token, or the last position of a
    /// span.
    #[inline(always)]
    pub fn may_end_after(position: u32) -> bool {
        position & (SPAN | MORE) != SPAN | MORE
    }

    /// The value at `position`, which takes this position only; `None` for a token id and for a part
    /// of an image.
    pub fn of_value(position: u32) -> Option<TokenSpan> {
        let (kind, value) = (position >> VALUE_BITS & 3, position & VALUE_MASK);
        let is_value = position & (SPAN | MORE) == SPAN && (1..=KIND_VALUE_MAX).contains(&kind);
        is_value.then_some(TokenSpan::Value { kind, value })
    }

    /// The position of a value, as [`TokenSpanInterner::append`] writes it; `None` for an image,
    /// which takes several, and for a value that is out of range.
    pub fn value_position(self) -> Option<u32> {
        match self {
            TokenSpan::Value { kind: kind @ 1..=KIND_VALUE_MAX, value: value @ 0..=VALUE_MASK } => {
                Some(SPAN | kind << VALUE_BITS | value)
            }
            TokenSpan::Value { .. } | TokenSpan::Image { .. } => None,
        }
    }

    /// Whether `position` is part of an image.
    pub fn is_image(position: u32) -> bool {
        TokenSpan::image_number(position).is_some()
    }

    /// The number of the image that `position` is part of; `None` if it is part of no image. An
    /// interner has assigned it: outside of the process it has no meaning.
    #[inline(always)]
    pub fn image_number(position: u32) -> Option<u32> {
        let is_image = position & SPAN != 0 && position >> VALUE_BITS & 3 == KIND_IMAGE;
        is_image.then_some(position & VALUE_MASK)
    }

    /// A position of an image with another number (its lowest 28 bits) in the place of its own. Any
    /// other position is returned as it is.
    pub fn with_image_number(position: u32, number: u32) -> u32 {
        match TokenSpan::is_image(position) {
            true => position & !VALUE_MASK | number & VALUE_MASK,
            false => position,
        }
    }
}

/// The identity of an image in every process: the fields of [`TokenSpan::Image`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSpan {
    /// A 128-bit hash of everything that the KV of the image depends on.
    pub content_hash: u128,
    /// Number of positions that the image occupies, at least 1.
    pub kv_len: u32,
    /// Number of columns of the grid that its positions form; 0 if they form none.
    pub columns: u32,
}

/// A span cannot be written as positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TokenSpanError {
    /// A kind or a value is out of range.
    #[error("value: expected kind 1 or 2 and a value below 2^28, got kind {kind} and {value}")]
    OutOfRange {
        /// The kind.
        kind: u32,
        /// The value.
        value: u32,
    },
    /// An image has length 0.
    #[error("image: expected at least 1 KV position, got 0")]
    EmptyImage,
    /// The interner has assigned all its numbers. Create a new tree and a new interner.
    #[error("image: expected at most {limit} different images in an interner's life, got one more")]
    Exhausted {
        /// The number of different images that an interner can number: 2^28.
        limit: u32,
    },
}

/// Writes [`TokenSpan`]s as positions, and assigns a number to each different image. All code that
/// builds prompts for one tree must use the same interner.
///
/// It remembers at least the `capacity` images that were used last. A forgotten image gets a new
/// number when it is used again; what was cached under its old number is then no longer found, and
/// is evicted in time. A number is never reused, because the tree may still hold positions with it.
#[derive(Debug)]
pub struct TokenSpanInterner {
    images: Mutex<Images>,
    capacity: usize,
}

/// The images that are remembered, in two generations. When the recent generation is full, the
/// earlier one is dropped and the recent one takes its place.
#[derive(Debug, Default)]
struct Images {
    recent: Generation,
    earlier: Generation,
    next: u32,
}

/// The numbers of images, and the images by number.
#[derive(Debug, Default)]
struct Generation {
    numbers: HashMap<ImageSpan, u32>,
    images: HashMap<u32, ImageSpan>,
}

impl TokenSpanInterner {
    /// Creates an interner that remembers from `capacity` to twice as many images and uses about
    /// 128 bytes for each. A capacity of 0 counts as 1.
    pub fn new(capacity: usize) -> TokenSpanInterner {
        TokenSpanInterner { images: Mutex::new(Images::default()), capacity: capacity.max(1) }
    }

    /// The image that `position` is part of; `None` if it is part of none, or of one that was
    /// forgotten. An image stays as long remembered as without this call.
    pub fn image_at(&self, position: u32) -> Option<ImageSpan> {
        let number = TokenSpan::image_number(position)?;
        let images = lock(&self.images);
        images.recent.images.get(&number).or_else(|| images.earlier.images.get(&number)).copied()
    }

    /// Appends the positions of `span` to `positions`.
    ///
    /// # Errors
    ///
    /// If a value is out of range or no number is left. In this case nothing is appended.
    pub fn append(&self, span: TokenSpan, positions: &mut Vec<u32>) -> Result<(), TokenSpanError> {
        let (last, kv_len) = match span {
            TokenSpan::Value { kind, value } => {
                let error = TokenSpanError::OutOfRange { kind, value };
                (span.value_position().ok_or(error)?, 1)
            }
            TokenSpan::Image { kv_len: 0, .. } => return Err(TokenSpanError::EmptyImage),
            TokenSpan::Image { content_hash, kv_len, columns } => {
                let image = ImageSpan { content_hash, kv_len, columns };
                (SPAN | KIND_IMAGE << VALUE_BITS | self.image_number(image)?, kv_len)
            }
        };
        positions.extend((1..kv_len).map(|_| last | MORE));
        positions.push(last);
        Ok(())
    }

    fn image_number(&self, image: ImageSpan) -> Result<u32, TokenSpanError> {
        const LIMIT: u32 = 1 << VALUE_BITS;
        let mut guard = lock(&self.images);
        let images = &mut *guard;
        if let Some(&number) = images.recent.numbers.get(&image) {
            return Ok(number);
        }
        let number = match images.earlier.numbers.remove(&image) {
            Some(number) => number,
            None if images.next == LIMIT => return Err(TokenSpanError::Exhausted { limit: LIMIT }),
            None => {
                images.next += 1;
                images.next - 1
            }
        };
        images.earlier.images.remove(&number);
        if images.recent.numbers.len() == self.capacity {
            images.earlier = std::mem::take(&mut images.recent);
        }
        images.recent.numbers.insert(image, number);
        images.recent.images.insert(number, image);
        Ok(number)
    }
}

/// The placeholder positions of a checkpoint, `kv_len` of them. No prompt has such a span.
pub(crate) fn checkpoint(kv_len: usize) -> Box<[u32]> {
    let last = SPAN | KIND_CHECKPOINT << VALUE_BITS;
    let mut positions = vec![last | MORE; kv_len];
    if let Some(position) = positions.last_mut() {
        *position = last;
    }
    positions.into()
}

/// Whether a position is part of a span. Otherwise it is a token id.
pub(crate) fn is_span(position: u32) -> bool {
    position & SPAN != 0
}

/// Whether a position is part of a checkpoint.
pub(crate) fn is_checkpoint(position: u32) -> bool {
    position | MORE == SPAN | MORE | KIND_CHECKPOINT << VALUE_BITS
}

/// The index of the first position that is neither a token id below 2^31 nor part of a span as
/// [`TokenSpanInterner::append`] writes it. `positions` may end inside a span, but not start there.
pub(crate) fn first_invalid(positions: &[u32]) -> Option<usize> {
    let is_invalid = |(index, &position): (usize, &u32)| {
        let kind = position >> VALUE_BITS & 3;
        let is_cut = || positions.get(index + 1).is_some_and(|next| next | MORE != position);
        position & SPAN != 0
            && (kind > KIND_VALUE_MAX || position & MORE != 0 && (kind != KIND_IMAGE || is_cut()))
    };
    positions.iter().enumerate().position(is_invalid)
}

/// The length of the longest whole-block prefix of `positions[..matched]` that does not end inside
/// a span.
#[inline(always)]
pub(crate) fn whole_spans(positions: &[u32], matched: usize, block_size: usize) -> usize {
    let mut length = matched;
    while length > 0 && !TokenSpan::may_end_after(positions[length - 1]) {
        length -= block_size;
    }
    length
}

#[cfg(test)]
mod tests;
