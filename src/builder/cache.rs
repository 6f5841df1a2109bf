//! Settings of the KV cache, and of pins, quotas, sessions and other caches.

use std::time::Duration;

use stolon_checkpoint::{KvType, WindowKv};
use stolon_kvcache::EvictionOrder;
use stolon_scheduler::EvictionOrderFactory;

use crate::{EngineBuilder, EvictionPolicy};

impl EngineBuilder {
    /// Size of the KV cache in bytes. Default: half of the memory that is free after the model is
    /// loaded, at most 8 GiB ([`KvBudget::Auto`](crate::KvBudget::Auto)). It includes the KV of a
    /// [`draft_model`](Self::draft_model).
    ///
    /// The memory is reserved at startup and becomes resident when blocks are first written.
    /// [`build`](Self::build) fails with [`Error::Load`](crate::Error::Load) if the size is less
    /// than one block.
    pub fn kv_memory(mut self, bytes: u64) -> Self {
        self.kv_memory = Some(bytes);
        self
    }

    /// Size of the KV cache in blocks, at least 1. Takes precedence over
    /// [`kv_memory`](Self::kv_memory). Default: derived from `kv_memory`.
    pub fn num_blocks(mut self, count: usize) -> Self {
        self.num_blocks = Some(count);
        self
    }

    /// Number of positions per KV block: a power of two from 1 to 256. Default: 16;
    /// 1 for a model that takes images, because no match ends inside an image.
    ///
    /// Prefixes are shared and pinned in whole blocks: a prefix that is shorter than a block is
    /// neither. Smaller blocks match longer prefixes, and are slower: keys are stored transposed in
    /// groups of 16 positions only if a block has room for a group. The figures are in
    /// `benches/history/diary.md`.
    pub fn block_size(mut self, positions: usize) -> Self {
        self.block_size = Some(positions);
        self
    }

    /// Type of the KV cache. Default: f32 for a model with f32 weights, bf16 for all others. With
    /// fewer bits, more prefixes are cached in the same memory, and the results change: see the
    /// types. Answers depend on the type, and on nothing else of the cache.
    pub fn kv_type(mut self, kv_type: KvType) -> Self {
        self.kv_type = Some(kv_type);
        self
    }

    /// Where layers with a sliding window keep their keys and values. Default:
    /// [`WindowKv::Blocks`]. Answers do not depend on it.
    ///
    /// With [`WindowKv::States`], these layers keep what the window needs and no more, so contexts
    /// much longer than the window take less memory. A prefix can then be used again only from where
    /// a checkpoint was kept, as with models that have a recurrent state, and a checkpoint takes as
    /// much memory as a whole window: for short conversations, [`WindowKv::Blocks`] takes less.
    /// `WritePolicy::WriteBack` is refused, as for models with a recurrent state. Without layers that
    /// have a window, or without others, it has no effect. On a GPU, [`build`](Self::build) refuses
    /// it.
    pub fn window_kv(mut self, place: WindowKv) -> Self {
        self.window_kv = Some(place);
        self
    }

    /// Whether the KV of computed prompts and answers is cached for later requests that start with
    /// the same tokens. Default: true.
    pub fn prefix_caching(mut self, on: bool) -> Self {
        self.config.prefix_caching = on;
        self
    }

    /// Which cached blocks are evicted first when the KV cache is full, and which records of the
    /// disk tier are removed first when the tier is full. Default: [`EvictionPolicy::Lru`], or
    /// [`EvictionPolicy::CostAware`] for the KV cache of a model with a recurrent state.
    pub fn eviction_policy(mut self, policy: EvictionPolicy) -> Self {
        self.config.eviction_policy = Some(policy);
        self
    }

    /// A custom eviction order, used instead of a built-in [`EvictionPolicy`]. Default: none.
    ///
    /// `make` is called at startup and after each restart of the engine, because a restarted engine
    /// has a new, empty cache, and once for the disk tier if there is one. The order's methods run
    /// while the engine changes the prefix tree. They should return quickly and must not panic.
    ///
    /// ```
    /// use stolon::{Engine, EvictionCandidate, EvictionOrder, EvictionRank};
    ///
    /// /// Evicts the leaf with the longest prefix first, then the least recently used.
    /// #[derive(Debug)]
    /// struct LongestPrefixFirst;
    ///
    /// impl EvictionOrder for LongestPrefixFirst {
    ///     fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
    ///         let blocks = (leaf.start_block + leaf.block_count) as u64;
    ///         EvictionRank(u64::MAX - blocks, leaf.last_use)
    ///     }
    /// }
    ///
    /// let builder = Engine::builder().eviction_order(|| Box::new(LongestPrefixFirst));
    /// # drop(builder);
    /// ```
    pub fn eviction_order(
        mut self,
        make: impl Fn() -> Box<dyn EvictionOrder> + Send + Sync + 'static,
    ) -> Self {
        self.config.eviction_order = Some(EvictionOrderFactory::new(make));
        self
    }

    /// Maximum number of KV blocks that pinned prefixes ([`Cache::pin`](crate::Cache::pin)) may
    /// occupy; less than the number of blocks. Default: a quarter of the blocks, or less where a
    /// request of the context length would not fit next to the budget. With 0, nothing can be
    /// pinned.
    ///
    /// Pinned blocks are not available to running requests, so that every admitted request can
    /// complete. A prompt that needs more blocks than the budget leaves may use the part of the
    /// budget in which nothing is pinned, and nothing can be pinned until its request has ended.
    ///
    /// With a disk tier (`kv_cache_dir`), all blocks are available to requests, and the default is
    /// a quarter of the blocks. Pinned prefixes are stored on the disk, and evicted from the KV
    /// cache after everything else.
    ///
    /// It is also the maximum number of blocks that marks ([`Request::marks`](crate::Request::marks))
    /// protect, next to those of pins; by default a quarter of the blocks. These blocks are available
    /// to requests.
    pub fn pin_budget(mut self, blocks: usize) -> Self {
        self.config.pin_budget = Some(blocks);
        self
    }

    /// Number of KV blocks that the prompts and answers of each cache salt
    /// ([`Request::cache_salt`](crate::Request::cache_salt)) may keep in the prefix cache, at most
    /// the number of blocks. Default: no limit. Requests without a salt have none either.
    ///
    /// If each client has its own salt, a client with too many cached blocks loses blocks that it
    /// has cached itself, and other clients lose none. A client that uses several salts has a quota
    /// for each of them. With 0, nothing is kept that is not in use. Blocks that running requests,
    /// pins and sessions hold count, but they are not evicted, so a salt exceeds its quota by these
    /// alone, until they are released.
    ///
    /// Blocks that are evicted for a quota are not written to the disk tier under
    /// `WritePolicy::WriteBack`.
    pub fn namespace_quota(mut self, blocks: usize) -> Self {
        self.config.namespace_quota = Some(blocks);
        self
    }

    /// Maximum number of KV blocks that sessions ([`Sessions::open`](crate::Sessions::open)) keep
    /// from being evicted between their turns. Default: half of the blocks. With 0, sessions hold
    /// nothing.
    ///
    /// If the budget is used up, the blocks of the session that has been idle longest are released;
    /// it stays open. A running request that has no other block takes those of sessions in the same
    /// order, so sessions never make a request fail.
    pub fn session_budget(mut self, blocks: usize) -> Self {
        self.config.session_budget = Some(blocks);
        self
    }

    /// Maximum number of open sessions, from 1 to 65,536. Default: 1024. If one more is opened, the
    /// owner with the most sessions loses the one that has been idle longest. The token ids of all
    /// sessions are kept in memory, 4 bytes per token.
    pub fn max_sessions(mut self, sessions: usize) -> Self {
        self.config.max_sessions = sessions;
        self
    }

    /// Time without a turn after which a session is closed, unless
    /// [`SessionOptions::ttl`](crate::SessionOptions::ttl) sets another one; at most 24 hours.
    /// Default: 30 minutes.
    pub fn session_ttl(mut self, ttl: Duration) -> Self {
        self.config.session_ttl = ttl;
        self
    }

    /// Memory in bytes for the requests and answers of conversations, so that the next turn of a
    /// conversation is made of the tokens that were sampled and not of those that its text is
    /// tokenized to, which may differ. Default: 32 MiB, for a few million tokens. 0 tokenizes all
    /// text.
    ///
    /// A message of the assistant that repeats an answer, with the reasoning or without it, and with
    /// the arguments of calls as the same JSON, stands for the tokens of that answer. Reasoning that
    /// was left out is given back to the chat template, which decides whether to show it. So what
    /// follows an answer extends its cached prefix. Only requests of the same
    /// [`tenant`](crate::Request::tenant), cache salt and adapter are looked at, and only
    /// conversations without images. [`Engine::tokenized`](crate::Engine::tokenized) returns the
    /// tokens of a prompt, and the answer is that of an engine without a cache for these tokens.
    pub fn history_bytes(mut self, bytes: usize) -> Self {
        self.history_bytes = Some(bytes);
        self
    }

    /// Whether the engine computes what the next turn of a conversation begins with, as soon as an
    /// answer has ended and no request waits or runs: the end of the answer, the text that the chat
    /// template puts after it, and, where the template strips the reasoning of earlier answers, the
    /// conversation without it. Default: `false`.
    ///
    /// The next turn then computes only its new text. A request that comes meanwhile waits for at
    /// most one step of 16 tokens. The work counts apart from that of requests
    /// ([`EngineStats::background_tokens`](crate::EngineStats)), and is lost if the conversation
    /// ends or goes on otherwise. It changes no answer. It needs a history
    /// ([`history_bytes`](EngineBuilder::history_bytes)), and is not done for conversations with
    /// images and for several answers to one prompt. [`Cache::warm_when_idle`] computes any other
    /// prompt in the same way.
    ///
    /// [`Cache::warm_when_idle`]: crate::Cache::warm_when_idle
    pub fn next_turn_prefill(mut self, prefill: bool) -> Self {
        self.next_turn_prefill = prefill;
        self
    }

    /// Memory in bytes for cached logits of the last position of prompts. Default: 32 MiB. 0
    /// disables it.
    ///
    /// With its logits cached, a repeated prompt needs no forward pass for its first token.
    pub fn logit_cache_bytes(mut self, bytes: usize) -> Self {
        self.config.logit_cache_bytes = bytes;
        self
    }

    /// Maximum size in bytes of the embeddings of images that are kept after their use, so that the
    /// same image behind another prompt is not encoded again. Default: 64 MiB. 0 disables it.
    ///
    /// An image of 64 positions of a model with rows of 2,048 values takes 512 KiB. Images whose KV
    /// is in the prefix cache need no embeddings.
    pub fn encoder_cache_bytes(mut self, bytes: usize) -> Self {
        self.config.encoder_cache_bytes = bytes;
        self
    }

    /// Sets the secret key by which cache salts become namespaces. Programs that share stored KV
    /// through an object store, or that exchange cache events, need the same key to find each
    /// other's KV of requests with a salt. Default: the key that is stored in the directory of
    /// `kv_cache_dir`; without a directory, a random key of this process. A program that knows the
    /// key can find a short salt by trying all.
    pub fn namespace_key(mut self, key: [u8; 32]) -> Self {
        self.namespace_key = Some(key);
        self
    }
}
