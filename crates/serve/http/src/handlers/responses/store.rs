//! Responses that are kept, so that a request can continue one by its id.
//!
//! They are kept in memory, for the client that made them, as the messages of the conversation: each
//! response has those of its own turn and refers to the response that it continues. The memory is
//! bounded; the oldest responses are forgotten first.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use stolon::ChatMessage;

/// Maximum number of responses that one continues, directly or indirectly.
const MAX_TURNS: usize = 1024;

/// A response that is kept.
#[derive(Debug)]
pub(crate) struct StoredResponse {
    /// The client that may use it.
    owner: String,
    /// The response that it continues.
    previous: Option<Arc<StoredResponse>>,
    /// Number of responses that it continues, directly or indirectly.
    depth: usize,
    /// The messages of its request, without instructions, and those of its output.
    messages: Vec<ChatMessage>,
    /// The reply, as JSON.
    pub(crate) reply: Value,
    _memory: Memory,
}

/// A share of the store's memory, which is returned on drop.
#[derive(Debug)]
struct Memory {
    of: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The responses that a server keeps. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseStore {
    /// Maximum memory in bytes; 0 keeps nothing.
    limit: usize,
    /// Memory of all responses, also of those that are forgotten but that others continue.
    bytes: Arc<AtomicUsize>,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    responses: HashMap<String, Arc<StoredResponse>>,
    /// The ids, oldest first. Those of responses that were deleted are skipped.
    order: VecDeque<String>,
}

impl ResponseStore {
    /// A store of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Whether responses are kept.
    pub(crate) fn is_open(&self) -> bool {
        self.limit > 0
    }

    /// A response of a client.
    pub(crate) fn get(&self, id: &str, owner: &str) -> Option<Arc<StoredResponse>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.responses.get(id).filter(|response| response.owner == owner).cloned()
    }

    /// Forgets a response of a client. Responses that continue it stay. False if there is none.
    pub(crate) fn delete(&self, id: &str, owner: &str) -> bool {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_own = kept.responses.get(id).is_some_and(|response| response.owner == owner);
        is_own && kept.responses.remove(id).is_some()
    }

    /// Keeps a response.
    pub(crate) fn insert(&self, id: String, turn: Turn, reply: Value) {
        let Turn { owner, previous, messages } = turn;
        let size = |message: &ChatMessage| serde_json::to_vec(message).map_or(0, |json| json.len());
        let bytes = reply.to_string().len() + messages.iter().map(size).sum::<usize>();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let _memory = Memory { of: Arc::clone(&self.bytes), bytes };
        let depth = previous.as_ref().map_or(0, |previous| previous.depth + 1);
        let response = StoredResponse { owner, previous, depth, messages, reply, _memory };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.order.push_back(id.clone());
        kept.responses.insert(id, Arc::new(response));
        while self.bytes.load(Ordering::Relaxed) > self.limit {
            let Some(oldest) = kept.order.pop_front() else { break };
            kept.responses.remove(&oldest);
        }
    }
}

impl StoredResponse {
    /// The conversation up to its end, without instructions.
    pub(crate) fn conversation(&self) -> Vec<ChatMessage> {
        let mut turns = vec![&self.messages];
        let mut previous = &self.previous;
        while let Some(response) = previous {
            turns.push(&response.messages);
            previous = &response.previous;
        }
        turns.into_iter().rev().flatten().cloned().collect()
    }

    /// Whether no response can continue it, because it has continued too many.
    pub(crate) fn is_last(&self) -> bool {
        self.depth >= MAX_TURNS
    }
}

/// A turn whose response will be kept.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// The client that may use it.
    pub(crate) owner: String,
    /// The response that it continues.
    pub(crate) previous: Option<Arc<StoredResponse>>,
    /// The messages of the request, without instructions; then those of the output.
    pub(crate) messages: Vec<ChatMessage>,
}
