//! What was asked and answered, so that the next turn of a conversation is made of the tokens that
//! were sampled.
//!
//! A client sends an answer back as text, as one message of the conversation's next request.
//! Tokenizing this text may give other tokens than those that were sampled: a model may spell a
//! word in unusual pieces, a client writes the JSON of a call with other spaces, and many leave the
//! reasoning out. The prompt would differ from what the model said, and all KV after the first
//! different token would be computed again. With a [`History`], a request goes this way:
//!
//! 1. [`History::find`] looks for earlier requests with the same messages up to a message of the
//!    assistant that says what was answered to them. Calls are compared as JSON.
//! 2. Reasoning that the client left out is given back to these messages ([`Found::restored`]). Whether it
//!    is part of the prompt is up to the chat template.
//! 3. The conversation is rendered. If the text begins with the text of such an earlier prompt
//!    ([`Found::verified`]), and the next piece of it is the answer ([`Known::end_of_answer`]), then
//!    the tokens of the prompt are those of the earlier prompt, those that were sampled, and those
//!    of the rest of the text, which begins with the token that ends the answer.
//! 4. [`History::remember`] keeps the request when it is submitted, and [`Exchange::answered`] adds
//!    each of its answers.
//!
//! A request is identified by digests (BLAKE3) of its tenant, cache salt, adapter and messages, so
//! nothing is found across tenants. The answer to a prompt is that of an engine that gets the same
//! tokens without a cache. An engine that has forgotten the earlier request tokenizes its text.
//!
//! The same memory explains why a prompt is not cached ([`History::miss`]): it has the prompts
//! that the engine has computed, also those that are not cached anymore.
//!
//! The memory is bounded: requests that were not continued for the longest time are forgotten
//! first. With a disk tier, the history is also in a file (`history/stored.rs`).

mod exchange;
mod messages;
mod miss;
mod outline;
#[cfg(feature = "tiers")]
mod stored;
#[cfg(not(feature = "tiers"))]
#[path = "history/not_stored.rs"]
mod stored;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stolon_text::{ChatMessage, RenderedChat, ToolCall};

pub(crate) use exchange::{Answered, Exchange};
pub(crate) use messages::normalized;
pub(crate) use outline::Outline;
pub(crate) use stored::StoredHistory;

/// A BLAKE3 digest.
pub(crate) type Digest = [u8; 32];

/// The requests and answers that an engine remembers.
#[derive(Debug)]
pub(crate) struct History {
    /// Maximum memory of all exchanges, in bytes.
    limit: usize,
    /// Memory of the exchanges, also of those that are forgotten but that others continue.
    bytes: Arc<AtomicUsize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The exchanges by the digest of their scope and messages, with the time of their last use.
    exchanges: HashMap<Digest, (u64, Arc<Exchange>)>,
    /// The digests by the time of their last use. The first is forgotten next.
    order: BTreeMap<u64, Digest>,
    /// The number of uses so far.
    clock: u64,
}

/// Where a conversation is looked for, and which part of it is known.
#[derive(Debug)]
pub(crate) struct Found {
    /// The digest of the scope and all messages.
    pub(crate) conversation: Digest,
    /// The answers that are known, in the order of their messages.
    known: Vec<Known>,
}

/// An answer that a message of a conversation repeats.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// Index of the message.
    pub(crate) message: usize,
    /// The request with all messages before.
    pub(crate) exchange: Arc<Exchange>,
    /// The answer to it.
    pub(crate) answer: Arc<Answered>,
}

impl History {
    /// A history of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> History {
        History { limit, bytes: Arc::default(), state: Mutex::default() }
    }

    /// The answers in a conversation that are known. `scope` has everything else that separates
    /// conversations.
    pub(crate) fn find(&self, scope: &Digest, messages: &[ChatMessage]) -> Found {
        let mut hasher = blake3::Hasher::new_keyed(scope);
        let mut asked = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let said = messages::said(message);
            if let Some(said) = said.as_ref().filter(|_| index > 0) {
                asked.push((index, *hasher.finalize().as_bytes(), said.clone()));
            }
            messages::digest(message, said.as_ref(), &mut hasher);
        }
        let conversation = *hasher.finalize().as_bytes();
        if asked.is_empty() {
            return Found { conversation, known: Vec::new() };
        }
        let mut state = self.state();
        let known = asked.into_iter().filter_map(|(message, digest, said)| {
            let exchange = state.used(&digest)?;
            let answer = exchange.answer(&said)?;
            Some(Known { message, exchange, answer })
        });
        let known = known.collect();
        Found { conversation, known }
    }

    /// Keeps a request that was submitted. Returns the exchange that its answers are added to: the
    /// one that is kept already if it is the same.
    /// `evictions` is the number of blocks that the cache has evicted.
    pub(crate) fn remember(&self, exchange: Arc<Exchange>, evictions: u64) -> Arc<Exchange> {
        let mut state = self.state();
        if let Some(kept) = state.used(&exchange.conversation)
            && kept.has_same_prompt(&exchange)
        {
            return kept;
        }
        exchange.keep(&self.bytes, evictions);
        state.insert(Arc::clone(&exchange));
        while self.bytes.load(Ordering::Relaxed) > self.limit && state.forget_one() {}
        exchange
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic leaves the state inconsistent: forgetting an exchange twice does nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// An exchange, which becomes the one that was used last.
    fn used(&mut self, conversation: &Digest) -> Option<Arc<Exchange>> {
        let (used, exchange) = self.exchanges.get_mut(conversation)?;
        self.order.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.order.insert(self.clock, *conversation);
        Some(Arc::clone(exchange))
    }

    fn insert(&mut self, exchange: Arc<Exchange>) {
        let conversation = exchange.conversation;
        self.clock += 1;
        self.order.insert(self.clock, conversation);
        if let Some((used, _)) = self.exchanges.insert(conversation, (self.clock, exchange)) {
            self.order.remove(&used);
        }
    }

    /// Forgets the exchange that was not used for the longest time. False if there is none.
    fn forget_one(&mut self) -> bool {
        let Some((_, conversation)) = self.order.pop_first() else { return false };
        self.exchanges.remove(&conversation);
        true
    }
}

impl Found {
    /// The messages with the reasoning that the client left out.
    pub(crate) fn restored<'a>(&self, messages: &'a [ChatMessage]) -> Cow<'a, [ChatMessage]> {
        messages::restored(messages, &self.known)
    }

    /// The known answers whose prompts the rendered conversation begins with, the last one first.
    pub(crate) fn verified(&self, chat: &RenderedChat) -> Vec<Known> {
        let text = chat.as_str();
        let mut by_len: Vec<&Known> = self.known.iter().collect();
        by_len.sort_by_key(|known| known.exchange.text_len);
        let (mut hasher, mut hashed) = (blake3::Hasher::new(), 0);
        let mut verified = Vec::new();
        for known in by_len {
            let Some(more) = text.get(hashed..known.exchange.text_len) else { break };
            hasher.update(more.as_bytes());
            hashed = known.exchange.text_len;
            if *hasher.finalize().as_bytes() == known.exchange.text_digest {
                verified.push(known.clone());
            }
        }
        verified.reverse();
        verified
    }
}

impl Known {
    /// Where the answer ends in the text of a conversation that begins with the text of its prompt:
    /// the position of the token that ends it. `None` if the text after the prompt is not the
    /// answer. `ends` are the spellings of the tokens that may end it.
    ///
    /// If the text is not the sampled text, letter by letter, it has to say the same: a template
    /// writes calls in its own way, puts spaces around a text, or adds an empty reasoning.
    pub(crate) fn end_of_answer(
        &self,
        chat: &RenderedChat,
        message: &ChatMessage,
        ends: &[String],
    ) -> Option<usize> {
        let after = &chat.as_str()[self.exchange.text_len..];
        let end = ends.iter().filter_map(|spelling| after.find(spelling)).min()?;
        let shown = &after[..end];
        let is_same = *shown == *self.answer.text || self.is_shown_by(message, shown);
        is_same.then_some(self.exchange.text_len + end)
    }

    /// Whether a template's text of the message says everything that was sampled, because templates
    /// leave out reasoning and divide calls among messages, and whether the sampled text has the ids
    /// of calls that the template shows, because the results after it refer to them.
    fn is_shown_by(&self, message: &ChatMessage, shown: &str) -> bool {
        let said = &self.answer.said;
        let has_call = |call: &ToolCall| {
            let calls = said.calls.iter().filter(|other| other.name == call.name).count();
            shown.matches(&*call.name).count() >= calls
        };
        shown.contains(&said.reasoning)
            && shown.contains(&said.text)
            && said.calls.iter().all(has_call)
            && messages::call_ids(message)
                .all(|id| !shown.contains(id) || self.answer.text.contains(id))
    }
}
