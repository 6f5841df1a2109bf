//! Marks: the parts of a prompt that a client expects to use again.
//!
//! 1. [`Request::marks`] names parts of a conversation by their messages.
//! 2. [`Marked::of`] keeps the marks, and the conversation, of a request whose prompt becomes tokens.
//! 3. [`Engine::prefix_marks`] finds the ends of the parts among the tokens, before the request is
//!    submitted. The end of the prompt is known. For another place, the conversation is rendered up to
//!    there, once more, as work of the client; the part is what both prompts have in common. With
//!    images, that is done when they take their places (`images.rs`).
//! 4. The stream protects them ([`Marking::mark`]) when the second token is there, as the prompt is
//!    cached by then, or at its end.

use std::sync::Arc;
use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_kvcache::Namespace;
use stolon_scheduler::PrefixMark;

use crate::prompt::common_len;
use crate::request::Prompt;
use crate::text::ended_chat;
use crate::{ChatMessage, Engine, MessageContent, Request};

/// The end of a part of the prompt that is expected to be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheMark {
    /// Index of the message of a conversation that the part ends in; that of the last message, or
    /// above, for the end of the prompt.
    pub message: usize,
    /// Number of parts at the end of that message's content that are not in it. With as many as it
    /// has, or more, nothing of the content is.
    pub parts_left_out: usize,
    /// How long the part is protected after its last use, at most 24 hours.
    pub ttl: Duration,
}

impl CacheMark {
    /// A mark at the end of any prompt.
    #[must_use]
    pub fn whole(ttl: Duration) -> CacheMark {
        CacheMark { message: usize::MAX, parts_left_out: 0, ttl }
    }

    /// The same mark, as one of the whole prompt if it is at its end.
    pub(crate) fn in_prompt(self, prompt: &Prompt) -> CacheMark {
        let is_last = match prompt {
            Prompt::Chat(messages) => self.message >= messages.len().saturating_sub(1),
            _ => true,
        };
        match is_last && self.parts_left_out == 0 {
            true => CacheMark::whole(self.ttl),
            false => self,
        }
    }

    /// Whether it is at the end of the prompt.
    pub(crate) fn is_whole(&self) -> bool {
        self.message == usize::MAX && self.parts_left_out == 0
    }
}

/// The marks that have an effect: a mark is of no use if a later one lives as long. The last one
/// comes first.
pub(crate) fn useful(marks: &[CacheMark]) -> Vec<CacheMark> {
    let mut marks = marks.to_vec();
    marks.sort_by_key(|mark| (std::cmp::Reverse(mark.message), mark.parts_left_out));
    let mut longest = Duration::ZERO;
    marks.retain(|mark| {
        let ttl = mark.ttl.min(PrefixMark::MAX_TTL);
        let is_longer = ttl > longest;
        longest = longest.max(ttl);
        is_longer
    });
    marks.truncate(PrefixMark::MAX_OF_REQUEST);
    marks
}

/// The marks of a request, and its prompt as it was given.
#[derive(Clone, Debug)]
pub(crate) struct Marked {
    pub(crate) marks: Vec<CacheMark>,
    /// The request with the conversation; `None` if all marks are at the end of the prompt.
    pub(crate) conversation: Option<Arc<Request>>,
    /// The ends of other marked parts that are known.
    placed: Arc<[PrefixMark]>,
}

impl Marked {
    /// The marks of a request; `None` if it has none.
    pub(crate) fn of(request: &Request) -> Option<Marked> {
        if request.marks.is_empty() && request.placed_marks.is_empty() {
            return None;
        }
        let conversation = request.conversation.clone().or_else(|| match request.prompt() {
            // Images are in their places already, and the marks with them.
            Prompt::Chat(_) if !request.has_images() => Some(Arc::new(request.clone())),
            _ => None,
        });
        let mut marks = useful(&request.marks);
        let conversation = conversation.filter(|_| marks.iter().any(|mark| !mark.is_whole()));
        marks.retain(|mark| conversation.is_some() || mark.is_whole());
        let placed = Arc::clone(&request.placed_marks);
        Some(Marked { marks, conversation, placed })
    }
}

fn messages(request: &Request) -> &[ChatMessage] {
    match request.prompt() {
        Prompt::Chat(messages) => messages,
        _ => &[],
    }
}

/// The part of a conversation up to a mark.
pub(crate) fn up_to(conversation: &Request, mark: &CacheMark) -> Request {
    let messages = messages(conversation);
    let mut messages = messages[..messages.len().min(mark.message.saturating_add(1))].to_vec();
    if let Some(last) = messages.last_mut() {
        let is_empty = match &mut last.content {
            Some(MessageContent::Parts(parts)) if parts.len() > mark.parts_left_out => {
                parts.truncate(parts.len() - mark.parts_left_out);
                false
            }
            _ => mark.parts_left_out > 0,
        };
        if is_empty {
            last.content = Some(MessageContent::Text(String::new()));
        }
    }
    let chat = Arc::new(ended_chat(&conversation.chat));
    let prompt = Arc::new(Prompt::Chat(messages));
    Request { prompt, chat, marks: Arc::default(), ..conversation.clone() }
}

impl Engine {
    /// The ends of the marked parts of a prompt, in whole blocks, in ascending order. A part that
    /// cannot be found is left out.
    pub(crate) async fn prefix_marks(
        &self,
        marked: Option<Marked>,
        tokens: &[u32],
    ) -> Arc<[PrefixMark]> {
        let Some(Marked { marks, conversation, placed }) = marked else { return Arc::default() };
        let block_size = self.model_info().block_size;
        let mut lens: Vec<PrefixMark> = Vec::new();
        for mark in marks {
            let len = match &conversation {
                Some(conversation) if !mark.is_whole() => {
                    let part = self.inner.prompts.tokens(&up_to(conversation, &mark)).await;
                    part.map_or(0, |part| common_len(&part.tokens, tokens))
                }
                _ => tokens.len(),
            };
            lens.push(PrefixMark { len, ttl: mark.ttl });
        }
        let mut ends: Vec<PrefixMark> = Vec::new();
        for PrefixMark { len, ttl } in lens.into_iter().chain(placed.iter().copied()) {
            let len = len / block_size * block_size;
            // Later marks come first.
            if len > 0 && ends.last().is_none_or(|end| end.len > len) {
                ends.push(PrefixMark { len, ttl: ttl.min(PrefixMark::MAX_TTL) });
            }
        }
        ends.reverse();
        ends.into()
    }
}

/// The marks of a request that was submitted.
#[derive(Clone, Debug)]
pub(crate) struct Marking {
    pub(crate) handle: EngineHandle,
    pub(crate) namespace: Namespace,
    pub(crate) tokens: Arc<Vec<u32>>,
    pub(crate) marks: Arc<[PrefixMark]>,
    pub(crate) tenant: Option<Arc<str>>,
}

impl Marking {
    /// Protects the marked parts, as far as they are cached.
    pub(crate) fn mark(self) {
        self.handle.mark(self.namespace, self.tokens, self.marks, self.tenant);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(message: usize, parts_left_out: usize, minutes: u64) -> CacheMark {
        CacheMark { message, parts_left_out, ttl: Duration::from_secs(60 * minutes) }
    }

    /// Goal: only marks that protect something longer than the later ones remain.
    #[test]
    fn a_later_mark_covers_earlier_ones() {
        let whole = |minutes: u64| CacheMark::whole(Duration::from_secs(60 * minutes));
        assert_eq!(useful(&[mark(0, 0, 5), mark(1, 0, 5), whole(5)]), [whole(5)]);
        assert_eq!(useful(&[mark(0, 0, 60), mark(3, 1, 5)]), [mark(3, 1, 5), mark(0, 0, 60)]);
        assert_eq!(useful(&[mark(3, 2, 60), mark(3, 1, 5)]), [mark(3, 1, 5), mark(3, 2, 60)]);
        assert_eq!(useful(&[mark(2, 0, 5), mark(2, 1, 5)]), [mark(2, 0, 5)]);
        assert_eq!(useful(&[whole(5), mark(1, 0, 0)]), [whole(5)]);
        let messages = Prompt::Chat(vec![ChatMessage::user("a"), ChatMessage::user("b")]);
        assert_eq!(mark(0, 0, 5).in_prompt(&messages), mark(0, 0, 5));
        assert_eq!(mark(1, 1, 5).in_prompt(&messages), mark(1, 1, 5));
        assert_eq!(mark(1, 0, 5).in_prompt(&messages), whole(5));
        assert_eq!(mark(9, 0, 5).in_prompt(&Prompt::Tokens(vec![1])), whole(5));
        let many: Vec<CacheMark> =
            (0..100).map(|index| mark(index, 0, 1000 - index as u64)).collect();
        assert_eq!(useful(&many).len(), PrefixMark::MAX_OF_REQUEST);
    }
}
