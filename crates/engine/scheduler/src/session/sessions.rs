//! The open sessions of an engine.
//!
//! One mutex guards the table. It is held only for short computations that wait for nothing.
//! Dropping a lease puts it into the queue of the prefix tree's owner and never waits either.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_kvcache::{BlockLease, Namespace, PrefixLease};

use super::table::{Session, Table};
use super::{
    NewSession, SavedSession, SessionContent, SessionCounts, SessionError, SessionHold, SessionId,
    SessionInfo, SessionPrefix, Turn, TurnEnd,
};
use crate::error::EngineError;
#[cfg(loom)]
use crate::sync::planted::{self, Bug};
use crate::sync::{Mutex, MutexGuard, lock};

/// The open sessions of an engine, and their limits.
#[derive(Debug)]
pub struct Sessions {
    /// Maximum number of blocks that all sessions hold together.
    budget: usize,
    /// Maximum number of open sessions.
    max: usize,
    /// Time to live of a session that is opened without one.
    ttl: Duration,
    /// Maximum number of bytes of the pixels of images that all sessions keep together.
    pixel_bytes: usize,
    table: Mutex<Table>,
}

impl Sessions {
    /// Maximum time to live of a session.
    pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);

    /// Maximum number of bytes of the pixels of images that all sessions keep together.
    pub const PIXEL_BYTES: usize = 256 << 20;

    /// No open session. All sessions together may hold `budget` blocks, at most `max` may be open,
    /// and `ttl` is the time to live of those that are opened without one.
    pub fn new(budget: usize, max: usize, ttl: Duration) -> Sessions {
        let pixel_bytes = Sessions::PIXEL_BYTES;
        Sessions { budget, max, ttl, pixel_bytes, table: Mutex::default() }
    }

    /// The same with another maximum of pixels, in bytes.
    #[must_use]
    pub fn keep_pixels(self, pixel_bytes: usize) -> Sessions {
        Sessions { pixel_bytes, ..self }
    }

    /// Opens a session. If as many as permitted are open, one that is idle is closed: of the owner
    /// with the most sessions, the one that has been idle longest.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for an invalid id or time to live;
    /// [`SessionError::Exists`], [`SessionError::TooMany`].
    pub fn open(&self, new: NewSession, now: Instant) -> Result<SessionInfo, EngineError> {
        let mut table = self.lock(now);
        self.open_in(&mut table, new, now)
    }

    fn open_in(
        &self,
        table: &mut Table,
        new: NewSession,
        now: Instant,
    ) -> Result<SessionInfo, EngineError> {
        let NewSession { id, namespace, ttl } = new;
        id.check()?;
        let ttl = ttl.unwrap_or(self.ttl);
        if ttl.is_zero() || ttl > Sessions::MAX_TTL {
            let expected = format!("more than 0 and at most {:?}", Sessions::MAX_TTL);
            return Err(EngineError::invalid("ttl", expected, format!("{ttl:?}")));
        }
        if table.sessions.contains_key(&id) {
            return Err(SessionError::Exists { id }.into());
        }
        if table.sessions.len() >= self.max {
            let victim = table.displaceable().ok_or(SessionError::TooMany { max: self.max })?;
            table.remove(&victim);
            table.displaced += 1;
        }
        let session = Session::new(namespace, ttl, table.number(), now);
        let info = session.info(&id, now);
        table.expect_expiry(session.expires());
        table.sessions.insert(id, session);
        Ok(info)
    }

    /// Closes a session and frees what it holds. A turn that is in progress continues. Returns
    /// whether the session was open.
    pub fn close(&self, id: &SessionId, now: Instant) -> bool {
        self.lock(now).remove(id)
    }

    /// A session.
    ///
    /// # Errors
    /// [`SessionError::Unknown`].
    pub fn info(&self, id: &SessionId, now: Instant) -> Result<SessionInfo, SessionError> {
        Ok(self.lock(now).session(id)?.info(id, now))
    }

    /// The conversation of a session: prompt and answer of its last complete turn.
    ///
    /// # Errors
    /// [`SessionError::Unknown`]; [`SessionError::Busy`] during a turn, which may change them.
    pub fn content(&self, id: &SessionId, now: Instant) -> Result<SessionContent, SessionError> {
        let mut table = self.lock(now);
        let session = table.session(id)?;
        match session.turn {
            None => Ok(session.content.clone()),
            Some(_) => Err(SessionError::Busy { id: id.clone() }),
        }
    }

    /// All open sessions, the one that has been idle longest first.
    pub fn list(&self, now: Instant) -> Vec<SessionInfo> {
        let table = self.lock(now);
        let mut sessions: Vec<_> = table.sessions.iter().collect();
        sessions.sort_unstable_by_key(|(_, session)| session.used);
        sessions.into_iter().map(|(id, session)| session.info(id, now)).collect()
    }

    /// All open sessions without what they hold, the one that has been idle longest first. A turn in
    /// progress does not count.
    pub fn save(&self, now: Instant) -> Vec<SavedSession> {
        let table = self.lock(now);
        let mut sessions: Vec<_> = table.sessions.iter().collect();
        sessions.sort_unstable_by_key(|(_, session)| session.used);
        let saved = sessions.into_iter().map(|(id, session)| SavedSession {
            new: NewSession {
                id: id.clone(),
                namespace: session.namespace,
                ttl: Some(session.ttl),
            },
            content: session.content.clone(),
            last_use: session.last_use,
        });
        saved.collect()
    }

    /// Opens sessions that another engine has saved. They hold nothing until their next turn, and
    /// their time to live continues. Those that this engine does not permit are not opened.
    pub fn restore(&self, saved: Vec<SavedSession>, now: Instant) {
        let mut table = self.lock(now);
        for SavedSession { new, content, last_use } in saved {
            let id = new.id.clone();
            if self.open_in(&mut table, new, now).is_err() {
                continue;
            }
            let Ok(session) = table.session(&id) else { continue };
            (session.content, session.last_use) = (content, last_use);
            let expires = session.expires();
            table.expect_expiry(expires);
        }
        table.limit_pixels(self.pixel_bytes);
        table.expire(now);
    }

    /// Opens a session `to` with the tokens of `from` or, if `tokens` is given, with that many of
    /// its first tokens. A turn of `from` that is in progress does not count. The new session has the
    /// same namespace and time to live. The caller locks its prefix and hands it to
    /// [`Sessions::hold`].
    ///
    /// # Errors
    /// [`SessionError::Unknown`], those of [`Sessions::open`], and
    /// [`EngineError::InvalidParameter`] if `from` has fewer tokens or would be cut inside an
    /// image.
    pub fn fork(
        &self,
        from: &SessionId,
        to: SessionId,
        tokens: Option<usize>,
        now: Instant,
    ) -> Result<SessionPrefix, EngineError> {
        let mut table = self.lock(now);
        let origin = table.session(from)?;
        let content = origin.content.first(tokens)?;
        // Counts as a use, so that this session is not closed to make room for the new one.
        origin.last_use = now;
        let (namespace, ttl) = (origin.namespace, Some(origin.ttl));
        table.use_now(from)?;
        self.open_in(&mut table, NewSession { id: to.clone(), namespace, ttl }, now)?;
        let session = table.session(&to)?;
        let tokens = Arc::clone(&content.tokens);
        session.content = content;
        let prefix = SessionPrefix { id: to, namespace, tokens, revision: session.revision };
        table.limit_pixels(self.pixel_bytes);
        Ok(prefix)
    }

    /// Takes a session back to its first `tokens` tokens. The caller locks that prefix and hands it
    /// to [`Sessions::hold`]; until then the session holds what it held.
    ///
    /// # Errors
    /// [`SessionError::Unknown`], [`SessionError::Busy`], and [`EngineError::InvalidParameter`] if
    /// it has fewer tokens or would be cut inside an image.
    pub fn rewind(
        &self,
        id: &SessionId,
        tokens: usize,
        now: Instant,
    ) -> Result<SessionPrefix, EngineError> {
        let mut table = self.lock(now);
        let session = table.session(id)?;
        if session.turn.is_some() {
            return Err(SessionError::Busy { id: id.clone() }.into());
        }
        let content = session.content.first(Some(tokens))?;
        let (session, revision) = table.use_now(id)?;
        (session.content, session.last_use) = (content, now);
        (session.revision, session.last_turn) = (revision, 0);
        let (namespace, tokens) = (session.namespace, Arc::clone(&session.content.tokens));
        Ok(SessionPrefix { id: id.clone(), namespace, tokens, revision })
    }

    /// Lets a session hold the locked prefix of its tokens, unless it has continued meanwhile.
    pub fn hold(&self, prefix: &SessionPrefix, locked: impl Into<SessionHold>) {
        self.keep(&prefix.id, prefix.revision, locked.into());
    }

    /// Begins a turn.
    ///
    /// # Errors
    /// [`SessionError::Unknown`], [`SessionError::OtherNamespace`], [`SessionError::Busy`].
    pub fn begin_turn(
        self: &Arc<Sessions>,
        id: &SessionId,
        namespace: &Namespace,
        now: Instant,
    ) -> Result<Arc<Turn>, SessionError> {
        self.begin_turn_after(None, id, namespace, now)
    }

    /// As [`Sessions::begin_turn`], for a turn that follows these tokens of the session's
    /// [content](Sessions::content).
    ///
    /// # Errors
    /// The errors of `begin_turn`; also `Busy` if the session has other tokens now.
    pub fn begin_turn_after(
        self: &Arc<Sessions>,
        tokens: Option<&Arc<Vec<u32>>>,
        id: &SessionId,
        namespace: &Namespace,
        now: Instant,
    ) -> Result<Arc<Turn>, SessionError> {
        let mut table = self.lock(now);
        let session = table.session(id)?;
        if session.namespace != *namespace {
            return Err(SessionError::OtherNamespace { id: id.clone() });
        }
        let changed = tokens.is_some_and(|tokens| !Arc::ptr_eq(tokens, &session.content.tokens));
        if session.turn.is_some() || changed {
            return Err(SessionError::Busy { id: id.clone() });
        }
        let (session, number) = table.use_now(id)?;
        (session.turn, session.revision) = (Some(number), number);
        Ok(Arc::new(Turn { sessions: Arc::clone(self), id: id.clone(), number }))
    }

    pub(super) fn complete_turn(&self, id: &SessionId, turn: u64, end: TurnEnd, now: Instant) {
        let mut table = self.lock(now);
        let Some(session) = table.sessions.get_mut(id) else { return };
        if session.turn == Some(turn) {
            session.turn = None;
            session.last_turn = turn;
            session.last_use = now;
            session.content = end.content;
            session.turns += 1;
            session.prompt_tokens += end.prompt_tokens as u64;
            session.cached_tokens += end.cached_tokens as u64;
            let expires = session.expires();
            table.turns += 1;
            table.expect_expiry(expires);
            table.limit_pixels(self.pixel_bytes);
        } else if session.last_turn == turn
            && end.content.tokens.len() < session.content.tokens.len()
        {
            session.content = end.content;
        }
    }

    pub(super) fn abandon_turn(&self, id: &SessionId, turn: u64, now: Instant) {
        let mut table = self.lock(now);
        let revision = table.number();
        let Some(session) = table.sessions.get_mut(id) else { return };
        if session.turn == Some(turn) {
            session.turn = None;
            session.last_use = now;
            session.revision = revision;
            let expires = session.expires();
            table.expect_expiry(expires);
        }
    }

    /// Takes the partial block that a session in this turn holds, if it continues `prefix` with
    /// positions of `rest`. Returns it with the number of these positions.
    pub(super) fn take_partial(
        &self,
        id: &SessionId,
        turn: u64,
        prefix: &PrefixLease,
        rest: &[u32],
    ) -> Option<(BlockLease, usize)> {
        let mut table = self.lock_now();
        let is_turn = table.sessions.get(id)?.turn == Some(turn);
        is_turn.then(|| table.take_partial(id, prefix, rest)).flatten()
    }

    /// Lets a session hold `hold` instead of what it holds, if its revision is still `revision`.
    pub(super) fn keep(&self, id: &SessionId, revision: u64, mut hold: SessionHold) {
        let mut table = self.lock_now();
        let is_current = table.sessions.get(id).is_some_and(|session| session.revision == revision);
        #[cfg(loom)]
        let is_current = is_current || planted::is(Bug::AnyRevision);
        if !is_current {
            return;
        }
        table.release(id);
        if hold.block_count() > self.budget {
            hold.drop_partial();
        }
        if hold.is_empty() {
            return;
        }
        if hold.block_count() > self.budget {
            table.holds_lost += 1;
            return;
        }
        table.hold(id, hold);
        while table.held.len() > self.budget {
            let oldest = table.oldest_hold(Some(id));
            debug_assert!(oldest.is_some(), "one session alone does not exceed the budget");
            let Some(oldest) = oldest else { break };
            table.lose(&oldest);
        }
    }

    /// Ends the hold of the session that has been idle longest. Returns false if none holds
    /// anything.
    pub(crate) fn release_oldest(&self) -> bool {
        let mut table = self.lock_now();
        let oldest = table.oldest_hold(None);
        oldest.is_some_and(|id| table.lose(&id))
    }

    /// Ends a hold in the same way as the scheduler does when it needs blocks. For the loom models.
    #[cfg(loom)]
    pub fn lose_oldest_hold(&self) -> bool {
        self.release_oldest()
    }

    /// Ends all holds, because the prefix tree is emptied or replaced. Turns in progress do not
    /// hold anything when they end.
    pub fn release_all(&self) {
        self.lock_now().release_where(|_| true);
    }

    /// Ends the holds of a namespace, because it is removed from the prefix tree. Its turns in
    /// progress do not hold anything when they end.
    pub fn release_namespace(&self, namespace: &Namespace) {
        self.lock_now().release_where(|session| session.namespace == *namespace);
    }

    /// Closes the sessions whose time to live has passed.
    pub fn expire(&self, now: Instant) {
        drop(self.lock(now));
    }

    pub(crate) fn counts(&self, now: Instant) -> SessionCounts {
        let table = self.lock(now);
        SessionCounts {
            open: table.sessions.len(),
            held_blocks: table.held.len(),
            turns: table.turns,
            expired: table.expired,
            displaced: table.displaced,
            holds_lost: table.holds_lost,
        }
    }

    /// Number of blocks that are not full among those that sessions hold. The pool counts them as
    /// reserved.
    pub(crate) fn partial_blocks(&self) -> usize {
        self.lock_now().partial_blocks()
    }

    /// Verifies the accounting of held blocks.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let table = self.lock_now();
        table.audit()?;
        let (held, open) = (table.held.len(), table.sessions.len());
        if held > self.budget || open > self.max {
            let (budget, max) = (self.budget, self.max);
            return Err(format!(
                "sessions: {open} hold {held} blocks, expected at most {max} and {budget}"
            ));
        }
        Ok(())
    }

    /// The table, without the sessions whose time to live has passed.
    fn lock(&self, now: Instant) -> MutexGuard<'_, Table> {
        let mut table = self.lock_now();
        table.expire(now);
        table
    }

    fn lock_now(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }
}
