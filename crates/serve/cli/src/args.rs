//! Flags that several commands share: the model and the engine's settings. `tiers.rs` has the flags
//! of where computed KV is stored, and `sampling.rs` those of how tokens are sampled.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use stolon::{
    AdmissionPolicy, EmbeddingSizes, Engine, EngineBuilder, EvictionPolicy, KvType, WeightType,
    WindowKv,
};

use crate::download;
use crate::memory::parse_bytes;

pub use adapters::AdapterArgs;
pub use admission::Admission;
pub use history::{History, HistoryArgs, Switch};
pub use images::ImageArgs;
use parsers::{parse_embedding_sizes, parse_json};
pub use rerank::RerankArgs;
pub use sampling::SamplingArgs;
pub use speculation::SpeculationArgs;
pub use tiers::{DiskSize, TierArgs};

mod adapters;
mod admission;
mod files;
mod history;
mod images;
mod parsers;
mod rerank;
mod sampling;
mod speculation;
mod tiers;

/// The default of `--block-size` on the CPU, in tokens. On a GPU it is larger.
const DEFAULT_BLOCK_SIZE: usize = 16;

/// The default of `--block-size` for the demo model, in tokens: so small that its questions, of
/// about ten tokens, fill whole blocks and become branches of the prefix tree.
const DEMO_BLOCK_SIZE: usize = 4;

/// The default of `--kv-memory` for a server with the demo model, in bytes: the free memory of a
/// machine is room for millions of tokens of this model of 2 MB, and its numbers say nothing.
const DEMO_KV_MEMORY: u64 = 64 << 20;

/// The default of `--model`.
pub(crate) const DEMO: &str = "demo";

/// The model and the settings of the engine that runs it.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Model to load
    ///
    /// One of: `demo` (the small built-in model), `demo-vision` (the small built-in model that
    /// answers questions about pictures of a few shapes), a Hugging Face model directory, a
    /// `.gguf` file (of a model in several files, any of them), a Hugging Face hub id (`org/name`,
    /// `org/name@revision`, or `org/name:Q4_K_M` or `org/name:FILE` for a GGUF file of a
    /// repository), or `random:PRESET` (random weights of a known shape, for tests).
    ///
    /// Downloads are verified, and continued if they were interrupted.
    ///
    /// For `stolon serve` also NAME=SOURCE, once for each of several models.
    #[arg(short, long, default_value = DEMO, env = "STOLON_MODEL")]
    pub model: String,
    /// File with a chat template to use instead of the model's own
    ///
    /// A Jinja template of at most 256 KiB, as in a model's chat_template.jinja.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Use a language model as a reranker that answers with one of two tokens.
    #[command(flatten)]
    pub rerank: RerankArgs,
    /// Replace members of the model's generation_config.json: a JSON object with any of do_sample,
    /// temperature, top_k, top_p, min_p and repetition_penalty, and of suppress_tokens,
    /// begin_suppress_tokens, bad_words_ids and no_repeat_ngram_size
    ///
    /// The former are the defaults of requests that give no sampling parameters. Without any, and
    /// if the model's authors recommend none, chats are sampled with temperature 0.8, top-k 40,
    /// top-p
    /// 0.95 and min-p 0.05, and completions are greedy. The latter hold for every request.
    #[arg(long, value_name = "JSON", value_parser = parse_json)]
    pub override_generation_config: Option<serde_json::Value>,
    /// The GGUF file with the image encoder of a GGUF model (llama.cpp's mmproj), for Gemma 3,
    /// SmolVLM, Idefics 3, Qwen3-VL and Qwen3.5
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<std::path::PathBuf>,
    /// Memory for the KV cache, in bytes or with a unit: 536870912, 512M, 1.5G
    ///
    /// Units are K, M, G and T, powers of 1024. By default a part of the memory that is free after
    /// the model has been loaded; `stolon serve demo` takes 64M.
    #[arg(long, value_parser = parse_bytes, conflicts_with = "num_blocks", value_name = "BYTES")]
    #[arg(visible_alias = "kv-cache-memory", alias = "kv-cache-memory-bytes")]
    pub kv_memory: Option<u64>,
    /// Size of the KV cache in blocks of `--block-size` tokens, instead of `--kv-memory`
    #[arg(long, value_name = "BLOCKS")]
    pub num_blocks: Option<usize>,
    /// How earlier answers become tokens.
    #[command(flatten)]
    pub history: HistoryArgs,
    /// The memory that images take.
    #[command(flatten)]
    pub images: ImageArgs,
    /// Where KV that leaves the pool is stored.
    #[command(flatten)]
    pub tiers: TierArgs,
    /// The LoRA adapters.
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Number of tokens per KV cache block: a power of two from 1 to 256
    ///
    /// The prefix cache shares and pins whole blocks: a prefix that is shorter than a block is
    /// neither shared nor pinned. Smaller blocks share more of two similar prompts and are slower:
    /// on the CPU, 8 instead of 16 adds up to 5 % to a prefill and 7 to 23 % to the time of a token
    /// after a context of 4,096, and 4 adds about as much. More than 16 saves at most 2 %.
    ///
    /// By default 16, or 4 with the demo model, whose questions are short, and 1 with models that take
    /// images, inside which no match ends; and 32 on a GPU, where attention is slow with smaller
    /// blocks.
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<usize>,
    /// Device that runs the model: cpu, cuda, cuda:INDEX, metal or metal:INDEX
    #[cfg(feature = "candle")]
    #[arg(long, default_value_t, value_name = "DEVICE")]
    pub device: stolon::DeviceChoice,
    /// Share of the GPU's memory to use, above 0 and up to 1
    ///
    /// The KV cache gets the part of it that the weights and the computation leave, unless its size
    /// is set. Memory that other programs use counts toward the share. This has no effect on the
    /// CPU.
    #[cfg(feature = "candle")]
    #[arg(long, default_value_t = 0.9, value_name = "SHARE")]
    pub gpu_memory_utilization: f64,
    /// Allow answers on a GPU to depend, by rounding, on what is cached and on other running
    /// requests
    ///
    /// Long prompts, and each token after a long context, are then computed faster. KV can be
    /// neither stored nor exported.
    #[cfg(feature = "candle")]
    #[arg(long)]
    pub no_batch_invariance: bool,
    /// Launch the kernels of decode steps on a CUDA device one by one instead of as CUDA graphs
    ///
    /// Graphs let small models generate faster, with the same answers, and take memory for a second
    /// step.
    #[cfg(feature = "candle")]
    #[arg(long)]
    pub no_cuda_graphs: bool,
    /// Data type of the KV cache: f32, bf16, f16, int8, k8v4 or int4
    ///
    /// By default f32 for models in f32 and bf16 for all others. int8 has a scale per token and
    /// head; it takes half the memory of bf16 and changes the results slightly. int4 takes half the
    /// memory of int8: keys and values are rotated (Walsh-Hadamard) and rounded to 4 bits, which
    /// changes the results more, noticeably so with small models. k8v4 has keys in int8 and values
    /// in int4, which costs little of that. GPUs have all but these two, and with int8 they compute
    /// long prompts more slowly.
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<KvType>,
    /// Where layers with a sliding window keep keys and values: blocks or states
    ///
    /// With states, they keep the positions of the window only: contexts much longer than the window
    /// take less memory, and a prefix can be used again only from where a state was kept, which
    /// takes the memory of a whole window. Every running request takes a window and
    /// `--max-batched-tokens` positions more. Answers stay the same.
    #[arg(long, value_name = "PLACE")]
    pub window_kv: Option<WindowKv>,
    /// Maximum number of tokens per forward pass, prompt chunks and generated tokens together
    ///
    /// A longer prompt is computed in several chunks. While other requests wait, chunks are smaller
    /// if a pass would take longer than `--step-time-target`.
    #[arg(long, visible_alias = "max-num-batched-tokens", default_value_t = 512)]
    #[arg(value_name = "TOKENS")]
    pub max_batched_tokens: usize,
    /// Target duration of a forward pass while other requests wait, in milliseconds; 0 sets no
    /// target
    ///
    /// Prompts are then computed in chunks that take no longer at the measured speed, but of at
    /// least 64 tokens.
    #[arg(long, default_value_t = 100, value_name = "MILLISECONDS")]
    pub step_time_target: u64,
    /// How tokens of answers are guessed.
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Maximum number of requests that run at the same time
    #[arg(long, visible_alias = "max-num-seqs", default_value_t = 32, value_name = "REQUESTS")]
    pub max_running: usize,
    /// Maximum number of queued requests; more are refused
    ///
    /// The server refuses with status 429 and a `Retry-After` header. Default 1024, for
    /// `bench load` 32.
    #[arg(long, value_name = "REQUESTS")]
    pub max_queued: Option<usize>,
    /// Maximum number of uncached prompt tokens in the queue; more are refused
    ///
    /// A limit of a few thousand helps if not all conversations fit in the KV cache: those whose
    /// history is cached continue, instead of evicting each other's history. A request is accepted
    /// in any case if the queue is empty. Default 1048576.
    #[arg(long, value_name = "TOKENS")]
    pub max_queued_tokens: Option<usize>,
    /// Bound on overtaking: uncached prompt tokens of later requests that may be admitted before an
    /// earlier request
    ///
    /// The tokens that were queued when the earlier request arrived are allowed in addition. 0
    /// admits strictly in order of arrival. Default 4096.
    #[arg(long, value_name = "TOKENS")]
    pub max_overtake_tokens: Option<usize>,
    /// Maximum number of tokens of a request, prompt and answer together; at least 2 and at most
    /// the context length of the model, which is the default
    ///
    /// Models with LongRoPE (Phi-3) have other factors for short contexts, which are used if this
    /// is at most the context length of the original training.
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<usize>,
    /// Disable the prefix cache: every prompt is computed from scratch
    #[arg(long, visible_alias = "no-enable-prefix-caching")]
    #[arg(overrides_with = "enable_prefix_caching")]
    pub no_prefix_caching: bool,
    /// Enable the prefix cache. This is the default
    #[arg(long, overrides_with = "no_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Order in which cached blocks are evicted, from the KV pool and from `--kv-cache-dir`: lru,
    /// lfu, fifo, mru, filo, priority, slru or cost-aware
    ///
    /// Default: lru, or cost-aware for the KV pool of a model with a recurrent state.
    ///
    /// priority: a prefix has the largest `priority` of the requests that used it; the lowest is
    /// evicted first.
    #[arg(long, value_name = "POLICY")]
    pub eviction_policy: Option<EvictionPolicy>,
    /// Maximum number of KV blocks that pinned prefixes may occupy
    ///
    /// Pinned blocks are not available to running requests. With 0, prefixes cannot be pinned
    /// (`/v1/cache/pin`). Default: a quarter of the blocks, or less where a request of the context
    /// length would not fit next to them.
    ///
    /// With `--kv-cache-dir`, pinned blocks are available to running requests: pinned prefixes are
    /// stored in the directory, and evicted from the KV pool after everything else.
    ///
    /// It is also the maximum number of blocks that marks protect (`cache_control` of clients), next
    /// to those of pins; by default a quarter of the blocks. They are available to running requests.
    #[arg(long, value_name = "BLOCKS")]
    pub pin_budget: Option<usize>,
    /// Number of KV blocks that each cache salt and each tenant may keep in the prefix cache
    ///
    /// A client that has more cached loses its own blocks in the order of `--eviction-policy`, and
    /// others lose none. Clients are separated by `cache_salt` or `--tenant-by`; requests without
    /// either have no quota. A client that sends several values of `cache_salt` has a quota for
    /// each of them. Blocks that running requests, pins and sessions hold count, but are not
    /// evicted. With 0, only these are kept. Blocks that are evicted for the quota are not written
    /// to `--kv-cache-dir` under the policy write-back. Default: no limit.
    #[arg(long, value_name = "BLOCKS")]
    pub namespace_quota: Option<usize>,
    /// Maximum number of KV blocks that sessions keep from being evicted between their turns
    ///
    /// A running request that finds no other block takes them. With 0, sessions hold nothing.
    /// Default: half of the blocks.
    #[arg(long, value_name = "BLOCKS")]
    pub session_budget: Option<usize>,
    /// Maximum number of open sessions, 1 to 65536
    ///
    /// When one more is opened, the longest idle session of the client with the most sessions is
    /// closed. The tokens of all sessions are kept in memory, 4 bytes per token.
    #[arg(long, default_value_t = 1024, value_name = "COUNT",
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=65_536))]
    pub max_sessions: usize,
    /// Seconds without a turn after which a session is closed, unless it was opened with a limit of
    /// its own
    #[arg(long, default_value_t = 1800, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub session_ttl: u64,
    /// Order in which queued requests are admitted: fcfs, longest-prefix, cost or priority
    ///
    /// fcfs: first come, first served. longest-prefix: most cached prompt tokens first. cost:
    /// fewest uncached prompt tokens first; requests age. Under each of them, requests with a
    /// larger `priority` come first. priority: as in vLLM, requests with a smaller `priority` come
    /// first, and those of equal priority in order of arrival.
    #[arg(long, visible_alias = "scheduling-policy", default_value_t, value_name = "POLICY")]
    pub admission: Admission,
    /// Seconds after which a forward pass counts as hung
    ///
    /// Requests then fail, and new ones are refused until the backend responds again.
    #[arg(long, default_value_t = 600, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub step_timeout: u64,
    /// Number of threads that compute, 1 to 1024. Default: one for each performance core of one
    /// socket that this process may use
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    pub threads: Option<usize>,
    /// Bind each of these threads to one processor (Linux only)
    ///
    /// This helps if nothing else computes on the machine, above all if it has several sockets. Two
    /// processes must not be bound to the same processors: start each with `taskset`.
    #[arg(long)]
    pub bind_threads: bool,
    /// Format of the weight matrices in memory: `stored` (as in the file) or `q8_0`
    ///
    /// `q8_0` rounds plain (f32, f16, bf16) matrices to 8 bits while they are loaded, which saves
    /// memory and time and changes the results slightly.
    #[arg(long, default_value_t, value_name = "FORMAT")]
    pub weights: WeightType,
    /// Read embeddings row by row from the model file instead of loading them
    ///
    /// Saves the memory of embeddings that are not also the output matrix, such as those of most text
    /// encoders and the per-layer embeddings of Gemma 4. The file must not be changed meanwhile.
    /// Answers stay the same. This is also done without the flag if there is no memory for them.
    #[arg(long)]
    pub map_embeddings: bool,
    /// Sizes to which embeddings may be shortened: `any`, or a list such as 256,512
    ///
    /// By default those that the model's config.json declares (`matryoshka_dimensions`,
    /// `is_matryoshka`). Many models that were trained for it do not declare it, such as
    /// Qwen3-Embedding. Requests choose a size with `dimensions`.
    #[arg(long, value_name = "SIZES", value_parser = parse_embedding_sizes)]
    pub embedding_sizes: Option<EmbeddingSizes>,
}

impl EngineArgs {
    /// Tokens per KV block: the value of `--block-size`, or the default on the CPU.
    pub(crate) fn cpu_block_size(&self) -> usize {
        let default = if self.model == DEMO { DEMO_BLOCK_SIZE } else { DEFAULT_BLOCK_SIZE };
        self.block_size.unwrap_or(default)
    }

    /// Sets the default size of the KV pool of a server with the demo model, in place of the
    /// engine's default.
    pub(crate) fn demo_kv_memory(&mut self) {
        if self.model == DEMO && self.num_blocks.is_none() {
            self.kv_memory.get_or_insert(DEMO_KV_MEMORY);
        }
    }

    /// Refuses flags that have no effect because the prefix cache is off.
    fn check_cache(&self) -> anyhow::Result<()> {
        if !self.no_prefix_caching {
            return Ok(());
        }
        let set = [
            ("--kv-cache-dir", self.tiers.kv_cache_dir.is_some()),
            ("--namespace-key-file", self.tiers.namespace_key_file.is_some()),
            ("--eviction-policy", self.eviction_policy.is_some()),
            ("--pin-budget", self.pin_budget.is_some()),
            ("--namespace-quota", self.namespace_quota.is_some()),
            ("--session-budget", self.session_budget.is_some()),
            ("--next-turn-prefill on", self.history.next_turn_prefill == Some(Switch::On)),
            ("--admission longest-prefix", self.admission.policy == AdmissionPolicy::LongestPrefix),
        ];
        match set.into_iter().find(|&(_, is_set)| is_set) {
            Some((flag, _)) => anyhow::bail!(
                "expected {flag} without --no-prefix-caching, because it has no effect without a \
                 prefix cache"
            ),
            None => Ok(()),
        }
    }

    /// An engine builder with these settings. The model has not been loaded yet.
    ///
    /// # Errors
    /// If the chat template cannot be read, or if a flag has no effect in combination with the
    /// others.
    pub fn builder(&self) -> anyhow::Result<EngineBuilder> {
        self.check_cache()?;
        let mut builder = download::with_bars(Engine::builder())
            .model(self.model.as_str())
            .max_batched_tokens(self.max_batched_tokens)
            .step_time_target(self.step_time_target())
            .max_running(self.max_running)
            .prefix_caching(!self.no_prefix_caching)
            .max_sessions(self.max_sessions)
            .session_ttl(Duration::from_secs(self.session_ttl))
            .step_timeout(Duration::from_secs(self.step_timeout))
            .admission(self.admission.policy)
            .weights(self.weights)
            .map_embeddings(self.map_embeddings);
        if let Some(policy) = self.eviction_policy {
            builder = builder.eviction_policy(policy);
        }
        if let Some(blocks) = self.pin_budget {
            builder = builder.pin_budget(blocks);
        }
        if let Some(blocks) = self.namespace_quota {
            builder = builder.namespace_quota(blocks);
        }
        if let Some(blocks) = self.session_budget {
            builder = builder.session_budget(blocks);
        }
        if let Some(path) = &self.chat_template {
            builder = builder.chat_template(files::read_template(path)?);
        }
        builder = self.rerank.apply(builder)?;
        if let Some(bytes) = self.kv_memory {
            builder = builder.kv_memory(bytes);
        }
        let builder = self.history.apply(self.tiers.apply(builder)?)?;
        Ok(self.with_sizes(self.speculation.apply(self.adapters.apply(builder))))
    }

    fn step_time_target(&self) -> Option<Duration> {
        (self.step_time_target > 0).then(|| Duration::from_millis(self.step_time_target))
    }

    /// Adds the sizes that are set, and the device.
    fn with_sizes(&self, mut builder: EngineBuilder) -> EngineBuilder {
        if let Some(count) = self.num_blocks {
            builder = builder.num_blocks(count);
        }
        if let Some(path) = &self.mmproj {
            builder = builder.mmproj(path);
        }
        if let Some(members) = &self.override_generation_config {
            builder = builder.override_generation_config(members.clone());
        }
        #[cfg(feature = "candle")]
        let is_cpu = self.device == stolon::DeviceChoice::Cpu;
        #[cfg(not(feature = "candle"))]
        let is_cpu = true;
        if self.block_size.is_some() || is_cpu && self.model == DEMO {
            builder = builder.block_size(self.cpu_block_size());
        }
        #[cfg(feature = "candle")]
        {
            builder = builder
                .device(self.device)
                .gpu_memory_utilization(self.gpu_memory_utilization)
                .batch_invariant(!self.no_batch_invariance)
                .cuda_graphs(!self.no_cuda_graphs);
        }
        if let Some(kv_type) = self.kv_dtype {
            builder = builder.kv_type(kv_type);
        }
        if let Some(place) = self.window_kv {
            builder = builder.window_kv(place);
        }
        builder = self.images.apply(builder);
        if let Some(count) = self.max_queued {
            builder = builder.max_queued_requests(count);
        }
        if let Some(tokens) = self.max_queued_tokens {
            builder = builder.max_queued_tokens(tokens);
        }
        if let Some(tokens) = self.max_overtake_tokens {
            builder = builder.max_overtake_tokens(tokens);
        }
        if let Some(tokens) = self.max_model_len {
            builder = builder.max_positions(tokens);
        }
        if let Some(count) = self.threads {
            builder = builder.threads(count);
        }
        builder = builder.bind_threads(self.bind_threads);
        if let Some(sizes) = &self.embedding_sizes {
            builder = builder.embedding_sizes(sizes.clone());
        }
        builder
    }

    /// Loads the model and starts the engine.
    ///
    /// # Errors
    /// The engine's error, with the model's name.
    pub async fn start(&self) -> anyhow::Result<Engine> {
        self.start_from(self.builder()?).await
    }

    /// Starts an engine with the settings of `builder`, which come from these flags.
    ///
    /// # Errors
    /// The engine's error, with the model's name.
    pub async fn start_from(&self, builder: EngineBuilder) -> anyhow::Result<Engine> {
        let engine = builder.build().await;
        engine.with_context(|| format!("cannot start an engine for the model `{}`", self.model))
    }
}
