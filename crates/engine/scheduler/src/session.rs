//! Sessions: conversations whose prefix stays cached between their turns.
//!
//! A session is a name for a sequence of tokens that grows with each turn, a lease on the part of
//! it that the prefix tree has, and the block after that part, which is not full and therefore not
//! in the tree. It is not a second cache: a turn finds its prefix in the tree as every other
//! request does, and continues in its own partial block. So a session changes how much is computed
//! and never the answer.
//!
//! 1. **Open**: it has no tokens and holds nothing.
//! 2. **Turn**: a request that names the session. One at a time; [`Turn`] marks the session as busy
//!    until the request has ended, on every path. If it completes, the session's tokens become
//!    its prompt and its answer, and the leases of the request are kept instead of being dropped. If
//!    it fails or is canceled, the session stays where it was; at most the partial block, which
//!    the request has taken, is computed again.
//! 3. **Idle**: the lease keeps the blocks from being evicted, as a pin would. If sessions together
//!    would hold more than their budget, or if a running request finds no other blocks, the session
//!    that has been idle longest releases its blocks. So a hold never makes a request fail or wait
//!    forever. Blocks that are evicted afterward are still on the disk if there is a disk tier.
//! 4. **Closed**: by its owner, after its time to live without a turn, or to make room for another
//!    session.
//!
//! A session also keeps the images of its conversation, so that they can be computed again. The
//! pixels that all sessions keep are bounded: those of the session that was idle longest go first.
//! Its images are then known by their KV only.
//!
//! A flush or a restart of the engine ends all holds, and the eviction of a namespace those of its
//! sessions; the sessions and their tokens stay.

mod held_blocks;
mod hold;
mod sessions;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_kvcache::{BlockLease, Namespace, PrefixLease};

pub use hold::SessionHold;
pub use sessions::Sessions;

use crate::error::EngineError;
use crate::images::PromptImage;

/// Identifies a session: a name that is unique among the sessions of one owner.
///
/// The owner is for programs that serve several clients, who must not reach each other's sessions.
/// It is empty otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId {
    owner: Arc<str>,
    name: Arc<str>,
}

impl SessionId {
    /// Maximum length of a name, in bytes.
    pub const MAX_NAME_BYTES: usize = 128;

    /// The session of this name, without an owner. A name has from 1 to
    /// [`SessionId::MAX_NAME_BYTES`] letters and digits of ASCII, `-`, `_`, `.` and `:`.
    pub fn new(name: impl Into<Arc<str>>) -> SessionId {
        SessionId { owner: "".into(), name: name.into() }
    }

    /// A session of `owner`.
    pub fn owned_by(owner: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> SessionId {
        SessionId { owner: owner.into(), name: name.into() }
    }

    /// A new session of `owner`, with a name of 128 bits that cannot be guessed: the name comes
    /// from keys of the operating system's generator.
    pub fn random(owner: impl Into<Arc<str>>) -> SessionId {
        let keys = RandomState::new();
        let name = format!("{:016x}{:016x}", keys.hash_one(0), keys.hash_one(1));
        SessionId { owner: owner.into(), name: name.into() }
    }

    /// The owner; empty if there is none.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn check(&self) -> Result<(), EngineError> {
        let valid = |c: u8| c.is_ascii_alphanumeric() || b"-_.:".contains(&c);
        let max = SessionId::MAX_NAME_BYTES;
        if (1..=max).contains(&self.name.len()) && self.name.bytes().all(valid) {
            return Ok(());
        }
        let expected = format!("1 to {max} letters, digits, `-`, `_`, `.` and `:`");
        let got = match self.name.char_indices().nth(max) {
            Some((end, _)) => format!("`{}...` ({} bytes)", &self.name[..end], self.name.len()),
            None => format!("`{}`", self.name),
        };
        Err(EngineError::invalid("session_id", expected, got))
    }
}

/// Shows the name.
impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl From<&str> for SessionId {
    fn from(name: &str) -> SessionId {
        SessionId::new(name)
    }
}

impl From<String> for SessionId {
    fn from(name: String) -> SessionId {
        SessionId::new(name)
    }
}

impl From<&SessionId> for SessionId {
    fn from(id: &SessionId) -> SessionId {
        id.clone()
    }
}

/// A session that is to be opened.
#[derive(Clone, Debug)]
pub struct NewSession {
    /// Its id, which no open session has.
    pub id: SessionId,
    /// The namespace of all its turns.
    pub namespace: Namespace,
    /// Time without a turn after which it is closed; `None` for the engine's
    /// [`session_ttl`](crate::EngineConfig::session_ttl).
    pub ttl: Option<Duration>,
}

/// A session, as of one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its id.
    pub id: SessionId,
    /// The namespace of its turns.
    pub namespace: Namespace,
    /// Time without a turn after which it is closed.
    pub ttl: Duration,
    /// Number of tokens of the conversation: prompt and answer of its last complete turn.
    pub tokens: usize,
    /// Number of them that it keeps from being evicted, from the first one on.
    pub held_tokens: usize,
    /// Number of blocks that it holds. Blocks that several sessions share count for each of them
    /// here, and once toward the budget.
    pub held_blocks: usize,
    /// Time since it was opened.
    pub age: Duration,
    /// Time since its last turn ended or, if it has had none, since it was opened. `None` during a
    /// turn.
    pub idle: Option<Duration>,
    /// Number of complete turns.
    pub turns: u64,
    /// Number of prompt tokens of these turns.
    pub prompt_tokens: u64,
    /// Number of them that were found in the cache.
    pub cached_tokens: u64,
}

/// A session without what it holds, to be opened again on an engine that runs the same model.
#[derive(Clone, Debug)]
pub struct SavedSession {
    new: NewSession,
    content: SessionContent,
    /// Its time to live counts from here.
    last_use: Instant,
}

/// A session could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// There is no such session.
    #[error(
        "session `{id}`: expected an open session, got none of this id. It was not opened, or it \
         was closed, because it was idle for too long or there were too many: open it, and send the \
         whole prompt"
    )]
    Unknown {
        /// The id.
        id: SessionId,
    },
    /// A turn of the session is in progress.
    #[error(
        "session `{id}`: expected an idle session, got one whose turn is in progress: wait for the \
         end of that turn, or cancel it"
    )]
    Busy {
        /// The id.
        id: SessionId,
    },
    /// The request has another cache salt than the session.
    #[error(
        "session `{id}`: expected the cache salt that it was opened with, got another one: open a \
         session for each cache salt"
    )]
    OtherNamespace {
        /// The id.
        id: SessionId,
    },
    /// A session of this id is open.
    #[error("session `{id}`: expected an id that is not in use, got that of an open session")]
    Exists {
        /// The id.
        id: SessionId,
    },
    /// As many sessions as permitted are open, and a turn of each is in progress.
    #[error(
        "expected at most {max} open sessions (the setting `max_sessions`), got one more, and none \
         is idle, so that it could be closed"
    )]
    TooMany {
        /// Maximum number of sessions.
        max: usize,
    },
}

/// Counts of sessions, for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SessionCounts {
    pub(crate) open: usize,
    pub(crate) held_blocks: usize,
    pub(crate) turns: u64,
    pub(crate) expired: u64,
    pub(crate) displaced: u64,
    pub(crate) holds_lost: u64,
}

/// The conversation of a session: prompt and answer of its last complete turn.
#[derive(Clone, Debug, Default)]
pub struct SessionContent {
    /// The tokens, with the token that ended the answer.
    pub tokens: Arc<Vec<u32>>,
    /// The images of the prompt, in order of position. Some may have lost their pixels: their turns
    /// can be continued as long as their KV is cached or stored.
    pub images: Arc<[PromptImage]>,
}

impl SessionContent {
    /// The first `count` tokens and their images.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] if there are fewer tokens, or if one of the images would
    /// be cut.
    fn first(&self, count: Option<usize>) -> Result<SessionContent, EngineError> {
        let count = count.unwrap_or(self.tokens.len());
        let Some(tokens) = self.tokens.get(..count) else {
            let expected =
                format!("at most {}, the number that the session has", self.tokens.len());
            return Err(EngineError::invalid("tokens", expected, count));
        };
        let images: Vec<PromptImage> =
            self.images.iter().take_while(|image| image.start < count).cloned().collect();
        if let Some(last) = images.last().filter(|image| image.positions().end > count) {
            let expected =
                format!("a number that is not inside the image at {:?}", last.positions());
            return Err(EngineError::invalid("tokens", expected, count));
        }
        if count == self.tokens.len() {
            return Ok(self.clone());
        }
        Ok(SessionContent { tokens: Arc::new(tokens.to_vec()), images: images.into() })
    }
}

/// The tokens of a session after a fork or a rewind. It should hold their cached prefix.
#[derive(Clone, Debug)]
pub struct SessionPrefix {
    /// The session.
    pub id: SessionId,
    /// The namespace of its turns.
    pub namespace: Namespace,
    /// Its tokens.
    pub tokens: Arc<Vec<u32>>,
    /// The revision of the session with these tokens.
    pub(crate) revision: u64,
}

/// The result of a complete turn, which the session keeps.
#[derive(Clone, Debug)]
pub struct TurnEnd {
    /// Prompt and answer.
    pub content: SessionContent,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that were found in the cache.
    pub cached_tokens: usize,
}

/// A turn in progress. The session is busy until the turn has ended or the last reference to it is
/// dropped, which abandons it.
#[derive(Debug)]
pub struct Turn {
    sessions: Arc<Sessions>,
    id: SessionId,
    /// Unique among all turns of the engine.
    number: u64,
}

impl Turn {
    /// Ends a turn that is complete. Both the scheduler and the caller's stream may call this. If
    /// a stop string ends the answer, the scheduler may have computed more than the caller gets, so
    /// the shorter sequence counts.
    pub fn complete(&self, end: TurnEnd, now: Instant) {
        self.sessions.complete_turn(&self.id, self.number, end, now);
    }

    /// Keeps the KV of a complete turn, unless the session has continued meanwhile or its cached
    /// blocks were removed on request.
    pub fn keep(&self, hold: impl Into<SessionHold>) {
        self.sessions.keep(&self.id, self.number, hold.into());
    }

    /// Takes the partial block of the turn before, if it continues the locked `prefix` of this one,
    /// and if positions at its start are those of `rest`, which follow `prefix` in the prompt.
    /// Returns it with the number of these positions.
    pub fn take_partial(&self, prefix: &PrefixLease, rest: &[u32]) -> Option<(BlockLease, usize)> {
        self.sessions.take_partial(&self.id, self.number, prefix, rest)
    }

    /// Ends a turn that is not complete: the session stays where it was. Does nothing if the turn
    /// has ended.
    pub fn abandon(&self, now: Instant) {
        self.sessions.abandon_turn(&self.id, self.number, now);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.abandon(Instant::now());
    }
}
