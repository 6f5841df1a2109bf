//! `stolon bench tiers`: the time that tiers below the KV pool save when conversations do not fit
//! in the pool, and after a restart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use stolon::Engine;

use super::progress;
use crate::args::{DiskSize, EngineArgs};
use stolon_loadgen::drive::{closed_loop, in_turns};
use stolon_loadgen::metrics::{RequestRecord, median};
use stolon_loadgen::rng::SeededRng;
use stolon_loadgen::workload::{Conversation, Turn, Vocabulary};

use report::Restart;

mod report;

/// Size of the disk tier in front of an object store: small, so that mostly the store is measured.
const STORE_DISK_SIZE: DiskSize = DiskSize::Bytes(32 << 20);
/// Tokens after the shared prefix in the requests that measure a restart.
const SUFFIX_TOKENS: usize = 16;

/// Arguments of `stolon bench tiers`.
#[derive(Debug, Args)]
pub struct TiersArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Number of conversations
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Number of turns of each conversation
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=64))]
    #[arg(value_name = "TURNS")]
    rounds: u32,
    /// Tokens that each turn adds to its conversation's prompt
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    input_tokens: u32,
    /// Number of tokens to generate per turn
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    output_tokens: u32,
    /// Number of requests in progress at a time
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "REQUESTS")]
    concurrency: u32,
    /// KV of all conversations at their ends, as a multiple of the KV pool. A model with a recurrent
    /// state has a copy of it for each conversation
    #[arg(long, default_value_t = 4.0, value_name = "TIMES")]
    working_set: f64,
    /// Length of the prefix that is read back after a restart, in tokens
    #[arg(long, default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    prefix: u32,
    /// Where KV is stored in the runs that are compared: only in the KV `pool`, in `memory` (a
    /// directory below `/dev/shm`), on `disk` (below `--kv-cache-dir`, by default the directory for
    /// temporary files), or in the `object-store` of `--kv-object-store`, in a new folder that is
    /// not removed, with a disk tier of 32 MiB in front of it
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Tier::Pool, Tier::Disk])]
    tiers: Vec<Tier>,
    /// Number of runs with each of `--tiers`, by turns
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Seed of the prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A place in which KV is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    Pool,
    Memory,
    Disk,
    ObjectStore,
}

impl Tier {
    fn name(self) -> &'static str {
        match self {
            Tier::Pool => "pool",
            Tier::Memory => "memory",
            Tier::Disk => "disk",
            Tier::ObjectStore => "object store",
        }
    }
}

/// The runs with one tier.
struct Side {
    tier: Tier,
    /// Directory in which the tier stores KV; it stays empty for the pool alone.
    directory: Directory,
    /// Maximum size of the KV in the directory.
    size: DiskSize,
    /// The answers of each run: by conversation, then by turn.
    runs: Vec<Vec<RequestRecord>>,
}

/// A new directory below another one. It is removed on drop.
struct Directory {
    path: PathBuf,
    /// Number of directories in it that have been used.
    used: usize,
}

impl Directory {
    fn new(parent: &Path, tier: Tier) -> anyhow::Result<Directory> {
        let name = format!("stolon-bench-tiers-{}-{}", std::process::id(), tier.name());
        let path = parent.join(name.replace(' ', "-"));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Directory { path, used: 0 })
    }

    /// The path of a new, empty directory in this one. Earlier ones stay until the end: after many
    /// files were removed, file systems create new ones more slowly for minutes.
    fn next(&mut self) -> PathBuf {
        self.used += 1;
        self.path.join(self.used.to_string())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory that is not removed does no harm, so errors are ignored.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl TiersArgs {
    pub(super) async fn run(mut self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.engine.num_blocks.is_none() && self.engine.kv_memory.is_none(),
            "--num-blocks and --kv-memory have no meaning here: --working-set gives the size of the \
             KV pool"
        );
        anyhow::ensure!(
            self.working_set.is_finite() && self.working_set > 0.0,
            "expected a --working-set above 0, got {}",
            self.working_set
        );
        let own_store = self.take_object_store();
        anyhow::ensure!(
            own_store.is_some() || !self.tiers.contains(&Tier::ObjectStore),
            "expected --kv-object-store for the object store of --tiers"
        );
        let parent = self.engine.tiers.kv_cache_dir.take().unwrap_or_else(std::env::temp_dir);
        let own_size = self.engine.tiers.kv_cache_dir_size.unwrap_or(DiskSize::DEFAULT);
        let mut sides = Vec::new();
        for &tier in &self.tiers {
            let parent = if tier == Tier::Memory { Path::new("/dev/shm") } else { &parent };
            let directory = Directory::new(parent, tier)?;
            let size = if tier == Tier::ObjectStore { STORE_DISK_SIZE } else { own_size };
            sides.push(Side { tier, directory, size, runs: Vec::new() });
        }
        let state_tokens = self.state_tokens().await?;
        let mut model = String::new();
        for repeat in 0..self.repeats {
            for side in &mut sides {
                let directory = side.directory.next();
                let store = own_store.as_ref().filter(|_| side.tier == Tier::ObjectStore);
                let store = store.map(|url| format!("{url}/bench-{}-{repeat}", std::process::id()));
                let place = (side.tier, &*directory, side.size);
                let engine = self.start(place, store, state_tokens).await?;
                model.clone_from(&engine.model_info().id);
                side.runs.push(self.converse(&engine, side.tier, repeat).await?);
                engine.shutdown().await;
            }
            sides.rotate_left(1);
        }
        sides.sort_by_key(|side| self.tiers.iter().position(|&tier| tier == side.tier));
        let restarted = |side: &&mut Side| matches!(side.tier, Tier::Disk | Tier::Memory);
        let restart = match sides.iter_mut().find(restarted) {
            Some(side) => Some(self.restart(side, state_tokens).await?),
            None => None,
        };
        self.report(&model, &sides, restart)
    }

    /// The object store of the arguments, which only some of the runs use.
    #[cfg(feature = "object-store")]
    fn take_object_store(&mut self) -> Option<String> {
        self.engine.tiers.kv_object_store.take()
    }

    #[cfg(not(feature = "object-store"))]
    fn take_object_store(&mut self) -> Option<String> {
        None
    }

    /// Tokens of a conversation at its end.
    fn conversation_tokens(&self) -> usize {
        self.rounds as usize * (self.input_tokens + self.output_tokens) as usize
    }

    /// The settings of an engine without a tier. The settings of tiers are for runs with one.
    fn without_tiers(&self) -> EngineArgs {
        let mut engine = self.engine.clone();
        let tiers = &mut engine.tiers;
        (tiers.kv_cache_dir_size, tiers.kv_write_policy, tiers.kv_prefetch_policy) =
            Default::default();
        engine
    }

    /// Number of tokens whose KV takes as much memory as a copy of the model's recurrent state; 0
    /// without one.
    async fn state_tokens(&self) -> anyhow::Result<usize> {
        let engine = self.without_tiers().builder()?.num_blocks(16).build().await?;
        let info = engine.model_info();
        let block_bytes = (info.kv_bytes / info.num_blocks).max(1);
        let tokens = info.state_bytes.div_ceil(block_bytes) * info.block_size;
        engine.shutdown().await;
        Ok(tokens)
    }

    /// Starts an engine whose KV pool has the size of the benchmark.
    async fn start(
        &self,
        (tier, directory, size): (Tier, &Path, DiskSize),
        store: Option<String>,
        state_tokens: usize,
    ) -> anyhow::Result<Engine> {
        let conversation = self.conversation_tokens() + state_tokens;
        let all = self.clients as usize * conversation;
        let running = self.concurrency as usize * conversation;
        let pool = (all as f64 / self.working_set) as usize;
        anyhow::ensure!(
            pool >= running,
            "expected room for --concurrency conversations in the KV pool, {running} tokens, got \
             {pool}: raise --clients, or lower --working-set or --concurrency"
        );
        // A prefix of the second part must fit, too, with states in it and at the ends of prompts.
        let prefix = self.prefix as usize + 2 * SUFFIX_TOKENS + 4 * state_tokens;
        let tokens = pool.max(prefix);
        let block_size = self.engine.cpu_block_size();
        let blocks = tokens.div_ceil(block_size) + 1;
        let mut builder = self.without_tiers().builder()?.num_blocks(blocks);
        if tier != Tier::Pool {
            builder = self.engine.tiers.with_disk(builder, directory, size);
        }
        #[cfg(feature = "object-store")]
        if let Some(url) = store {
            builder = builder.kv_object_store(url);
        }
        #[cfg(not(feature = "object-store"))]
        drop(store);
        let engine = builder.build().await?;
        let limit = engine.model_info().max_positions;
        let needed = self.conversation_tokens().max(self.prefix as usize + SUFFIX_TOKENS + 1);
        anyhow::ensure!(
            needed <= limit,
            "expected conversations and prefixes of at most {limit} tokens, which is the context \
             length of the model, got {needed}: lower --rounds, --input-tokens or --prefix"
        );
        Ok(engine)
    }

    /// Lets all conversations take turns.
    async fn converse(
        &self,
        engine: &Engine,
        tier: Tier,
        repeat: u32,
    ) -> anyhow::Result<Vec<RequestRecord>> {
        let mut rng = SeededRng::new(self.seed.wrapping_add(u64::from(repeat)));
        let vocabulary = vocabulary(engine);
        let mut turn = || Turn {
            tokens: vocabulary.draw(&mut rng, self.input_tokens as usize),
            output_tokens: self.output_tokens as usize,
        };
        let conversations: Vec<Conversation> = (0..self.clients)
            .map(|_| Conversation {
                turns: (0..self.rounds).map(|_| turn()).collect(),
                ..Conversation::default()
            })
            .collect();
        let count = (self.clients * self.rounds) as usize;
        let bar = progress::bar(count, tier.name());
        let concurrency = self.concurrency as usize;
        let measured = in_turns(engine, &conversations, concurrency, || bar.inc(1)).await?;
        bar.finish_and_clear();
        anyhow::ensure!(
            measured.records.len() == count,
            "the engine refused requests because its queue was full: raise --max-queued or \
             --max-queued-tokens"
        );
        Ok(measured.records)
    }

    /// Measures one prefix cold, from the pool, and from the tier after a restart.
    async fn restart(&self, side: &mut Side, state_tokens: usize) -> anyhow::Result<Restart> {
        let tier = side.tier;
        let mut times = [const { Vec::new() }; 3];
        for repeat in 0..self.repeats.max(3) {
            let directory = side.directory.next();
            let engine = self.start((tier, &directory, side.size), None, state_tokens).await?;
            let mut rng = SeededRng::new(self.seed.wrapping_add(u64::from(repeat)));
            let vocabulary = vocabulary(&engine);
            let prefix = vocabulary.draw(&mut rng, self.prefix as usize);
            let prompts = [(); 3]
                .map(|()| [prefix.clone(), vocabulary.draw(&mut rng, SUFFIX_TOKENS)].concat());
            // The first request of an engine is slower, because its memory is used for the first
            // time.
            first_token(&engine, &prompts[0][self.prefix as usize..]).await?;
            times[0].push(first_token(&engine, &prompts[0]).await?);
            // Otherwise the next prefix would be measured while this one is still being written.
            engine.tiers().flush().await?;
            times[1].push(first_token(&engine, &prompts[1]).await?);
            engine.tiers().flush().await?;
            engine.shutdown().await;
            let engine = self.start((tier, &directory, side.size), None, state_tokens).await?;
            first_token(&engine, &prompts[0][self.prefix as usize..]).await?;
            times[2].push(first_token(&engine, &prompts[2]).await?);
            engine.shutdown().await;
        }
        let [cold_ms, warm_ms, restarted_ms] = times.map(median);
        Ok(Restart { cold_ms, warm_ms, restarted_ms })
    }
}

/// The token ids of a model's random prompts.
fn vocabulary(engine: &Engine) -> Vocabulary {
    let info = engine.model_info();
    Vocabulary::new(info.vocab_size, &info.eos_token_ids)
}

/// Time to the first token of a prompt, in milliseconds.
async fn first_token(engine: &Engine, prompt: &[u32]) -> anyhow::Result<f64> {
    let conversation = Conversation::single(Duration::ZERO, prompt.to_vec(), 1);
    let measured = closed_loop(engine, &[conversation], 1, || {}).await?;
    let time = measured.records.first().and_then(RequestRecord::ttft_ms);
    time.context("the engine refused a request because its queue was full")
}
