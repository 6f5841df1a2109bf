//! The class `Sessions`: the open sessions of a running engine, by their names.

use pyo3::prelude::*;
use stolon::{SessionId, SessionInfo, SessionOptions};

use crate::options::seconds;
use crate::process::{ProcessBound, wait};

/// The sessions of an engine. `stolon.Sessions` wraps it.
#[pyclass(frozen, module = "stolon._native")]
#[derive(Debug)]
pub(crate) struct Sessions {
    engine: ProcessBound<stolon::Engine>,
}

impl Sessions {
    pub(crate) fn new(engine: ProcessBound<stolon::Engine>) -> Sessions {
        Sessions { engine }
    }
}

/// `stolon.SessionInfo`. Times are in seconds.
#[derive(Debug, IntoPyObject)]
struct Info {
    id: String,
    tokens: usize,
    held_tokens: usize,
    held_blocks: usize,
    turns: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttl: f64,
    age: f64,
    idle: Option<f64>,
}

impl From<SessionInfo> for Info {
    fn from(info: SessionInfo) -> Info {
        Info {
            id: info.id.name().to_owned(),
            tokens: info.tokens,
            held_tokens: info.held_tokens,
            held_blocks: info.held_blocks,
            turns: info.turns,
            prompt_tokens: info.prompt_tokens,
            cached_tokens: info.cached_tokens,
            ttl: info.ttl.as_secs_f64(),
            age: info.age.as_secs_f64(),
            idle: info.idle.map(|time| time.as_secs_f64()),
        }
    }
}

/// The session of this name, or a new one with a random name.
fn named(name: Option<String>) -> SessionId {
    name.map_or_else(|| SessionId::random(""), SessionId::new)
}

#[pymethods]
impl Sessions {
    /// Opens a session.
    fn open(
        &self,
        py: Python<'_>,
        name: Option<String>,
        cache_salt: Option<String>,
        adapter: Option<String>,
        ttl: Option<f64>,
    ) -> PyResult<Info> {
        let engine = self.engine.get(py)?;
        let mut options = SessionOptions::new(named(name));
        if let Some(salt) = cache_salt {
            options = options.cache_salt(salt);
        }
        if let Some(name) = adapter {
            options = options.adapter(name);
        }
        if let Some(ttl) = ttl {
            options = options.ttl(seconds("ttl", ttl)?);
        }
        Ok(wait(py, async { engine.sessions().open(options) })?.into())
    }

    /// Opens a session that continues another one, or its first tokens.
    fn fork(
        &self,
        py: Python<'_>,
        from: &str,
        to: Option<String>,
        tokens: Option<usize>,
    ) -> PyResult<Info> {
        let from = SessionId::new(from);
        Ok(wait(py, self.engine.get(py)?.sessions().fork(&from, named(to), tokens))?.into())
    }

    /// Takes a session back to its first tokens.
    fn rewind(&self, py: Python<'_>, name: &str, tokens: usize) -> PyResult<Info> {
        let id = SessionId::new(name);
        Ok(wait(py, self.engine.get(py)?.sessions().rewind(&id, tokens))?.into())
    }

    /// A session as it is now.
    fn info(&self, py: Python<'_>, name: &str) -> PyResult<Info> {
        let engine = self.engine.get(py)?;
        Ok(wait(py, async { engine.sessions().get(&SessionId::new(name)) })?.into())
    }

    /// All open sessions, the one that has been idle longest first.
    fn list(&self, py: Python<'_>) -> PyResult<Vec<Info>> {
        let engine = self.engine.get(py)?;
        Ok(engine.sessions().list().into_iter().map(Info::from).collect())
    }

    /// Closes a session. Returns whether it was open.
    fn close(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        Ok(self.engine.get(py)?.sessions().close(&SessionId::new(name)))
    }
}
