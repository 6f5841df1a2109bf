//! The images of the fake backend. The embeddings of an image are numbers that follow from its
//! hash, and take the place of tokens in the marks of its positions.

use super::marks::mix;
use crate::{BackendError, ImageEmbeddings, ImageInput, SequenceSlice};

/// The encoder: how many calls an image takes, and the image in progress.
#[derive(Debug)]
pub(super) struct FakeEncoder {
    calls: usize,
    /// The hash of the image in progress, and the calls so far.
    current: Option<(u128, usize)>,
}

impl FakeEncoder {
    pub(super) fn new(calls: usize) -> Self {
        Self { calls, current: None }
    }

    /// One call for `image`: its embeddings, if it was the last one.
    pub(super) fn advance(
        &mut self,
        image: &ImageInput,
        width: usize,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        if self.calls == 0 {
            return Err(BackendError::Unsupported("images"));
        }
        let before = self.current.filter(|(hash, _)| *hash == image.content_hash);
        let calls = before.map_or(0, |(_, calls)| calls) + 1;
        self.current = (calls < self.calls).then_some((image.content_hash, calls));
        if self.current.is_some() {
            return Ok(None);
        }
        let token = |row| image_token(image.content_hash, row) as f32;
        let rows = (0..image.kv_len).flat_map(|row| std::iter::repeat_n(token(row), width));
        Ok(Some(ImageEmbeddings { values: rows.collect::<Vec<f32>>().into() }))
    }
}

/// The value that replaces a token at row `row` of an image:
/// [`expected_next`](super::expected_next) and its like expect it there. It is below 2^24.
#[must_use]
pub fn image_token(content_hash: u128, row: usize) -> u32 {
    let hash = mix(content_hash as u64 ^ mix((content_hash >> 64) as u64));
    (mix(hash ^ row as u64) >> 40) as u32
}

/// The tokens of a slice, in which the positions of images have the values of `image_token`.
pub(super) fn tokens_with_images(slice: &SequenceSlice, tokens: &[u32]) -> Vec<u32> {
    let mut tokens = tokens.to_vec();
    for image in &slice.images {
        let width = image.embeddings.values.len() / image.len.max(1);
        for (row, position) in image.positions().enumerate() {
            let token = position.checked_sub(slice.start).and_then(|at| tokens.get_mut(at));
            let value = image.embeddings.values.get(row * width);
            if let (Some(token), Some(value)) = (token, value) {
                *token = *value as u32;
            }
        }
    }
    tokens
}
