//! The methods of callers for the prefix cache: queries, pins, eviction, events, and the holds of
//! sessions.

use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use stolon_kvcache::{
    BlockHasher, CachedPrefix, EvictionPolicy, Namespace, PinId, PrefixMatch, TreeDump,
};
use stolon_scheduler::{
    CacheStats, EngineError, PrefixMark, Removal, SessionId, SessionInfo, SessionPrefix,
};

use super::EngineHandle;
use crate::admission::AdmissionMessage;
use crate::block_allocator::AllocatorMessage;
use crate::cache::{CacheEvents, Pin, PinOptions};
use crate::memory::{BLOCK_ALLOCATOR, call};
use crate::prefix_tree::{PinMessage, TreeMessage};
use crate::supervisor::Generation;

impl EngineHandle {
    /// The number of leading tokens that are cached now. Lock-free and without side effects. The
    /// answer is a hint: it may change before a request runs.
    pub fn query_match_len(&self, namespace: &Namespace, tokens: &[u32]) -> usize {
        self.query_resume(namespace, tokens).cached
    }

    /// As [`EngineHandle::query_match_len`], and how many of these tokens do not have to be
    /// computed: all, unless the model has a recurrent state.
    pub fn query_resume(&self, namespace: &Namespace, tokens: &[u32]) -> PrefixMatch {
        let generation = self.common().generation.load();
        let query =
            |generation: &Arc<Generation>| generation.reader.query_resume(namespace, tokens);
        generation.as_ref().map_or(PrefixMatch::default(), query)
    }

    /// Protects the cached prefix of the tokens from eviction, for its time to live or until
    /// [`unpin`](EngineHandle::unpin). A flush, a failed step or a restart ends all pins. If the
    /// [`EngineConfig::kv_sink`](stolon_scheduler::EngineConfig::kv_sink) stores pins, the prefix is
    /// stored, and is evicted only if nothing else can be.
    ///
    /// # Errors
    /// [`EngineError::Pin`] if nothing of it is cached or
    /// [`EngineConfig::pin_budget`](stolon_scheduler::EngineConfig::pin_budget) would be exceeded,
    /// [`EngineError::PinBudgetInUse`], [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn pin(
        &self,
        namespace: Namespace,
        tokens: Vec<u32>,
        options: PinOptions,
    ) -> BoxFuture<'_, Result<PinId, EngineError>> {
        async move {
            let begin = |reply| PinMessage::Begin { namespace, tokens, options, reply };
            let pin = self.call_tree(|reply| TreeMessage::Pin(begin(reply))).await??;
            if let Ok(generation) = self.common().current() {
                for save in pin.saves {
                    // If the generation has just ended, the request is dropped here.
                    let _ = generation.admission.cast(AdmissionMessage::Save(Box::new(save)));
                }
            }
            Ok(pin.id)
        }
        .boxed()
    }

    /// Lets the cached prefix of marked tokens be evicted after everything that is neither marked nor
    /// pinned, for the times to live of the `marks` after its last use. It takes no block from
    /// anybody and does not fail: what exceeds the budget is not protected. Does not wait.
    pub fn mark(
        &self,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        marks: Arc<[PrefixMark]>,
        tenant: Option<Arc<str>>,
    ) {
        if let Ok(generation) = self.common().current() {
            let mark = PinMessage::Mark { namespace, tokens, marks, tenant };
            // If the generation has just ended, nothing is cached anymore.
            let _ = generation.tree.cast(TreeMessage::Pin(mark));
        }
    }

    /// Removes part of the cache, except for what running requests use. Returns the number of
    /// blocks that were freed.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn evict(&self, removal: Removal) -> BoxFuture<'_, Result<usize, EngineError>> {
        async move {
            let generation = self.common().current()?;
            let namespace = match &removal {
                Removal::Namespace(namespace) => Some(*namespace),
                Removal::Prefix(..) => None,
            };
            let release = || {
                namespace.inspect(|namespace| self.context().sessions.release_namespace(namespace));
            };
            release();
            let remove = |reply| AllocatorMessage::Remove(removal, reply);
            let answer = call(&generation.allocator, remove, BLOCK_ALLOCATOR).await;
            // A turn that began in between may have locked blocks that are no longer in the tree.
            release();
            self.or_end(answer, &generation).await
        }
        .boxed()
    }

    /// Changes the eviction policy, also for blocks that are cached already. It replaces a custom
    /// order.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn set_eviction_policy(&self, policy: EvictionPolicy) -> Result<(), EngineError> {
        // A generation that starts from now on has the policy from its beginning.
        self.context().set_eviction_policy(policy);
        let generation = self.common().current()?;
        // Fails only if the generation has just ended.
        let _ = generation.tree.cast(TreeMessage::SetEvictionPolicy(policy));
        Ok(())
    }

    /// Ends a pin. Returns whether it existed.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn unpin(&self, id: PinId) -> BoxFuture<'_, Result<bool, EngineError>> {
        async move { self.call_tree(|reply| TreeMessage::Pin(PinMessage::End(id, reply))).await }
            .boxed()
    }

    /// All pins, oldest first.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn pins(&self) -> BoxFuture<'_, Result<Vec<Pin>, EngineError>> {
        async move { self.call_tree(|reply| TreeMessage::Pin(PinMessage::List(reply))).await }
            .boxed()
    }

    /// The content of the cache, and every change from now on, in a queue of at most `capacity`
    /// events. The engine never waits for the reader.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] if `capacity` is 0, [`EngineError::Interrupted`],
    /// [`EngineError::Stopped`].
    pub fn events(&self, capacity: usize) -> BoxFuture<'_, Result<CacheEvents, EngineError>> {
        async move {
            let events = self.call_tree(|reply| TreeMessage::Subscribe(capacity, reply)).await?;
            events.map_err(|_| EngineError::invalid("capacity", "at least 1 event", capacity))
        }
        .boxed()
    }

    /// Computes the hashes that [`EngineHandle::events`] has.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn block_hasher(&self) -> Result<BlockHasher, EngineError> {
        Ok(self.common().current()?.reader.block_hasher())
    }

    /// Statistics of the prefix cache.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn cache_stats(&self) -> BoxFuture<'_, Result<CacheStats, EngineError>> {
        async move { self.call_tree(TreeMessage::Stats).await }.boxed()
    }

    /// A copy of the tree's structure, made by a reader concurrently with changes.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn dump(&self) -> Result<TreeDump, EngineError> {
        Ok(self.common().current()?.reader.dump())
    }

    /// The cached prefix that ends with the block of this chained hash, if there is one. Found by a
    /// reader concurrently with changes.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn cached_prefix(&self, hash: u64) -> Result<Option<CachedPrefix>, EngineError> {
        Ok(self.common().current()?.reader.cached_prefix(hash))
    }

    /// Empties the cache, except for what running requests use, and ends all pins.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn flush(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        async move { self.call_admission(AdmissionMessage::Flush).await }.boxed()
    }

    /// Opens a session `to` that continues after all tokens of `from` or, with `tokens`, after that
    /// many of its first tokens.
    ///
    /// # Errors
    /// As [`Sessions::fork`](stolon_scheduler::Sessions::fork).
    pub fn fork_session(
        &self,
        from: &SessionId,
        to: SessionId,
        tokens: Option<usize>,
    ) -> BoxFuture<'_, Result<SessionInfo, EngineError>> {
        let prefix = self.context().sessions.fork(from, to, tokens, Instant::now());
        async move { self.hold(prefix?).await }.boxed()
    }

    /// Takes a session back to its first `tokens` tokens.
    ///
    /// # Errors
    /// As [`Sessions::rewind`](stolon_scheduler::Sessions::rewind).
    pub fn rewind_session(
        &self,
        id: &SessionId,
        tokens: usize,
    ) -> BoxFuture<'_, Result<SessionInfo, EngineError>> {
        let prefix = self.context().sessions.rewind(id, tokens, Instant::now());
        async move { self.hold(prefix?).await }.boxed()
    }

    /// Lets a session hold the cached prefix of its tokens. While the engine restarts, nothing is
    /// cached.
    async fn hold(&self, prefix: SessionPrefix) -> Result<SessionInfo, EngineError> {
        let (namespace, tokens) = (prefix.namespace, Arc::clone(&prefix.tokens));
        let (limit, priority) = (tokens.len(), None);
        let acquire = |reply| TreeMessage::Acquire { namespace, tokens, limit, priority, reply };
        if let Ok(acquired) = self.call_tree(acquire).await {
            self.context().sessions.hold(&prefix, acquired);
        }
        Ok(self.context().sessions.info(&prefix.id, Instant::now())?)
    }
}
