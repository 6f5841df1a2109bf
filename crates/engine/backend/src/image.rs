//! Images: the pictures that an encoder reads, and the embeddings that it computes.

use std::ops::Range;
use std::sync::Arc;

/// A picture, or a tile of one, for the encoder of a model: resized, not yet normalized.
#[derive(Clone, PartialEq, Eq)]
pub struct ImageInput {
    /// 128 bits of a hash of everything that the encoder's output depends on: the pixels, their
    /// number in each direction, and how they are prepared. It identifies the image in the prefix
    /// cache.
    pub content_hash: u128,
    /// Number of positions that the image takes in a prompt, at least 1.
    pub kv_len: usize,
    /// Whether its positions attend to each other in both directions. If not, each attends to the
    /// positions up to its own, as positions of text do.
    pub full_attention: bool,
    /// Number of columns of the grid that the positions form, row by row, if the decoder rotates
    /// keys and queries by the row and the column of a position; a divisor of `kv_len`. 0 if the positions are numbered like positions of text. It follows from the
    /// content.
    pub columns: usize,
    /// Width and height of `pixels`.
    pub size: [usize; 2],
    /// Columns and rows of tiles, for encoders that make the positions of an image of several tiles.
    /// `pixels` is then the whole picture and, below it, its tiles row by row, all of
    /// the same size. `[0, 0]` if it is the picture alone.
    pub tiles: [usize; 2],
    /// Row-major `[height, width, 3]`: red, green and blue. Empty if only stored KV of the image is
    /// known, so that it cannot be encoded.
    pub pixels: Vec<u8>,
}

impl std::fmt::Debug for ImageInput {
    /// Shows everything but the pixels.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ImageInput { content_hash, kv_len, full_attention, columns, size, tiles, .. } = self;
        f.debug_struct("ImageInput")
            .field("content_hash", &format_args!("{content_hash:032x}"))
            .field("kv_len", kv_len)
            .field("full_attention", full_attention)
            .field("columns", columns)
            .field("size", size)
            .field("tiles", tiles)
            .finish_non_exhaustive()
    }
}

/// Number of rotary positions that an image of `kv_len` positions takes, at most `kv_len`: the
/// larger edge of its grid if it has `columns`. The positions after the image continue from there.
#[must_use]
pub fn rotary_len(kv_len: usize, columns: usize) -> usize {
    match kv_len.checked_div(columns) {
        Some(rows) => rows.max(columns).min(kv_len),
        None => kv_len,
    }
}

/// The input of the decoder at the positions of an image, as an encoder returns it. Clones share
/// the values.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageEmbeddings {
    /// [`BackendSpec::image_width`](crate::BackendSpec::image_width) values for each position, in the
    /// order of the backend that has made them. Only this backend reads them.
    pub values: Arc<[f32]>,
}

/// An image that has positions in a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceImage {
    /// Position of the image's first row in the sequence. It may be before the slice's start, unless
    /// the image has full attention.
    pub start: usize,
    /// Number of positions of the image, at least 1. It ends after the slice's start. It may end
    /// after the slice's end, unless the image has full attention.
    pub len: usize,
    /// Whether its positions attend to each other in both directions. If so, all of them are in the
    /// slice.
    pub full_attention: bool,
    /// Number of columns of its grid ([`ImageInput::columns`]).
    pub columns: usize,
    /// The embeddings that the encoder has returned for it.
    pub embeddings: ImageEmbeddings,
}

impl SliceImage {
    /// The positions of the image in the sequence.
    #[must_use]
    pub fn positions(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}
