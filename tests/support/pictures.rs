//! Pictures and questions about them, for the tests with images.

use std::sync::Arc;

use stolon::{ChatMessage, Completion, Request};

/// An uncompressed BMP file with pixels that follow from `seed`.
pub(crate) fn picture(width: u32, height: u32, seed: u32) -> Arc<[u8]> {
    let row = (3 * width).next_multiple_of(4);
    let (header, size) = (54_u32, row * height);
    let mut file = b"BM".to_vec();
    for word in [header + size, 0, header, 40, width, height, 24 << 16 | 1, 0, size, 0, 0, 0, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend((0..size).map(|at| (at.wrapping_mul(seed * 2 + 7) >> 3) as u8));
    file.into()
}

/// A question about images, with log-probabilities, so that answers are compared bit by bit.
pub(crate) fn question(images: &[&Arc<[u8]>], text: &str) -> Request {
    let request = Request::chat(vec![ChatMessage::user(text)]).max_tokens(6).logprobs(0);
    images.iter().fold(request, |request, image| request.image(Arc::clone(image)))
}

/// The tokens of an answer with the bits of their log-probabilities.
pub(crate) fn bits(completion: &Completion) -> Vec<(u32, u32)> {
    let logprobs = completion.logprobs.iter().map(|logprob| logprob.logprob.to_bits());
    completion.token_ids.iter().copied().zip(logprobs).collect()
}
