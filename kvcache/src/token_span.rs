//! Atoms: things other than text that stand in a prompt, an image for example. Each is written as
//! as many positions as its KV takes, all numbers above every token id, and a match never ends
//! inside one.
//!
//! A position of an atom has bit 31 set. Bit 30 says that more of the same atom follows, so that
//! a border between atoms can be seen without looking at what comes next. The other 30 bits name
//! the atom: its kind and its value, or a number given to its value by an [`TokenSpanInterner`].
//!
//! Prompts that part in the block in which an image ends share the blocks before it, so the border
//! between two nodes may lie inside the image. That is a matter of storage alone: matches, leases,
//! pins and commits all end where [`whole_spans`] says. Where an eviction has cut an atom, the rest
//! of it goes before anything else, since no match can reach its end.

use crate::sync::{Mutex, lock};
use std::collections::HashMap;
use thiserror::Error;

/// Set in every position of an atom; token ids stay below it.
const SPAN: u32 = 1 << 31;
/// Set in all positions of an atom but its last: more of it follows.
const MORE: u32 = 1 << 30;
/// Bits for the value, below two bits for the kind.
const VALUE_BITS: u32 = 28;
const KIND_IMAGE: u32 = 0;
const KIND_COORDINATE: u32 = 1;
const KIND_SIZE: u32 = 2;

/// Something in a prompt that is no text token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenSpan {
    /// A quantised coordinate; takes one position.
    Coordinate {
        /// The bin, below 2^28.
        bin: u32,
    },
    /// A quantised size; takes one position.
    Size {
        /// The bin of the width, below 2^14.
        width_bin: u32,
        /// The bin of the height, below 2^14.
        height_bin: u32,
    },
    /// An image, known by its content.
    Image {
        /// A 128-bit hash of everything that its KV depends on.
        content_hash: u128,
        /// KV positions that it takes, at least 1. The same content in another length is another
        /// atom.
        kv_len: u32,
    },
}

/// An atom or a token cannot be written as positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TokenSpanError {
    /// A bin is too large.
    #[error("{what}: expected a value below {limit}, got {got}")]
    OutOfRange {
        /// What the value is.
        what: &'static str,
        /// The first value that is too large.
        limit: u32,
        /// The value.
        got: u32,
    },
    /// An image without positions.
    #[error("image: expected at least 1 KV position, got 0")]
    EmptyImage,
    /// The numbers for different images are used up, 2^28 of them. A new tree with a new interner
    /// starts from none.
    #[error("image: expected at most {limit} different ones in an interner's life, got one more")]
    Exhausted {
        /// How many there are.
        limit: u32,
    },
}

/// Gives each different image a number. One an engine, shared by all that build prompts for one
/// tree.
///
/// It remembers at least the `capacity` images that were used last. One that was forgotten gets
/// a new number when it comes again, so that what is cached of it is not found and is evicted in
/// time; no number is given twice, since the tree may still hold positions with it.
#[derive(Debug)]
pub struct TokenSpanInterner {
    images: Mutex<Images>,
    capacity: usize,
}

/// Numbers by content hash and length, in two generations: when the recent one is full, the
/// earlier one is forgotten and the recent one takes its place.
#[derive(Debug, Default)]
struct Images {
    recent: HashMap<(u128, u32), u32>,
    earlier: HashMap<(u128, u32), u32>,
    next: u32,
}

impl TokenSpanInterner {
    /// An interner that remembers `capacity` to twice as many images, about 64 bytes each.
    pub fn new(capacity: usize) -> TokenSpanInterner {
        TokenSpanInterner { images: Mutex::new(Images::default()), capacity: capacity.max(1) }
    }

    /// Appends the positions of `atom` to `positions`.
    ///
    /// # Errors
    ///
    /// When a value is out of its range or no number is left; nothing is appended then.
    pub fn append(&self, atom: TokenSpan, positions: &mut Vec<u32>) -> Result<(), TokenSpanError> {
        let (kind, value, kv_len) = match atom {
            TokenSpan::Coordinate { bin } => {
                check("coordinate bin", bin, 1 << VALUE_BITS)?;
                (KIND_COORDINATE, bin, 1)
            }
            TokenSpan::Size { width_bin, height_bin } => {
                check("width bin", width_bin, 1 << (VALUE_BITS / 2))?;
                check("height bin", height_bin, 1 << (VALUE_BITS / 2))?;
                (KIND_SIZE, width_bin << (VALUE_BITS / 2) | height_bin, 1)
            }
            TokenSpan::Image { kv_len: 0, .. } => return Err(TokenSpanError::EmptyImage),
            TokenSpan::Image { content_hash, kv_len } => {
                (KIND_IMAGE, self.image_number(content_hash, kv_len)?, kv_len)
            }
        };
        let last = SPAN | kind << VALUE_BITS | value;
        positions.extend((1..kv_len).map(|_| last | MORE));
        positions.push(last);
        Ok(())
    }

    fn image_number(&self, content_hash: u128, kv_len: u32) -> Result<u32, TokenSpanError> {
        const LIMIT: u32 = 1 << VALUE_BITS;
        let image = (content_hash, kv_len);
        let mut guard = lock(&self.images);
        let images = &mut *guard;
        if let Some(&number) = images.recent.get(&image) {
            return Ok(number);
        }
        let number = match images.earlier.remove(&image) {
            Some(number) => number,
            None if images.next == LIMIT => return Err(TokenSpanError::Exhausted { limit: LIMIT }),
            None => {
                images.next += 1;
                images.next - 1
            }
        };
        if images.recent.len() == self.capacity {
            images.earlier = std::mem::take(&mut images.recent);
        }
        images.recent.insert(image, number);
        Ok(number)
    }
}

fn check(what: &'static str, got: u32, limit: u32) -> Result<(), TokenSpanError> {
    if got < limit { Ok(()) } else { Err(TokenSpanError::OutOfRange { what, limit, got }) }
}

/// Whether the sequence may be cut right after `position`.
#[inline(always)]
fn ends_span(position: u32) -> bool {
    position & (SPAN | MORE) != SPAN | MORE
}

/// The longest whole-block prefix of `positions[..matched]` that does not end inside an atom.
#[inline(always)]
pub(crate) fn whole_spans(positions: &[u32], matched: usize, block_size: usize) -> usize {
    let mut length = matched;
    while length > 0 && !ends_span(positions[length - 1]) {
        length -= block_size;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: different atoms, and atoms and tokens, never have the same positions.
    #[test]
    fn atoms_are_told_apart() {
        let interner = TokenSpanInterner::new(100);
        let atoms = [
            TokenSpan::Coordinate { bin: 1 },
            TokenSpan::Coordinate { bin: 2 },
            TokenSpan::Size { width_bin: 0, height_bin: 1 },
            TokenSpan::Size { width_bin: 1, height_bin: 0 },
            TokenSpan::Image { content_hash: 1, kv_len: 1 },
            TokenSpan::Image { content_hash: 2, kv_len: 1 },
            TokenSpan::Image { content_hash: 1, kv_len: 729 },
            TokenSpan::Image { content_hash: 1 << 100, kv_len: 729 },
        ];
        let mut firsts = std::collections::HashSet::new();
        for atom in atoms {
            let mut positions = Vec::new();
            interner.append(atom, &mut positions).expect("in range");
            let length =
                if let TokenSpan::Image { kv_len, .. } = atom { kv_len as usize } else { 1 };
            assert_eq!(positions.len(), length);
            assert!(positions.iter().all(|&position| position >= SPAN));
            assert!(firsts.insert(positions[0] & !MORE), "told apart by any of its positions");
            let ends = (1..=length).filter(|&end| whole_spans(&positions, end, 1) == end);
            assert_eq!(ends.collect::<Vec<_>>(), [length]);
        }
    }

    /// Goal: bad values are refused by name and leave nothing behind.
    #[test]
    fn bad_atoms_are_refused() {
        let interner = TokenSpanInterner::new(1);
        let mut positions = vec![7];
        let mut append = |atom| interner.append(atom, &mut positions);
        let limit = 1 << 28;
        let error = TokenSpanError::OutOfRange { what: "coordinate bin", limit, got: limit };
        assert_eq!(append(TokenSpan::Coordinate { bin: limit }), Err(error));
        assert!(append(TokenSpan::Size { width_bin: 1 << 14, height_bin: 0 }).is_err());
        let image = |content_hash, kv_len| TokenSpan::Image { content_hash, kv_len };
        assert_eq!(append(image(1, 0)), Err(TokenSpanError::EmptyImage));
        assert_eq!(positions, [7]);
    }

    /// Goal: memory is bounded; an image that was forgotten comes back under a number of its own,
    /// one that was used lately keeps its number.
    #[test]
    fn old_images_are_forgotten() {
        let interner = TokenSpanInterner::new(4);
        let number = |content_hash| interner.image_number(content_hash, 9).expect("numbers left");
        let first = number(0);
        for content_hash in 1..1000 {
            assert_eq!(number(content_hash), content_hash as u32, "a new number for a new image");
            assert_eq!(number(0), first, "in use all the time");
            let images = lock(&interner.images);
            assert!(images.recent.len() + images.earlier.len() <= 8);
        }
        assert_eq!(number(1), 1000, "forgotten, so new");
        for content_hash in [998, 999, 0] {
            assert_eq!(number(content_hash), content_hash as u32, "used lately");
        }
    }

    /// Goal: when the numbers are used up, new images are refused and known ones are not.
    #[test]
    fn numbers_run_out_without_being_reused() {
        let interner = TokenSpanInterner::new(4);
        lock(&interner.images).next = (1 << VALUE_BITS) - 1;
        let last = interner.image_number(1, 9);
        assert_eq!(last, Ok((1 << VALUE_BITS) - 1));
        let exhausted = TokenSpanError::Exhausted { limit: 1 << VALUE_BITS };
        assert_eq!(interner.image_number(2, 9), Err(exhausted));
        assert_eq!(interner.image_number(1, 9), last);
    }
}
