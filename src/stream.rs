//! The owned stream of one request's events.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;

use crate::{Completion, Error, Event};

/// A running request's events. Owned and `'static`; dropping it cancels the request.
#[derive(Debug)]
pub struct TokenStream {
    prompt_tokens: usize,
}

impl TokenStream {
    /// Tokens of the prompt, after tokenising and rendering.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Reads the stream to its end.
    ///
    /// # Errors
    /// The error the stream ended with.
    pub async fn collect_text(self) -> Result<Completion, Error> {
        Err(Error::EngineStopped)
    }
}

impl Stream for TokenStream {
    type Item = Result<Event, Error>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(None)
    }
}
