//! The settings of a router, and the state that its handlers share.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::extract::FromRef;
use axum::http::HeaderValue;
use stolon::{
    AuditReport, ChatOptions, Engine, FormatChoice, ReasoningFormat, ToolCallFormat, TreeDump,
};
use tokio::sync::Semaphore;

use crate::api::options::MAX_CHOICES;
use crate::guard::access::Access;
use crate::handlers::cache_events::EventStreams;
use crate::handlers::cache_files::PrefixFiles;
use crate::handlers::metrics::{CounterSource, EngineMetrics};
use crate::handlers::priority::PriorityOrder;
use crate::handlers::responses::ResponseStore;
use crate::wire::advice::UnknownParameters;
use crate::wire::body::Parser;
use crate::wire::error::ApiError;
use crate::wire::flight::SingleFlight;
use crate::wire::receive::BodyLimits;
use crate::wire::reply::UsageSum;
use crate::wire::root_path::RootPath;
use crate::wire::unix_seconds;

/// Default limit of a body, in bytes per token of the context. A token is a few bytes of text; JSON
/// escapes and batches of prompts take more.
const BODY_BYTES_PER_TOKEN: usize = 256;
/// Smallest and largest default limit of bodies, in bytes. The largest is for models that take
/// images, whose size does not follow from the context.
pub(crate) const BODY_LIMITS: (usize, usize) = (1 << 20, 16 << 20);
/// Maximum number of JSON values in a body: this, and [`VALUES_PER_TOKEN`] per token of the
/// context.
const BASE_VALUES: usize = 1 << 16;
const VALUES_PER_TOKEN: usize = 8;

/// The name of a model that stands for every name.
const ANY_NAME: &str = "*";

/// Settings of a [`router`](crate::router).
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Names of the model for clients, which replace its id. The first one is that of replies and
    /// metrics. If there are none, clients use the id. A client that sends another name is answered
    /// if there is at most one name and no adapter, or if one of the names is `*`, which is not
    /// listed.
    pub served_names: Vec<String>,
    /// A further name that is accepted but not listed, such as the argument with which the operator
    /// chose the model. It has no effect if there are `served_names`.
    pub alias: Option<String>,
    /// The rules of access.
    pub access: Access,
    /// Maximum size of a request body, in bytes. Default: 256 per token of the context, from 1 MiB
    /// to 16 MiB, and 16 MiB for models that take images.
    pub body_limit: Option<usize>,
    /// Maximum time from the end of a request's headers to the end of its body.
    pub body_timeout: Duration,
    /// Maximum size of all bodies that are being received or parsed, or whose prompts and images
    /// wait to be tokenized and decoded, in bytes. The first 64 KiB of each body do not count, nor
    /// do the second copies of the few bodies that are being parsed at a time.
    pub body_memory: usize,
    /// Maximum time for an answer; `None` for no limit.
    pub request_timeout: Option<Duration>,
    /// Maximum number of tokens of an answer if the request sets none. Default: 16 for completions,
    /// as in OpenAI's API, and for chat as many as the context and the KV pool allow.
    pub default_max_tokens: Option<usize>,
    /// Maximum number of answers of one call, prompts times `n` or `best_of`, at most 128. It
    /// should not exceed the size of the engine's queue, because a call that does not fit in the
    /// queue is never accepted.
    pub max_answers: usize,
    /// How unknown parameters are treated. Default: the request is refused.
    pub unknown_parameters: UnknownParameters,
    /// Whether special tokens that are spelled out in chat messages act as control tokens. By
    /// default they are ordinary text.
    pub special_tokens_in_messages: bool,
    /// The format in which the model calls tools. Default: the one of its chat template.
    pub tool_calls: FormatChoice<ToolCallFormat>,
    /// The tags around the model's reasoning. Default: those of its chat template.
    pub reasoning: FormatChoice<ReasoningFormat>,
    /// Maximum number of tokens of the reasoning of an answer, if the request sets none; `None` for no
    /// limit. It has no effect on a model whose reasoning has no tags.
    pub reasoning_budget: Option<usize>,
    /// Origins whose web pages may use the routes for clients, such as `https://app.example`; `*`
    /// for all. Default: none.
    pub allowed_origins: Vec<HeaderValue>,
    /// Whether everybody may read `/metrics`. If not, the rules of the operator's routes apply.
    pub public_metrics: bool,
    /// Counters that `/metrics` adds to those of the engine. Default: none.
    pub counters: Vec<CounterSource>,
    /// Whether replies leave out the number of prompt tokens that came from the cache.
    pub hide_cached_tokens: bool,
    /// Whether inputs of embeddings and scores that are too long are cut, unless the request says how
    /// many tokens are kept. If not, they are refused. Default: refused.
    pub auto_truncate: bool,
    /// Memory in bytes for the responses of `/v1/responses`, so that a request can continue one by
    /// its id; the oldest are forgotten first. With 0, none are kept. Default: 64 MiB.
    pub response_memory: usize,
    /// Which values of a request's `priority` come first.
    pub priority: PriorityOrder,
    /// Whether there is a page at `/`, with its files below `/page`.
    pub page: bool,
    /// A path below which all routes can be reached, in addition to their own paths.
    pub root_path: RootPath,
}

impl Default for RouterOptions {
    /// No additional names, no keys and no page; 30 s and 256 MiB for bodies; no time limit for
    /// answers.
    fn default() -> Self {
        Self {
            served_names: Vec::new(),
            alias: None,
            access: Access::default(),
            body_limit: None,
            body_timeout: Duration::from_secs(30),
            body_memory: 256 << 20,
            request_timeout: None,
            default_max_tokens: None,
            max_answers: MAX_CHOICES,
            unknown_parameters: UnknownParameters::default(),
            special_tokens_in_messages: false,
            tool_calls: FormatChoice::Auto,
            reasoning: FormatChoice::Auto,
            reasoning_budget: None,
            allowed_origins: Vec::new(),
            public_metrics: false,
            counters: Vec::new(),
            hide_cached_tokens: false,
            auto_truncate: false,
            response_memory: 64 << 20,
            priority: PriorityOrder::default(),
            page: false,
            root_path: RootPath::default(),
        }
    }
}

/// State that the handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: Engine,
    /// The names of the model, at least one. The first one is in replies and metrics.
    pub(crate) served_names: Vec<String>,
    /// A further name that is accepted and not listed.
    pub(crate) alias: Option<String>,
    /// Whether every name that is not listed stands for the model, also next to adapters.
    pub(crate) any_name: bool,
    /// Whether there has been an adapter. A name that is not listed may belong to one that was
    /// unloaded.
    pub(crate) had_adapters: AtomicBool,
    /// The version of the server and the model, in replies.
    pub(crate) fingerprint: String,
    pub(crate) access: Arc<Access>,
    pub(crate) bodies: BodyLimits,
    pub(crate) parser: Parser,
    pub(crate) request_timeout: Option<Duration>,
    /// Maximum number of tokens of answers whose requests set none, if the operator chose it.
    pub(crate) configured_max_tokens: Option<usize>,
    pub(crate) max_answers: usize,
    pub(crate) special_tokens_in_messages: bool,
    pub(crate) tool_calls: FormatChoice<ToolCallFormat>,
    pub(crate) reasoning: FormatChoice<ReasoningFormat>,
    pub(crate) reasoning_budget: Option<usize>,
    pub(crate) hide_cached_tokens: bool,
    pub(crate) auto_truncate: bool,
    pub(crate) responses: ResponseStore,
    pub(crate) priority: PriorityOrder,
    pub(crate) root_path: RootPath,
    pub(crate) metrics: EngineMetrics,
    pub(crate) audits: SingleFlight<Result<AuditReport, ApiError>>,
    pub(crate) event_streams: EventStreams,
    pub(crate) prefix_files: PrefixFiles,
    pub(crate) dumps: SingleFlight<Result<Arc<TreeDump>, ApiError>>,
    /// When the router was made, in seconds since 1970-01-01 UTC: the model's `created`.
    pub(crate) started: u64,
}

impl App {
    pub(crate) fn new(engine: Engine, options: RouterOptions) -> Self {
        let context = engine.model_info().max_positions;
        let (least, most) = BODY_LIMITS;
        let by_context = match engine.model_info().takes_images {
            true => most,
            false => context.saturating_mul(BODY_BYTES_PER_TOKEN).clamp(least, most),
        };
        let values = context.saturating_mul(VALUES_PER_TOKEN).saturating_add(BASE_VALUES);
        let mut names = options.served_names;
        let any_name = names.iter().any(|name| name == ANY_NAME);
        names.retain(|name| name != ANY_NAME);
        let (served_names, alias) = match names {
            names if names.is_empty() => (vec![engine.model_info().id.clone()], options.alias),
            names => (names, None),
        };
        Self {
            metrics: EngineMetrics::with_counters(
                engine.clone(),
                served_names[0].clone(),
                options.counters,
            ),
            parser: Parser::new(values, engine.clone()),
            fingerprint: fingerprint(&engine),
            had_adapters: AtomicBool::new(!engine.adapters().is_empty()),
            engine,
            served_names,
            alias,
            any_name,
            access: Arc::new(options.access),
            bodies: BodyLimits {
                size: options.body_limit.unwrap_or(by_context),
                time: options.body_timeout,
                memory: Arc::new(Semaphore::new(options.body_memory.min(Semaphore::MAX_PERMITS))),
            },
            request_timeout: options.request_timeout,
            configured_max_tokens: options.default_max_tokens,
            max_answers: options.max_answers.clamp(1, MAX_CHOICES),
            special_tokens_in_messages: options.special_tokens_in_messages,
            tool_calls: options.tool_calls,
            reasoning: options.reasoning,
            reasoning_budget: options.reasoning_budget,
            hide_cached_tokens: options.hide_cached_tokens,
            auto_truncate: options.auto_truncate,
            responses: ResponseStore::new(options.response_memory),
            priority: options.priority,
            root_path: options.root_path,
            event_streams: EventStreams::new(),
            prefix_files: PrefixFiles::new(),
            audits: SingleFlight::new(),
            dumps: SingleFlight::new(),
            started: unix_seconds(),
        }
    }

    /// Maximum number of tokens of an answer to a chat request that sets none.
    pub(crate) fn default_max_tokens(&self) -> usize {
        // The engine ends an answer where the context or the KV pool ends.
        self.configured_max_tokens.unwrap_or(self.engine.model_info().max_positions)
    }

    /// How conversations are rendered, apart from what requests say.
    pub(crate) fn chat_options(&self) -> ChatOptions {
        ChatOptions {
            tool_calls: self.tool_calls.or_else(|| None),
            special_tokens_in_messages: self.special_tokens_in_messages,
            ..ChatOptions::default()
        }
    }

    /// Refuses a call for more answers than can ever be accepted.
    pub(crate) fn check_answers(&self, param: &str, answers: usize) -> Result<(), ApiError> {
        if answers <= self.max_answers {
            return Ok(());
        }
        let message = format!(
            "expected at most {} answers (prompts x `n`, or x `best_of`), got {answers}",
            self.max_answers
        );
        Err(ApiError::invalid(Some(param), message))
    }

    /// An empty sum of usages.
    pub(crate) fn usage_sum(&self, choices_per_prompt: usize) -> UsageSum {
        UsageSum::new(choices_per_prompt, self.hide_cached_tokens)
    }
}

/// Bodies are received within the limits of the router.
impl FromRef<Arc<App>> for BodyLimits {
    fn from_ref(app: &Arc<App>) -> Self {
        app.bodies.clone()
    }
}

impl FromRef<Arc<App>> for ResponseStore {
    fn from_ref(app: &Arc<App>) -> Self {
        app.responses.clone()
    }
}

impl FromRef<Arc<App>> for RootPath {
    fn from_ref(app: &Arc<App>) -> Self {
        app.root_path.clone()
    }
}

/// Identifies the version of the server and the model that it runs.
fn fingerprint(engine: &Engine) -> String {
    let info = engine.model_info();
    let mut hasher = DefaultHasher::new();
    (&info.id, info.vocab_size, info.max_positions, &info.eos_token_ids).hash(&mut hasher);
    format!("stolon-{}-{:08x}", env!("CARGO_PKG_VERSION"), hasher.finish() as u32)
}
