//! An answer never depends on the cache: for each kind of model and each tier, random requests get
//! the bits that an engine without a cache computes, while prefixes are removed, requests are
//! canceled, sessions continue and the engine restarts.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon::{
    Engine, EngineBuilder, EngineError, Error, KvType, PrefetchPolicy, Request, SessionOptions,
    Speculation, WindowKv, WritePolicy,
};
use support::Directory;

use bits::bits;

use crate::support::{bits, tiers as support};
#[cfg(feature = "images")]
use crate::support::{pictures, questions};

/// Number of requests at the same time.
const CLIENTS: usize = 6;

/// How often an engine restarts in a run, each time with a part of the answers.
const STARTS: usize = 4;

/// Length of an answer in tokens. A canceled request ends earlier.
const ANSWER_LEN: usize = 8;

/// A model whose cache has a property that the caches of the other kinds do not have.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// A preset, or a fixture of `stolon-checkpoint`.
    model: &'static str,
    windows: WindowKv,
    /// The type of its KV; `None` for the default.
    kv_type: Option<KvType>,
    /// What guesses tokens in the engine with a cache.
    guesses: Option<Guesses>,
}

/// What guesses tokens.
#[derive(Clone, Copy)]
enum Guesses {
    /// A draft model or an EAGLE-3 head.
    Draft(&'static str),
    /// The model's own head.
    Head,
}

const fn kind(name: &'static str, model: &'static str) -> Kind {
    Kind { name, model, windows: WindowKv::Blocks, kv_type: None, guesses: None }
}

const fn in_states(name: &'static str, model: &'static str) -> Kind {
    Kind { windows: WindowKv::States, ..kind(name, model) }
}

const fn rounded(name: &'static str, model: &'static str, kv_type: KvType) -> Kind {
    Kind { kv_type: Some(kv_type), ..in_states(name, model) }
}

const fn drafted(name: &'static str, model: &'static str, draft: &'static str) -> Kind {
    Kind { guesses: Some(Guesses::Draft(draft)), ..in_states(name, model) }
}

/// With an assistant, which reads the positions of windows in blocks.
const fn assisted(name: &'static str, model: &'static str, draft: &'static str) -> Kind {
    Kind { guesses: Some(Guesses::Draft(draft)), ..kind(name, model) }
}

const fn with_head(name: &'static str, model: &'static str) -> Kind {
    Kind { guesses: Some(Guesses::Head), ..kind(name, model) }
}

const KINDS: &[Kind] = &[
    kind("full attention", "llama"),
    drafted("full attention, draft model", "llama", "llama"),
    drafted("gated delta rule, draft model", "qwen3_next", "llama"),
    with_head("gated delta rule, head of its own", "mtp/qwen3_5"),
    drafted("full attention, EAGLE-3 head", "qwen3", "eagle3/qwen3"),
    drafted("gated delta rule, EAGLE-3 head", "qwen3_next", "eagle3/llama3"),
    drafted("windows in states, EAGLE-3 head", "olmo3", "eagle3/qwen3"),
    assisted("per-layer embeddings, assistant", "gemma4", "gemma4_assistant/gemma4"),
    assisted("values from keys, assistant", "gemma4_dense", "gemma4_assistant/gemma4_dense"),
    rounded("full attention, 4 bits", "llama", KvType::Int4),
    rounded("windows in states, keys in 8 and values in 4 bits", "gemma3", KvType::K8V4),
    rounded("latent attention, 4 bits", "deepseek_v3", KvType::Int4),
    kind("latent attention", "deepseek_v3"),
    kind("windows in blocks", "gemma3"),
    in_states("windows in states", "gemma3"),
    in_states("windows in states, sinks", "gpt_oss"),
    kind("short convolutions", "lfm2"),
    kind("gated delta rule", "qwen3_next"),
    kind("Mamba-2 and attention", "nemotron_h"),
    kind("Mamba-2 next to attention", "falcon_h1"),
    kind("delta rule, latent attention", "kimi_linear"),
    #[cfg(feature = "images")]
    kind("images", "random:qwen3-vl-tiny"),
    #[cfg(feature = "images")]
    kind("images, gated delta rule", "random:qwen3.5-vl-tiny"),
];

/// The place where an engine keeps KV that its pool has no room for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tier {
    /// Nowhere.
    Pool,
    /// In a directory that has room for everything.
    Disk,
    /// In a directory that has room for a part. KV is written when it is evicted, if the model
    /// permits that.
    SmallDisk,
    /// In an object store, behind a directory that has room for a part.
    #[cfg(feature = "object-store")]
    ObjectStore,
}

const TIERS: &[Tier] = &[
    Tier::Pool,
    Tier::Disk,
    Tier::SmallDisk,
    #[cfg(feature = "object-store")]
    Tier::ObjectStore,
];

impl Tier {
    fn apply(self, builder: EngineBuilder, directory: &Path, sizes: Sizes) -> EngineBuilder {
        let (disk, small) = (directory.join("disk"), sizes.small_disk);
        let builder = match self {
            Tier::Pool => return builder,
            Tier::Disk => builder.kv_cache_dir(disk, 1 << 30),
            // Evicted blocks are stored without a state, so a model with a state does not use
            // write-back.
            Tier::SmallDisk if sizes.has_state => builder.kv_cache_dir(disk, small),
            Tier::SmallDisk => {
                builder.kv_cache_dir(disk, small).write_policy(WritePolicy::WriteBack)
            }
            #[cfg(feature = "object-store")]
            Tier::ObjectStore => {
                let store = directory.join("store");
                std::fs::create_dir_all(&store).expect("a directory");
                builder
                    .kv_cache_dir(disk, small)
                    .kv_object_store(format!("file://{}", store.display()))
            }
        };
        // All stored KV is read, however fast this machine computes.
        builder.prefetch_policy(PrefetchPolicy::WaitComplete)
    }
}

/// Sizes that follow from a model.
#[derive(Clone, Copy)]
struct Sizes {
    /// Size of the KV pool in blocks.
    blocks: usize,
    /// Size of a disk tier that has room for a part, in bytes.
    small_disk: u64,
    has_state: bool,
}

/// A request with the answer of an engine without a cache.
#[derive(Clone)]
struct Question {
    request: Request,
    answer: Vec<(u32, u32)>,
    /// Length of its prompt in tokens.
    prompt_len: usize,
}

/// The questions to a model: conversations, most of which have only one turn.
type Conversations = Vec<Vec<Question>>;

/// Numbers of a run, counted by all clients together.
#[derive(Default)]
struct Counts {
    answers: AtomicUsize,
    canceled: AtomicUsize,
    wrong: AtomicUsize,
}

impl Kind {
    fn builder(self) -> EngineBuilder {
        let builder = Engine::builder().threads(1).window_kv(self.windows);
        let builder = self.kv_type.into_iter().fold(builder, EngineBuilder::kv_type);
        match self.model.starts_with("random:") {
            true => builder.model(self.model),
            false => builder.model(stolon_fixtures::path(self.model)),
        }
    }

    /// The same with what guesses tokens, whose guesses are always proposed.
    fn guessing_builder(self) -> EngineBuilder {
        let builder = match self.guesses {
            None => return self.builder(),
            Some(Guesses::Draft(draft)) => self.builder().draft_model(stolon_fixtures::path(draft)),
            Some(Guesses::Head) => self.builder().mtp(true),
        };
        builder.speculation(Speculation { adaptive: false, ..Speculation::default() })
    }

    /// Prompts that share prefixes of many lengths and end apart.
    fn prompts(self) -> Vec<Request> {
        let mut prompts = Vec::new();
        for family in 0..4 {
            let shared = tokens(family, 150);
            // They share at most 69 tokens, which is not a multiple of the size of blocks or of the
            // distance of checkpoints.
            for (own, len) in [(0, 155), (1, 74), (2, 74), (3, 33)] {
                let first = [&shared[..69.min(len)], &tokens(family * 7 + own + 9, 90)].concat();
                prompts.push(Request::tokens(&first[..len]));
            }
            prompts.push(Request::tokens(shared));
        }
        #[cfg(feature = "images")]
        if self.model.contains("vl") {
            let pictures: Vec<_> =
                (0..3).map(|seed| pictures::picture(40 + 30 * seed, 50, seed)).collect();
            for (index, picture) in pictures.iter().enumerate() {
                let next = &pictures[(index + 1) % pictures.len()];
                prompts.push(questions::question(&[picture], "What is this?"));
                prompts.push(questions::question(&[picture], "Which color has it?"));
                prompts.push(questions::question(&[picture, next], "What is this?"));
            }
        }
        prompts.into_iter().map(limited).collect()
    }

    /// The conversations, with the answers of an engine without a cache.
    async fn conversations(self, cold: &Engine) -> Conversations {
        let mut conversations = Vec::new();
        for request in self.prompts() {
            conversations.push(vec![ask(cold, request).await]);
        }
        for seed in 0..4 {
            let (mut prompt, mut turns) = (tokens(seed, 40), Vec::new());
            for turn in 0..3 {
                let question = ask(cold, limited(Request::tokens(&prompt[..]))).await;
                prompt.extend(question.answer.iter().map(|&(token, _)| token));
                prompt.extend(tokens(seed * 5 + turn + 50, 21));
                turns.push(question);
            }
            conversations.push(turns);
        }
        conversations
    }
}

/// Token ids of all fixtures and presets.
fn tokens(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * (seed + 3) + seed) % 96).collect()
}

fn limited(request: Request) -> Request {
    request.max_tokens(ANSWER_LEN).logprobs(1).ignore_eos(true)
}

async fn start(builder: EngineBuilder) -> Engine {
    builder.build().await.expect("the engine starts")
}

async fn ask(engine: &Engine, request: Request) -> Question {
    let answer = engine.complete(request.clone()).await.expect("it fits");
    let prompt_len = answer.finish.usage.prompt_tokens;
    Question { request, answer: bits(&answer), prompt_len }
}

/// Asks questions until `counts` has `enough` answers, and compares each answer.
#[allow(clippy::print_stdout, reason = "a wrong answer is part of the test's report")]
async fn client(
    engine: Engine,
    conversations: Arc<Conversations>,
    counts: Arc<Counts>,
    seed: u64,
    enough: usize,
) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut opened = 0;
    while counts.answers.load(Ordering::Relaxed) < enough {
        let conversation = &conversations[rng.random_range(0..conversations.len())];
        let session = (conversation.len() > 1 && rng.random()).then(|| {
            opened += 1;
            let options = SessionOptions::new(format!("{seed}-{opened}"));
            engine.sessions().open(options).expect("a free id").id
        });
        for question in conversation {
            let request = match &session {
                Some(id) => question.request.clone().session(id),
                None => question.request.clone(),
            };
            let mut stream = match engine.generate(request).await {
                Ok(stream) => stream,
                // A removal of everything may have ended the session.
                Err(Error::Engine(EngineError::Session(_) | EngineError::Overloaded { .. })) => {
                    break;
                }
                Err(other) => panic!("{other}"),
            };
            if rng.random_range(0..5) == 0 {
                for _ in 0..rng.random_range(0..ANSWER_LEN) {
                    drop(stream.next().await);
                }
                counts.canceled.fetch_add(1, Ordering::Relaxed);
                break;
            }
            let answer = stream.collect_text().await.expect("an answer");
            counts.answers.fetch_add(1, Ordering::Relaxed);
            let got = bits(&answer);
            if got != question.answer {
                counts.wrong.fetch_add(1, Ordering::Relaxed);
                // What can be known of a failure that comes once in many thousands.
                println!(
                    "wrong, {} prompt tokens, {session:?}, {:?}:\n{got:x?}, expected\n{:x?}",
                    question.prompt_len, answer.finish.usage, question.answer
                );
            }
        }
        if let Some(id) = session {
            engine.sessions().close(&id);
        }
    }
}

/// Compares `answers` answers of a model with a tier. Returns the number of wrong answers.
#[allow(clippy::print_stdout, reason = "the figures by kind and tier are the test's report")]
async fn compare(
    kind: Kind,
    tier: Tier,
    sizes: Sizes,
    conversations: &Arc<Conversations>,
    answers: usize,
) -> usize {
    // The other test of this file may run at the same time.
    let directory = Directory::new(&format!("exactness-{answers}"));
    let counts = Arc::new(Counts::default());
    let (mut cached, mut loaded, mut evictions) = (0, 0, 0);
    for part in 0..STARTS {
        let builder = kind.guessing_builder().num_blocks(sizes.blocks);
        let builder = tier.apply(builder, &directory.0, sizes);
        let engine = start(builder.max_batched_tokens(96).max_running(4)).await;
        let removing = tokio::spawn({
            let engine = engine.clone();
            async move {
                // Flushes at varying intervals: some prefixes are removed before the request that
                // would find them starts, and others are evicted earlier.
                for wait in (0..).map(|n| [5, 10, 20, 100][n % 4]) {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                    engine.cache().flush().await.expect("it runs");
                }
            }
        });
        let enough = answers * (part + 1) / STARTS;
        let clients = (0..CLIENTS).map(|index| {
            let seed = (part * CLIENTS + index) as u64;
            let (conversations, counts) = (Arc::clone(conversations), Arc::clone(&counts));
            tokio::spawn(client(engine.clone(), conversations, counts, seed, enough))
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.expect("no panic");
        }
        removing.abort();
        engine.tiers().flush().await.expect("it runs");
        while engine.stats().running + engine.stats().waiting > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let stats = engine.stats();
        cached += stats.cached_tokens;
        loaded += stats.loaded_tokens;
        evictions += stats.evictions;
        assert_eq!(stats.model_drafted_tokens > 0, kind.guesses.is_some(), "{}", kind.name);
        let audit = engine.audit().await.expect("consistent accounting");
        assert_eq!(audit.blocks_reserved, 0);
        engine.shutdown().await;
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let wrong = count(&counts.wrong);
    println!(
        "{}, {tier:?}: {wrong} of {} answers wrong, {} requests canceled, {cached} tokens cached, \
         {loaded} loaded, {evictions} blocks evicted",
        kind.name,
        count(&counts.answers),
        count(&counts.canceled),
    );
    assert!(cached > 0, "the cache was not used");
    assert_eq!(loaded > 0, tier != Tier::Pool, "the tier was not used");
    wrong
}

/// Compares answers of all tiers. Returns the number of wrong answers.
async fn compare_tiers(kind: Kind, tiers: &[Tier], answers: usize) -> usize {
    let cold = start(kind.builder().prefix_caching(false)).await;
    let conversations = Arc::new(kind.conversations(&cold).await);
    let info = cold.model_info();
    let block_bytes = (info.kv_bytes / info.num_blocks).max(1);
    // Room for about four of the longest prompts, so most cached prefixes are soon evicted.
    let lens = conversations.iter().flatten().map(|question| question.prompt_len);
    let longest = lens.max().expect("there are questions") + ANSWER_LEN;
    let blocks = 4 * longest.div_ceil(info.block_size) + 4 * info.state_bytes.div_ceil(block_bytes);
    // About three of them with checkpoints. A record is at least one image, however long it is.
    let kv_bytes = 3 * longest.div_ceil(info.block_size) * block_bytes;
    let small_disk = (kv_bytes + 8 * info.state_bytes) as u64;
    let sizes = Sizes { blocks, small_disk, has_state: info.state_bytes > 0 };
    cold.shutdown().await;
    let mut wrong = 0;
    for &tier in tiers {
        wrong += compare(kind, tier, sizes, &conversations, answers).await;
    }
    wrong
}

/// Goal: a few hundred answers of a model with a recurrent state, of one with windows in states, and
/// of one whose KV has 4 bits, have the bits of an engine without a cache with and without a disk tier.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_do_not_depend_on_the_cache() {
    let tried = |kind: &&Kind| {
        ["falcon_h1", "gpt_oss"].contains(&kind.model) || kind.name == "full attention, 4 bits"
    };
    for kind in KINDS.iter().filter(tried) {
        assert_eq!(compare_tiers(*kind, &[Tier::Pool, Tier::Disk], 200).await, 0, "{}", kind.name);
    }
}

/// Goal: 20,000 answers of each kind of model with each tier have the bits of an engine without a
/// cache. The variable `STOLON_EXACT_ANSWERS` sets another number of answers, and
/// `STOLON_EXACT_KINDS` a string that the names of the tried kinds contain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes an hour"]
async fn no_answer_of_any_kind_depends_on_the_cache() {
    let variable = |name: &str| std::env::var(name).ok();
    let answers = variable("STOLON_EXACT_ANSWERS").map(|count| count.parse().expect("a number"));
    let part = variable("STOLON_EXACT_KINDS").unwrap_or_default();
    let (mut wrong, mut kinds) = (0, 0);
    for kind in KINDS.iter().filter(|kind| kind.name.contains(&part)) {
        wrong += compare_tiers(*kind, TIERS, answers.unwrap_or(20_000)).await;
        kinds += 1;
    }
    assert!(kinds > 0, "no kind has {part} in its name");
    assert_eq!(wrong, 0, "wrong answers of {kinds} kinds");
}
