//! Questions about images.

use std::sync::Arc;

use stolon::{ChatMessage, Request};

/// A question about images, with log-probabilities, so that answers are compared bit by bit.
pub(crate) fn question(images: &[&Arc<[u8]>], text: &str) -> Request {
    let request = Request::chat(vec![ChatMessage::user(text)]).max_tokens(6).logprobs(0);
    images.iter().fold(request, |request, image| request.image(Arc::clone(image)))
}
