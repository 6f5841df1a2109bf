//! The state of each open session, and in which order sessions lose what they hold.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use stolon_kvcache::{BlockLease, Namespace, PrefixLease};

use super::held_blocks::HeldBlocks;
use super::{SessionContent, SessionError, SessionHold, SessionId, SessionInfo};
use crate::images::{PromptImage, pixel_bytes};

#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) sessions: HashMap<SessionId, Session>,
    pub(super) held: HeldBlocks,
    /// The sessions that hold something, by their last use.
    holders: BTreeMap<u64, SessionId>,
    /// The last number given to a turn, a use or a revision of a session.
    last_number: u64,
    /// No session expires before this; `None` if there is none.
    next_expiry: Option<Instant>,
    pub(super) turns: u64,
    pub(super) expired: u64,
    pub(super) displaced: u64,
    pub(super) holds_lost: u64,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) namespace: Namespace,
    pub(super) ttl: Duration,
    /// Prompt and answer of the last complete turn.
    pub(super) content: SessionContent,
    /// The KV of this conversation that the session keeps.
    hold: Option<SessionHold>,
    opened: Instant,
    pub(super) last_use: Instant,
    /// The number of the last use. No other session has the same.
    pub(super) used: u64,
    /// The turn in progress.
    pub(super) turn: Option<u64>,
    /// The turn that `content` is from, if nothing has changed them since.
    pub(super) last_turn: u64,
    /// A lease is kept only for the revision that it was made for. It changes with each turn, and
    /// whenever holds are ended on request.
    pub(super) revision: u64,
    pub(super) turns: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
}

impl Session {
    /// A session without tokens.
    pub(super) fn new(namespace: Namespace, ttl: Duration, number: u64, now: Instant) -> Session {
        Session {
            namespace,
            ttl,
            content: SessionContent::default(),
            hold: None,
            opened: now,
            last_use: now,
            used: number,
            turn: None,
            last_turn: 0,
            revision: number,
            turns: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
        }
    }

    /// When it is closed if nothing uses it; `None` during a turn.
    pub(super) fn expires(&self) -> Option<Instant> {
        self.last_use.checked_add(self.ttl).filter(|_| self.turn.is_none())
    }

    pub(super) fn info(&self, id: &SessionId, now: Instant) -> SessionInfo {
        let held = self.hold.as_ref();
        let since = |then: Instant| now.saturating_duration_since(then);
        SessionInfo {
            id: id.clone(),
            namespace: self.namespace,
            ttl: self.ttl,
            tokens: self.content.tokens.len(),
            held_tokens: held.map_or(0, |hold| hold.len().min(self.content.tokens.len())),
            held_blocks: held.map_or(0, SessionHold::block_count),
            age: since(self.opened),
            idle: self.turn.is_none().then(|| since(self.last_use)),
            turns: self.turns,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

impl Table {
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn session(&mut self, id: &SessionId) -> Result<&mut Session, SessionError> {
        self.sessions.get_mut(id).ok_or_else(|| SessionError::Unknown { id: id.clone() })
    }

    /// Makes a session the one that was used last. Returns it and the number of this use.
    pub(super) fn use_now(&mut self, id: &SessionId) -> Result<(&mut Session, u64), SessionError> {
        let number = self.number();
        let Some(session) = self.sessions.get_mut(id) else {
            return Err(SessionError::Unknown { id: id.clone() });
        };
        if let Some(id) = self.holders.remove(&session.used) {
            self.holders.insert(number, id);
        }
        session.used = number;
        Ok((session, number))
    }

    pub(super) fn expect_expiry(&mut self, expires: Option<Instant>) {
        self.next_expiry = self.next_expiry.into_iter().chain(expires).min();
    }

    /// Closes the sessions whose time to live has passed.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.next_expiry.is_none_or(|next| now < next) {
            return;
        }
        let over = |session: &Session| session.expires().is_some_and(|end| end <= now);
        let ended = self.sessions.iter().filter(|(_, session)| over(session));
        let ended: Vec<SessionId> = ended.map(|(id, _)| id.clone()).collect();
        self.expired += ended.len() as u64;
        for id in ended {
            self.remove(&id);
        }
        self.next_expiry = self.sessions.values().filter_map(Session::expires).min();
    }

    /// Removes the pixels of sessions that have been idle longest, until those of all sessions have
    /// at most `bytes_max` bytes. Images that several sessions have count for each.
    pub(super) fn limit_pixels(&mut self, bytes_max: usize) {
        let bytes = |session: &Session| pixel_bytes(&session.content.images);
        let mut all: usize = self.sessions.values().map(bytes).sum();
        while all > bytes_max {
            let with_pixels = self.sessions.values_mut().filter(|session| bytes(session) > 0);
            let Some(oldest) = with_pixels.min_by_key(|session| session.used) else { return };
            all -= bytes(oldest);
            let images = oldest.content.images.iter().map(PromptImage::without_pixels);
            oldest.content.images = images.collect();
        }
    }

    /// Closes a session. Returns whether it was open.
    pub(super) fn remove(&mut self, id: &SessionId) -> bool {
        self.release(id);
        self.sessions.remove(id).is_some()
    }

    /// Lets an open session that holds nothing hold `hold`.
    pub(super) fn hold(&mut self, id: &SessionId, hold: SessionHold) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        self.held.add(hold.blocks());
        self.holders.insert(session.used, id.clone());
        session.hold = Some(hold);
    }

    /// Takes the partial block of what a session holds; see [`SessionHold::take_partial`].
    pub(super) fn take_partial(
        &mut self,
        id: &SessionId,
        prefix: &PrefixLease,
        rest: &[u32],
    ) -> Option<(BlockLease, usize)> {
        let hold = self.sessions.get_mut(id)?.hold.as_mut()?;
        let taken = hold.take_partial(prefix, rest)?;
        self.held.remove(taken.0.blocks().iter().copied());
        if hold.is_empty() {
            self.release(id);
        }
        Some(taken)
    }

    /// Ends a hold. Returns whether there was one.
    pub(super) fn release(&mut self, id: &SessionId) -> bool {
        let Some(session) = self.sessions.get_mut(id) else { return false };
        let Some(hold) = session.hold.take() else { return false };
        self.held.remove(hold.blocks());
        self.holders.remove(&session.used);
        true
    }

    /// Ends a hold because others need the blocks. Returns whether there was one.
    pub(super) fn lose(&mut self, id: &SessionId) -> bool {
        let released = self.release(id);
        self.holds_lost += u64::from(released);
        released
    }

    /// Ends the holds of these sessions, and lets their turns in progress hold nothing when they
    /// end.
    pub(super) fn release_where(&mut self, matches: impl Fn(&Session) -> bool) {
        let revision = self.number();
        let found = self.sessions.iter_mut().filter(|(_, session)| matches(session));
        let mut ids = Vec::new();
        for (id, session) in found {
            session.revision = revision;
            ids.push(id.clone());
        }
        for id in ids {
            self.release(&id);
        }
    }

    /// The session with a hold that was used longest ago, without `except`.
    pub(super) fn oldest_hold(&self, except: Option<&SessionId>) -> Option<SessionId> {
        self.holders.values().find(|id| Some(*id) != except).cloned()
    }

    /// The idle session that is closed to make room for another one.
    pub(super) fn displaceable(&self) -> Option<SessionId> {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for id in self.sessions.keys() {
            *counts.entry(id.owner()).or_default() += 1;
        }
        let idle = self.sessions.iter().filter(|(_, session)| session.turn.is_none());
        let rank = |(id, session): &(&SessionId, &Session)| {
            (usize::MAX - counts.get(id.owner()).copied().unwrap_or(0), session.used)
        };
        idle.min_by_key(rank).map(|(id, _)| id.clone())
    }

    /// Number of partial blocks that sessions hold.
    pub(super) fn partial_blocks(&self) -> usize {
        let holds = self.sessions.values().filter_map(|session| session.hold.as_ref());
        holds.filter(|hold| hold.has_partial()).count()
    }

    /// Verifies the accounting of held blocks.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(super) fn audit(&self) -> Result<(), String> {
        let holds = || self.sessions.values().filter_map(|session| session.hold.as_ref());
        if !self.held.is_sum_of(holds()) {
            return Err("sessions: the blocks that they hold are not those that are counted".into());
        }
        let is_holder = |(used, id): (&u64, &SessionId)| {
            let session = self.sessions.get(id);
            session.is_some_and(|session| session.hold.is_some() && session.used == *used)
        };
        if self.holders.len() != holds().count() || !self.holders.iter().all(is_holder) {
            return Err("sessions: those that hold something are not those that are listed".into());
        }
        Ok(())
    }
}
