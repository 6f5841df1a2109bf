//! [`Cache`]: access to an engine's prefix cache: queries, warming, pins, eviction, events.

use std::time::Duration;

use stolon_actors::{CacheEvents, Pin, PinOptions};
use stolon_kvcache::{CachedPrefix, EvictionPolicy, ImageSpan, PinId, PrefixMatch, TreeDump};
use stolon_scheduler::{CacheStats, Event, PromptImage, Removal, RequestOptions, SequenceRequest};

use super::Engine;
use crate::{CacheMiss, Error, LoggedMiss, MissCount, Request};

/// The prefix cache of an engine: [`Engine::cache`].
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a>(pub(crate) &'a Engine);

impl Engine {
    /// The prefix cache: queries, pins, and eviction.
    pub fn cache(&self) -> Cache<'_> {
        Cache(self)
    }
}

impl Engine {
    /// Computes the first `len` of `tokens`, which are the prompt of `request`, while no request
    /// waits or runs, as far as they can be cached. The future is ready when that is done, or
    /// another request has ended it, and says which. It does not keep the engine running.
    ///
    /// # Errors
    /// As [`Cache::warm_when_idle`].
    pub(crate) async fn compute_when_idle(
        &self,
        request: Request,
        mut tokens: Vec<u32>,
        len: usize,
    ) -> Result<impl Future<Output = bool> + Send + use<>, Error> {
        let (request, namespace) = self.with_adapter(request).await?;
        let handle = &self.inner.handle;
        let mut end = handle.context().cached_max(len);
        for image in request.placed.iter().rev().map(PromptImage::positions) {
            // No prompt ends inside an image.
            if (image.start + 1..image.end).contains(&end) {
                end = handle.context().cached_max(image.start);
            }
        }
        // A recurrent state has its checkpoint before the last position of a prompt, which is text.
        let last = tokens.last().copied().unwrap_or_default();
        tokens.truncate(end);
        tokens.push(last);
        let is_cached = handle.query_resume(&namespace, &tokens).resume >= end;
        let submitted = if is_cached {
            None
        } else {
            let RequestOptions { priority, tenant, adapter, .. } = request.options;
            let max_tokens = Some(1);
            let options =
                RequestOptions { max_tokens, priority, tenant, adapter, ..Default::default() };
            let images = request.placed.iter().filter(|image| image.positions().end <= end);
            Some(handle.submit_background(SequenceRequest {
                images: images.cloned().collect(),
                namespace,
                options,
                ..SequenceRequest::new(tokens, 1)
            })?)
        };
        Ok(async move {
            let Some(mut events) = submitted else { return true };
            while let Some(event) = events.next().await {
                if let Ok(Event::Finished(_)) = event {
                    return true;
                }
            }
            false
        })
    }
}

impl Cache<'_> {
    /// Computes a prompt, so that later requests that start with it find it in the cache. Returns
    /// its length in tokens. Only full blocks are cached, and they can be evicted like any other.
    ///
    /// # Errors
    /// As [`Engine::generate`], and the error that its stream ends with.
    pub async fn warm(self, request: Request) -> Result<usize, Error> {
        if !self.0.model_info().generates {
            let info = self.0.model_info();
            return match info.scores {
                Some(_) => Ok(self.0.score(request).await?.prompt_tokens),
                None => Ok(self.0.embed(request, None).await?.prompt_tokens),
            };
        }
        let stream = self.0.generate(request.max_tokens(1)).await?;
        let prompt_tokens = stream.prompt_tokens();
        stream.collect_text().await?;
        Ok(prompt_tokens)
    }

    /// As [`Cache::warm`], but only while no request waits or runs, in short steps. If a request
    /// comes, the prompt ends at once, or with the step in flight, and what was computed until then
    /// is cached. Returns whether all of it that can be is cached.
    ///
    /// The work takes no block from a request, a session or a pin, and counts as no request
    /// ([`EngineStats::background_tokens`](crate::EngineStats)). At most 16 such prompts wait: the
    /// one that has waited longest ends for another one.
    ///
    /// # Errors
    /// Every way in which a request can be invalid, also for a model that generates nothing and
    /// without a prefix cache; `Draining`, `Interrupted`, `BackendHung` and `Stopped`.
    pub async fn warm_when_idle(self, request: Request) -> Result<bool, Error> {
        if !self.0.inner.info.generates {
            return Err(self.0.inner.info.not_generating());
        }
        let mut request = self.0.appended(request).await?;
        let tokens = self.0.inner.prompts.take_tokens(&mut request).await?.tokens;
        let len = tokens.len();
        Ok(self.0.compute_when_idle(request, tokens, len).await?.await)
    }

    /// Whether all of a prompt that can be cached is cached, so that [`Cache::warm`] would add
    /// nothing. A hint, as [`Cache::query_match_len`] is.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub fn is_warm(self, request: &Request) -> Result<bool, Error> {
        let (namespace, tokens) = self.0.lookup(request)?;
        let handle = &self.0.inner.handle;
        let resume = handle.query_resume(&namespace, &tokens).resume;
        Ok(resume >= handle.context().resume_max(tokens.len()))
    }

    /// The number of the request's prompt tokens that are in the cache now. Lock-free and without
    /// side effects. The answer is a hint: it may change before a request runs.
    ///
    /// A prompt that is not token ids yet is rendered and tokenized on the calling thread.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub fn query_match_len(self, request: &Request) -> Result<usize, Error> {
        let (namespace, tokens) = self.0.lookup(request)?;
        Ok(self.0.inner.handle.query_match_len(&namespace, &tokens))
    }

    /// As [`Cache::query_match_len`], and how many of these tokens the request would not compute.
    /// These are all of them, unless the model has a recurrent state
    /// ([`ModelInfo::state_bytes`](crate::ModelInfo::state_bytes)): then the request resumes from
    /// the last checkpoint of the state in its prompt.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub fn query_resume(self, request: &Request) -> Result<PrefixMatch, Error> {
        let (namespace, tokens) = self.0.lookup(request)?;
        Ok(self.0.inner.handle.query_resume(&namespace, &tokens))
    }

    /// [`Cache::query_match_len`] of several requests, in their order.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the first prompt that fails.
    pub fn query_match_lens(self, requests: &[Request]) -> Result<Vec<usize>, Error> {
        requests.iter().map(|request| self.query_match_len(request)).collect()
    }

    /// Why a part of the request's prompt is not in the cache: what it has in common with the
    /// earlier request that it is nearest to, and where it goes another way. `None` if all of it is
    /// cached that can be, or if nothing is remembered: for prompts with images, and with
    /// [`history_bytes`](crate::EngineBuilder::history_bytes) of 0. Without side effects. It takes
    /// less than a millisecond, after the prompt has been tokenized.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt.
    pub async fn explain(self, request: &Request) -> Result<Option<CacheMiss>, Error> {
        let namespace = self.0.namespace(request)?;
        let request = self.0.appended(request.clone()).await?;
        let prompt = self.0.inner.prompts.tokens(&request).await?;
        let exchange = self.0.inner.prompts.text.exchange(&request, &prompt);
        Ok(exchange.and_then(|exchange| self.0.miss(&exchange, &namespace, &prompt.tokens, 0)))
    }

    /// The newest requests whose prompts would have been cached further, at most 256, the newest
    /// first.
    pub fn misses(self) -> Vec<LoggedMiss> {
        self.0.inner.misses.newest()
    }

    /// The number of requests and of lost tokens for each reason, since the engine was started.
    pub fn miss_counts(self) -> Vec<MissCount> {
        self.0.inner.misses.counts()
    }

    /// Removes the cached sequences of the request's namespace that start with its prompt, and
    /// those blocks of the prompt that no other cached sequence shares. The prompt is rounded down
    /// to whole blocks. Blocks that running requests, pins and sessions hold stay. Returns the
    /// number of blocks that were freed.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt, `Interrupted` and `Stopped`.
    pub async fn evict_prefix(self, request: &Request) -> Result<usize, Error> {
        let namespace = self.0.namespace(request)?;
        let tokens = self.0.prompt_tokens(request).await?;
        Ok(self.0.inner.handle.evict(Removal::Prefix(namespace, tokens)).await?)
    }

    /// Removes everything that requests with this cache salt (`None`: without one) and without an
    /// adapter have cached, and ends its pins and the holds of its sessions. Blocks that running
    /// requests use are freed when these have ended. Returns the number of blocks that were freed
    /// at once.
    ///
    /// # Errors
    /// `InvalidParameter` if the salt is too long, `Interrupted` and `Stopped`.
    pub async fn evict_salt(self, salt: Option<&str>) -> Result<usize, Error> {
        let request = Request::tokens([]);
        let request = match salt {
            Some(salt) => request.cache_salt(salt),
            None => request,
        };
        Ok(self.0.inner.handle.evict(Removal::Namespace(self.0.namespace(&request)?)).await?)
    }

    /// The image that a position of [`Cache::events`] is part of, for programs that publish them:
    /// positions have numbers that only this process knows. `None` for a position of text, and for
    /// an image that the engine has forgotten, because many others came after it.
    pub fn image_at(self, position: u32) -> Option<ImageSpan> {
        self.0.inner.handle.context().spans().image_at(position)
    }

    /// The eviction policy in use; `None` for a custom order.
    pub fn eviction_policy(self) -> Option<EvictionPolicy> {
        self.0.inner.handle.context().eviction_policy()
    }

    /// Changes the eviction policy, also for KV that is cached already, in the pool and on the
    /// disk. It replaces a custom order.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub fn set_eviction_policy(self, policy: EvictionPolicy) -> Result<(), Error> {
        self.0.inner.handle.set_eviction_policy(policy)?;
        self.0.inner.tiers.set_eviction_policy(policy);
        Ok(())
    }

    /// Protects the cached prefix of the request's prompt from eviction, for `ttl` or until
    /// [`Cache::unpin`]. [`Cache::warm`] computes it first. A flush, a step that fails and a
    /// restart of the engine end all pins, since nothing stays cached. Whole blocks are protected,
    /// so a prompt that is shorter than
    /// [`EngineBuilder::block_size`](crate::EngineBuilder::block_size) cannot be pinned.
    ///
    /// With a disk tier, the pin takes no blocks from running requests: its prefix is stored on the
    /// disk, evicted from the KV cache after everything else, and removed from the disk after
    /// everything else. Tokens after the last whole record of 64 tokens are not stored.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt, `Pin` if nothing of it is cached or
    /// [`EngineBuilder::pin_budget`](crate::EngineBuilder::pin_budget) would be exceeded,
    /// `PinBudgetInUse` while a prompt runs that is so long that it needs the blocks of the budget,
    /// `Interrupted` and `Stopped`.
    pub async fn pin(self, request: &Request, ttl: Option<Duration>) -> Result<PinId, Error> {
        self.pin_with(request, PinOptions { ttl, ..PinOptions::default() }).await
    }

    /// As [`Cache::pin`], with all options.
    ///
    /// # Errors
    /// As [`Cache::pin`].
    pub async fn pin_with(self, request: &Request, options: PinOptions) -> Result<PinId, Error> {
        let tokens = self.0.prompt_tokens(request).await?;
        let namespace = self.0.namespace(request)?;
        Ok(self.0.inner.handle.pin(namespace, tokens, options).await?)
    }

    /// Ends a pin. Returns whether it existed.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub async fn unpin(self, id: PinId) -> Result<bool, Error> {
        Ok(self.0.inner.handle.unpin(id).await?)
    }

    /// Ends all pins of this prompt, rounded down to whole blocks. Returns how many there were.
    ///
    /// # Errors
    /// The errors of rendering and tokenizing the prompt, `Interrupted` and `Stopped`.
    pub async fn unpin_prompt(self, request: &Request) -> Result<usize, Error> {
        let namespace = self.0.namespace(request)?;
        let tokens = self.0.prompt_tokens(request).await?;
        let block_size = self.0.model_info().block_size;
        let pinned = &tokens[..tokens.len() / block_size * block_size];
        let mut ended = 0;
        for pin in self.pins().await? {
            let is_of_prompt = pin.namespace == namespace && *pin.token_ids == *pinned;
            ended += usize::from(is_of_prompt && self.unpin(pin.id).await?);
        }
        Ok(ended)
    }

    /// All pins, oldest first.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub async fn pins(self) -> Result<Vec<Pin>, Error> {
        Ok(self.0.inner.handle.pins().await?)
    }

    /// The content of the cache, and every change from now on, in a queue of at most `capacity`
    /// events. The engine never waits for the reader.
    ///
    /// # Errors
    /// `InvalidParameter` if `capacity` is 0, `Interrupted` and `Stopped`.
    pub async fn events(self, capacity: usize) -> Result<CacheEvents, Error> {
        Ok(self.0.inner.handle.events(capacity).await?)
    }

    /// Statistics of the prefix cache.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub async fn stats(self) -> Result<CacheStats, Error> {
        Ok(self.0.inner.handle.cache_stats().await?)
    }

    /// A copy of the prefix tree's structure, made concurrently with the running engine. Time and
    /// memory are proportional to the number of nodes. [`TreeDump::to_graphviz`] draws it.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub fn dump(self) -> Result<TreeDump, Error> {
        Ok(self.0.inner.handle.dump()?)
    }

    /// The cached prefix that ends with the block of this chained hash, a
    /// [`NodeDump::last_hash`](crate::NodeDump) for example; `None` if it is not cached. Made
    /// concurrently with the running engine. The time is proportional to the number of cached
    /// blocks.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub fn cached_prefix(self, hash: u64) -> Result<Option<CachedPrefix>, Error> {
        Ok(self.0.inner.handle.cached_prefix(hash)?)
    }

    /// Empties the prefix cache, except for what running requests use, and ends all pins and the
    /// holds of all sessions. KV that is stored in tiers stays.
    ///
    /// # Errors
    /// `Interrupted` and `Stopped`.
    pub async fn flush(self) -> Result<(), Error> {
        Ok(self.0.inner.handle.flush().await?)
    }
}
