//! Sessions: conversations whose prefix stays cached between their turns.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_scheduler::{NewSession, SessionId, SessionInfo, Turn};

use super::Engine;
use crate::request::Prompt;
use crate::{Error, Namespace, Request};

/// How a session is opened.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    id: SessionId,
    cache_salt: Option<String>,
    adapter: Option<String>,
    ttl: Option<Duration>,
}

impl Default for SessionOptions {
    /// A session with a random name, without an owner.
    fn default() -> SessionOptions {
        SessionOptions::new(SessionId::random(""))
    }
}

impl SessionOptions {
    /// A session with this id, which must not be in use.
    pub fn new(id: impl Into<SessionId>) -> SessionOptions {
        SessionOptions { id: id.into(), cache_salt: None, adapter: None, ttl: None }
    }

    /// The cache salt of all its turns; see [`Request::cache_salt`].
    pub fn cache_salt(mut self, salt: impl Into<String>) -> SessionOptions {
        self.cache_salt = Some(salt.into());
        self
    }

    /// The adapter of all its turns; see [`Request::adapter`]. If other weights are loaded under
    /// its name, the session has to be opened again.
    pub fn adapter(mut self, name: impl Into<String>) -> SessionOptions {
        self.adapter = Some(name.into());
        self
    }

    /// Time without a turn after which the session is closed, at most 24 hours. Default:
    /// [`EngineBuilder::session_ttl`](crate::EngineBuilder::session_ttl).
    pub fn ttl(mut self, ttl: Duration) -> SessionOptions {
        self.ttl = Some(ttl);
        self
    }
}

/// The sessions of an engine: [`Engine::sessions`].
#[derive(Clone, Copy, Debug)]
pub struct Sessions<'a>(&'a Engine);

impl Engine {
    /// The open sessions.
    pub fn sessions(&self) -> Sessions<'_> {
        Sessions(self)
    }
}

impl Sessions<'_> {
    /// Opens a session. Requests become its turns with [`Request::session`].
    ///
    /// The cached prompt and answer of a session's last turn are not evicted until its next turn,
    /// within [`EngineBuilder::session_budget`](crate::EngineBuilder::session_budget). A session
    /// lasts until it is closed, or until it had no turn for its time to live. If
    /// [`EngineBuilder::max_sessions`](crate::EngineBuilder::max_sessions) are open, another one is
    /// closed: of the owner with the most, the one that has been idle longest.
    ///
    /// After [`Cache::flush`](crate::Cache::flush) or a restart of the engine, sessions hold
    /// nothing until their next turn; [`Cache::evict_salt`](crate::Cache::evict_salt) has the same
    /// effect on the sessions of a cache salt.
    ///
    /// ```no_run
    /// # async fn chat(engine: stolon::Engine) -> Result<(), stolon::Error> {
    /// use stolon::{Request, SessionOptions};
    ///
    /// let session = engine.sessions().open(SessionOptions::default())?.id;
    /// let first = "A stolon is";
    /// let answer = engine.complete(Request::text(first).session(&session)).await?;
    /// let second = format!("{first}{} It grows", answer.text);
    /// engine.complete(Request::text(second).session(&session)).await?;
    /// // Or only what is new:
    /// engine.complete(Request::text(" in spring").session(&session).append()).await?;
    /// engine.sessions().close(&session);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidParameter` if the id, the cache salt or the time to live is invalid,
    /// [`AdapterError::Unknown`](crate::AdapterError::Unknown),
    /// [`SessionError::Exists`](crate::SessionError::Exists), and
    /// [`SessionError::TooMany`](crate::SessionError::TooMany) if all open sessions have turns in
    /// progress.
    pub fn open(self, options: SessionOptions) -> Result<SessionInfo, Error> {
        let SessionOptions { id, cache_salt, adapter, ttl } = options;
        let request = Request { cache_salt, adapter, ..Request::tokens([]) };
        let new = NewSession { id, namespace: self.0.namespace(&request)?, ttl };
        Ok(self.0.inner.handle.context().sessions.open(new, Instant::now())?)
    }

    /// Closes a session and frees what it holds. A turn that is in progress continues. Returns
    /// whether the session was open.
    pub fn close(self, id: &SessionId) -> bool {
        self.0.inner.handle.context().sessions.close(id, Instant::now())
    }

    /// A session as it is now.
    ///
    /// # Errors
    /// [`SessionError::Unknown`](crate::SessionError::Unknown).
    pub fn get(self, id: &SessionId) -> Result<SessionInfo, Error> {
        Ok(self.0.inner.handle.context().sessions.info(id, Instant::now())?)
    }

    /// All open sessions, the one that has been idle longest first.
    pub fn list(self) -> Vec<SessionInfo> {
        self.0.inner.handle.context().sessions.list(Instant::now())
    }

    /// Opens a session `to` that continues after the tokens of `from`, for another branch of the
    /// conversation, or that starts with the first `tokens` tokens of `from`. A turn of `from` that
    /// is in progress does not count. The new session has the cache salt and the time to live of
    /// `from`, and both hold the blocks that they share, which count once toward the budget.
    ///
    /// # Errors
    /// [`SessionError::Unknown`](crate::SessionError::Unknown), `InvalidParameter` if `from` has
    /// fewer tokens or would be cut inside an image, and the errors of [`Sessions::open`] for `to`.
    pub async fn fork(
        self,
        from: &SessionId,
        to: impl Into<SessionId>,
        tokens: Option<usize>,
    ) -> Result<SessionInfo, Error> {
        Ok(self.0.inner.handle.fork_session(from, to.into(), tokens).await?)
    }

    /// Takes a session back to its first `tokens` tokens, for example to those before its last
    /// answer. With 0, it holds nothing and is as if it had just been opened.
    ///
    /// # Errors
    /// [`SessionError::Unknown`](crate::SessionError::Unknown),
    /// [`SessionError::Busy`](crate::SessionError::Busy), and `InvalidParameter` if the session has
    /// fewer tokens or would be cut inside an image.
    pub async fn rewind(self, id: &SessionId, tokens: usize) -> Result<SessionInfo, Error> {
        Ok(self.0.inner.handle.rewind_session(id, tokens).await?)
    }
}

impl Engine {
    /// Puts the tokens and images of its session before the prompt of a request with `append`, and
    /// images in their places. The answer to a gap in a text gets the tokens that end it.
    pub(super) async fn appended(&self, mut request: Request) -> Result<Request, Error> {
        request = self.inner.prompts.text.skills.prepare(request)?;
        if matches!(request.prompt(), Prompt::Infill(_)) {
            let ends = self.inner.prompts.text.infill_ends()?;
            request.prompt_ends = ends.iter().copied().collect();
        }
        if !std::mem::take(&mut request.append) {
            return self.inner.prompts.placed(request).await;
        }
        let Some(id) = &request.session else {
            return Err(Error::invalid("append", "a request with a session", "none"));
        };
        if matches!(request.prompt(), Prompt::Chat(_)) {
            let expected = "a text or token ids to follow those of a session";
            return Err(Error::invalid("append", expected, "a conversation"));
        }
        let before = self.inner.handle.context().sessions.content(id, Instant::now())?;
        let after = Some(Arc::clone(&before.tokens));
        let request = self.inner.prompts.placed_after(request, before).await?;
        Ok(Request { after, ..request })
    }

    /// Begins a turn of the request's session, if it has one.
    pub(super) fn begin_turn(
        &self,
        request: &Request,
        namespace: &Namespace,
    ) -> Result<Option<Arc<Turn>>, Error> {
        let Some(id) = &request.session else { return Ok(None) };
        let (sessions, after) = (&self.inner.handle.context().sessions, request.after.as_ref());
        Ok(Some(sessions.begin_turn_after(after, id, namespace, Instant::now())?))
    }
}
