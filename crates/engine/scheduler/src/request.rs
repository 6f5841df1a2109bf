//! What a caller asks the engine to compute.

use std::sync::Arc;
use std::time::Duration;

use stolon_backend::{Adapter, Pooling, SamplingParams};
use stolon_kvcache::Namespace;

use crate::images::PromptImage;
use crate::marks::PrefixMark;
use crate::quota::Quota;
use crate::session::{SessionContent, Turn};
use crate::token_set::TokenSet;
use crate::transfer::StoredKv;

/// The options of a request that do not depend on how its prompt was given. Clones share all lists.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    /// How tokens are sampled, and which log-probabilities are reported.
    pub sampling: SamplingParams,
    /// Maximum number of tokens to generate, at least 1. `None` for
    /// [`EngineConfig::default_max_tokens`](crate::EngineConfig::default_max_tokens). Fewer tokens
    /// are generated if the context length or the KV pool is exhausted first (finish reason
    /// `length`).
    pub max_tokens: Option<usize>,
    /// Token ids that end the generation, in addition to the end-of-sequence ids: at most
    /// [`RequestOptions::MAX_STOP_IDS`], each below the vocabulary size.
    pub stop_ids: TokenSet,
    /// Report the log-probability of each prompt token and of this many most likely alternatives,
    /// at most the vocabulary size and [`RequestOptions::MAX_PROMPT_LOGPROBS`].
    /// Such a request computes its whole prompt, because cached positions have no logits.
    pub prompt_logprobs: Option<usize>,
    /// Compute an embedding of the prompt and generate nothing: the stream then has
    /// [`Event::Embedding`](crate::Event::Embedding) in place of tokens. Options of the generation
    /// have no effect. The backend must return hidden states.
    pub pooling: Option<Pooling>,
    /// Generate coordinates and sizes, too, which the sampling's processor chooses
    /// ([`LogitsProcessor::replace`](stolon_backend::LogitsProcessor::replace)). The backend must
    /// have bins for them. Not with `prompt_logprobs`.
    pub regions: bool,
    /// Compute the whole prompt, including tokens that are cached.
    pub skip_reading_prefix_cache: bool,
    /// Add no part of the prompt and the answer to the prefix cache, or to a tier. Tokens that are
    /// cached already are used, and stay cached. Not for the turn of a session.
    pub skip_writing_prefix_cache: bool,
    /// What the caller expects the answer to be, as token ids, each below the vocabulary size; empty
    /// for no expectation. Parts of it are proposed where the answer may go on with them, so a right
    /// expectation makes the answer faster. It never changes the answer.
    pub prediction: Arc<[u32]>,
    /// The parts of the prompt that are expected to be used again. If the model has a recurrent
    /// state, there is a checkpoint at the end of each.
    pub marks: Arc<[PrefixMark]>,
    /// Requests with a larger value are admitted earlier, under every admission policy.
    pub priority: i32,
    /// Name of the client that the request is for, if several share an engine. Requests with the
    /// same name are of one tenant. It does not affect what is shared in the cache; the request's
    /// namespace does. `None` for the tenant without a name.
    pub tenant: Option<Arc<str>>,
    /// Limits the tokens of all requests with the same quota; `None` for no limit.
    pub quota: Option<Quota>,
    /// The adapter that computes the request; `None` for the model itself. The namespace of the
    /// request must belong to it alone, because its KV is of no use to others.
    pub adapter: Option<Adapter>,
    /// Maximum time in the admission queue.
    pub queue_timeout: Option<Duration>,
    /// Maximum time from submission to the last token.
    pub timeout: Option<Duration>,
}

impl RequestOptions {
    /// Maximum number of different stop ids.
    pub const MAX_STOP_IDS: usize = 4096;

    /// Maximum value of [`RequestOptions::prompt_logprobs`].
    pub const MAX_PROMPT_LOGPROBS: usize = 128;

    /// Whether every position of the prompt is computed, even if it is cached: because the
    /// backend's output is needed for all of them, or because the request says so.
    pub fn needs_whole_prompt(&self) -> bool {
        self.skip_reading_prefix_cache
            || self.prompt_logprobs.is_some()
            || self.pooling.is_some_and(|pooling| pooling != Pooling::Last)
    }
}

/// A token sequence to continue.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// The prompt: at least one token id, each below the vocabulary size. Shared, so that several
    /// requests for the same prompt hold it once. The positions of images are as
    /// [`EngineContext::append_image`](crate::EngineContext::append_image) writes them.
    pub tokens: Arc<Vec<u32>>,
    /// The images of the prompt, in order of position. The prompt ends with a token.
    pub images: Arc<[PromptImage]>,
    /// Cached positions are shared only between requests of the same namespace.
    pub namespace: Namespace,
    /// End-of-sequence token ids: each of them ends the generation.
    pub eos_ids: TokenSet,
    /// KV of the prompt from outside of the pool. It is copied into the pool instead of being
    /// computed, where it continues the cached prefix.
    pub stored: Option<StoredKv>,
    /// The turn of a session, if the request is one.
    pub turn: Option<Arc<Turn>>,
    /// Everything else.
    pub options: RequestOptions,
}

impl SequenceRequest {
    /// A greedy continuation of `tokens` by at most `max_tokens` tokens, without
    /// end-of-sequence ids, in the default namespace.
    pub fn new(tokens: Vec<u32>, max_tokens: usize) -> SequenceRequest {
        SequenceRequest {
            tokens: Arc::new(tokens),
            images: Arc::default(),
            namespace: Namespace::default(),
            eos_ids: TokenSet::default(),
            stored: None,
            turn: None,
            options: RequestOptions { max_tokens: Some(max_tokens), ..RequestOptions::default() },
        }
    }

    /// Its prompt with the images.
    #[must_use]
    pub fn content(&self) -> SessionContent {
        SessionContent { tokens: Arc::clone(&self.tokens), images: Arc::clone(&self.images) }
    }
}
