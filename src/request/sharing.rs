//! How a request takes part in the prefix cache: its cache salt, its session, and whether it reads
//! and writes the cache.

use super::Request;
use crate::{Error, Namespace, SessionId};

impl Request {
    /// Maximum length of [`Request::cache_salt`], in bytes.
    pub const MAX_CACHE_SALT_BYTES: usize = 1024;

    /// Shares cached prefixes only with requests of the same salt, so that tenants cannot probe
    /// each other's prompts by timing. At most [`Request::MAX_CACHE_SALT_BYTES`].
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Request {
        self.cache_salt = Some(salt.into());
        self
    }

    /// Computes the request with the LoRA adapter that is loaded under this name
    /// ([`Engine::load_adapter`](crate::Engine::load_adapter)). Cached prefixes are shared only
    /// with requests of the same adapter. Default: the model itself.
    pub fn adapter(mut self, name: impl Into<String>) -> Request {
        self.adapter = Some(name.into());
        self
    }

    /// Makes the request a turn of an open session ([`Sessions::open`](crate::Sessions::open)): its
    /// cached prompt and answer are then kept from being evicted until the session's next turn. The
    /// cache salt and the adapter must be the session's. A session changes how much is computed,
    /// never the answer.
    ///
    /// A session has one turn at a time; others fail with
    /// [`SessionError::Busy`](crate::SessionError::Busy). A turn that is canceled or fails leaves
    /// the session as it was. If it was complete but its stream ended at a stop string, the
    /// session has its tokens up to that string.
    pub fn session(mut self, id: impl Into<SessionId>) -> Request {
        self.session = Some(id.into());
        self
    }

    /// Makes the prompt the continuation of its session: it follows the tokens of the session's
    /// last turn, prompt and answer, which do not have to be sent again. Text is tokenized
    /// separately, with the special tokens that begin a text only if the session has no tokens yet.
    /// Images take their places in that text, as in any other ([`Request::image`]). Not for
    /// conversations of messages.
    ///
    /// A session remembers the images of its turns. The pixels that all sessions keep are bounded
    /// (256 MiB); pixels of the session that was idle longest are forgotten first. Its turns
    /// continue to work as long as the KV of its images is cached or stored. If it is not, the turn
    /// fails with [`EngineError::StepFailed`](crate::EngineError::StepFailed), which says so: send
    /// the whole prompt with its images.
    ///
    /// If the session's tokens change before the turn begins, it fails with
    /// [`SessionError::Busy`](crate::SessionError::Busy). Functions that look at a prompt without
    /// running it, such as [`Cache::query_match_len`](crate::Cache::query_match_len), look at
    /// this prompt alone; give them what [`Engine::tokenized`](crate::Engine::tokenized) returns.
    pub fn append(mut self) -> Request {
        self.append = true;
        self
    }

    /// The value of [`Request::session`]; `None` if it was not called.
    pub fn get_session(&self) -> Option<&SessionId> {
        self.session.as_ref()
    }

    /// The namespace of its cached prefixes. `generation` is the generation of its adapter, and
    /// `key` the engine's key of namespaces, if it has one.
    ///
    /// # Errors
    /// `InvalidParameter` if the cache salt is too long.
    pub(crate) fn namespace(
        &self,
        generation: Option<u64>,
        key: Option<[u8; 32]>,
    ) -> Result<Namespace, Error> {
        let salt = self.cache_salt.as_deref();
        if salt.is_some_and(|salt| salt.len() > Request::MAX_CACHE_SALT_BYTES) {
            let expected = format!("at most {} bytes", Request::MAX_CACHE_SALT_BYTES);
            let got = format!("{} bytes", salt.map_or(0, str::len));
            return Err(Error::invalid("cache_salt", expected, got));
        }
        let mut builder = Namespace::builder();
        if let Some(salt) = salt {
            builder = builder.salt(salt);
        }
        if let (Some(name), Some(generation)) = (&self.adapter, generation) {
            builder = builder.adapter(name, generation);
        }
        Ok(key.into_iter().fold(builder, |builder, key| builder.key(key)).build())
    }

    /// Computes the whole prompt if `skip` is true, including tokens that are cached. Default: cached
    /// tokens are not computed again. The answer is the same.
    pub fn skip_reading_prefix_cache(mut self, skip: bool) -> Request {
        self.options.skip_reading_prefix_cache = skip;
        self
    }

    /// Adds no part of the prompt and the answer to the prefix cache, the disk or the object store if
    /// `skip` is true, and shares none with other requests that run at the same time. Tokens that
    /// are cached already are used, and stay cached. Default: everything is cached. Not for the turn
    /// of a session.
    pub fn skip_writing_prefix_cache(mut self, skip: bool) -> Request {
        self.options.skip_writing_prefix_cache = skip;
        self
    }
}
