//! `stolon bench tiers`: what tiers besides the KV pool save when conversations do not fit in it,
//! and after a restart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;
use stolon::Engine;

use super::progress;
use crate::args::{DEFAULT_BLOCK_SIZE, EngineArgs};
use crate::terminal;
use stolon_loadgen::drive::{closed_loop, in_turns};
use stolon_loadgen::metrics::{RequestRecord, Spread, median, share, throughputs};
use stolon_loadgen::rng::SeededRng;
use stolon_loadgen::workload::{Conversation, Turn, Vocabulary};

/// Size of the disk in front of an object store: room for little, so that the store is measured.
#[cfg(feature = "object-store")]
const STORE_DISK_BYTES: u64 = 32 << 20;
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
    /// KV of all conversations at their ends, as a multiple of the KV pool
    #[arg(long, default_value_t = 4.0, value_name = "TIMES")]
    working_set: f64,
    /// Length of the prefix that is read back after a restart, in tokens
    #[arg(long, default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    prefix: u32,
    /// Where KV is stored in the runs that are compared: only in the KV `pool`, in `memory` (a
    /// directory below `/dev/shm`), on `disk` (below `--kv-cache-dir`, by default the directory for
    /// temporary files), or in the `object-store` of `--kv-object-store`, in a folder of its own
    /// that is left there, with a disk of 32 MiB in front of it
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

/// Where KV is stored.
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
    /// Where it stores KV; nothing is there for the pool alone.
    directory: Directory,
    /// The answers of each run: by conversation, then by turn.
    runs: Vec<Vec<RequestRecord>>,
}

/// Figures of the requests of one turn of all conversations, or of all turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Figures {
    ttft_ms: Spread,
    /// Prompt tokens that were not computed, 0 to 1.
    cached_share: f64,
}

/// Times to first token of a prefix, in milliseconds: medians.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Restart {
    cold_ms: f64,
    warm_ms: f64,
    restarted_ms: f64,
}

impl Side {
    fn throughput(&self) -> f64 {
        median(throughputs(&self.runs))
    }

    /// The requests of one turn of all conversations, or of all turns.
    fn figures(&self, rounds: usize, round: Option<usize>) -> Figures {
        let of_round = |index: usize| round.is_none_or(|round| index % rounds == round);
        let records: Vec<&RequestRecord> = (self.runs.iter())
            .flat_map(|run| run.iter().enumerate().filter(|(index, _)| of_round(*index)))
            .map(|(_, record)| record)
            .collect();
        Figures {
            ttft_ms: Spread::of_ms(records.iter().filter_map(|record| record.ttft_ms())),
            cached_share: share(
                records.iter().map(|record| record.cached_tokens).sum(),
                records.iter().map(|record| record.prompt_tokens).sum(),
            ),
        }
    }
}

/// A new directory below another one, which is removed in the end.
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

    /// A name in it for an empty directory. What earlier ones contain stays until the end: after
    /// many files were removed, file systems are slower to make new ones for minutes.
    fn next(&mut self) -> PathBuf {
        self.used += 1;
        self.path.join(self.used.to_string())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory that is left behind is an annoyance only.
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
        let parent = self.engine.kv_cache_dir.take().unwrap_or_else(std::env::temp_dir);
        let mut sides = Vec::new();
        for &tier in &self.tiers {
            let parent = if tier == Tier::Memory { Path::new("/dev/shm") } else { &parent };
            sides.push(Side { tier, directory: Directory::new(parent, tier)?, runs: Vec::new() });
        }
        let mut model = String::new();
        for repeat in 0..self.repeats {
            for side in &mut sides {
                let directory = side.directory.next();
                let store = own_store.as_ref().filter(|_| side.tier == Tier::ObjectStore);
                let store = store.map(|url| format!("{url}/bench-{}-{repeat}", std::process::id()));
                let engine = self.start(side.tier, &directory, store).await?;
                model.clone_from(&engine.model_info().id);
                side.runs.push(self.converse(&engine, side.tier, repeat).await?);
                engine.shutdown().await;
            }
            sides.rotate_left(1);
        }
        sides.sort_by_key(|side| self.tiers.iter().position(|&tier| tier == side.tier));
        let restarted = |side: &&mut Side| matches!(side.tier, Tier::Disk | Tier::Memory);
        let restart = match sides.iter_mut().find(restarted) {
            Some(side) => Some(self.restart(side).await?),
            None => None,
        };
        self.report(&model, &sides, restart)
    }

    /// The object store of the arguments, which only some of the runs have.
    #[cfg(feature = "object-store")]
    fn take_object_store(&mut self) -> Option<String> {
        self.engine.kv_object_store.take()
    }

    #[cfg(not(feature = "object-store"))]
    fn take_object_store(&mut self) -> Option<String> {
        None
    }

    /// Tokens of a conversation at its end.
    fn conversation_tokens(&self) -> usize {
        self.rounds as usize * (self.input_tokens + self.output_tokens) as usize
    }

    /// Starts an engine whose KV pool has the size of the benchmark.
    async fn start(
        &self,
        tier: Tier,
        directory: &Path,
        store: Option<String>,
    ) -> anyhow::Result<Engine> {
        let all = self.clients as usize * self.conversation_tokens();
        let running = self.concurrency as usize * self.conversation_tokens();
        let pool = (all as f64 / self.working_set) as usize;
        anyhow::ensure!(
            pool >= running,
            "expected room for --concurrency conversations in the KV pool, {running} tokens, got \
             {pool}: raise --clients, or lower --working-set or --concurrency"
        );
        // A prefix of the second part fits, too.
        let tokens = pool.max(self.prefix as usize + 2 * SUFFIX_TOKENS);
        let block_size = self.engine.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
        let mut builder = self.engine.builder()?.num_blocks(tokens.div_ceil(block_size) + 1);
        if tier != Tier::Pool {
            builder = self.engine.with_disk(builder, directory);
        }
        #[cfg(feature = "object-store")]
        if let Some(url) = store {
            builder = builder.kv_cache_dir(directory, STORE_DISK_BYTES).kv_object_store(url);
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
    async fn restart(&self, side: &mut Side) -> anyhow::Result<Restart> {
        let tier = side.tier;
        let mut times = [const { Vec::new() }; 3];
        for repeat in 0..self.repeats.max(3) {
            let directory = side.directory.next();
            let engine = self.start(tier, &directory, None).await?;
            let mut rng = SeededRng::new(self.seed.wrapping_add(u64::from(repeat)));
            let vocabulary = vocabulary(&engine);
            let prefix = vocabulary.draw(&mut rng, self.prefix as usize);
            let prompts = [(); 3]
                .map(|()| [prefix.clone(), vocabulary.draw(&mut rng, SUFFIX_TOKENS)].concat());
            // The first request of an engine pays for memory that is used for the first time.
            first_token(&engine, &prompts[0][self.prefix as usize..]).await?;
            times[0].push(first_token(&engine, &prompts[0]).await?);
            // Otherwise the next one would be measured while this one is written.
            engine.tiers().flush().await?;
            times[1].push(first_token(&engine, &prompts[1]).await?);
            engine.tiers().flush().await?;
            engine.shutdown().await;
            let engine = self.start(tier, &directory, None).await?;
            first_token(&engine, &prompts[0][self.prefix as usize..]).await?;
            times[2].push(first_token(&engine, &prompts[2]).await?);
            engine.shutdown().await;
        }
        let [cold_ms, warm_ms, restarted_ms] = times.map(median);
        Ok(Restart { cold_ms, warm_ms, restarted_ms })
    }

    fn report(&self, model: &str, sides: &[Side], restart: Option<Restart>) -> anyhow::Result<()> {
        let rounds = self.rounds as usize;
        if self.json {
            let side = |side: &Side| {
                let figures = |round| side.figures(rounds, round);
                json!({
                    "tier": side.tier.name(),
                    "turns": (0..rounds).map(|round| figures(Some(round))).collect::<Vec<_>>(),
                    "all": figures(None),
                    "throughput_tok_s": side.throughput(),
                })
            };
            terminal::line(json!({
                "model": model,
                "clients": self.clients,
                "tiers": sides.iter().map(side).collect::<Vec<_>>(),
                "restart": restart,
            }))?;
            return Ok(());
        }
        terminal::line(format!(
            "{model}: {} conversations of {rounds} turns with {} tokens each, {} generated, {} \
             requests at a time; the KV of all is {} times the pool\n",
            self.clients, self.input_tokens, self.output_tokens, self.concurrency, self.working_set,
        ))?;
        let Some(first) = sides.first() else { return Ok(()) };
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let against = format!("of {}", first.tier.name());
        let heading = ["", "tier", "cached", "TTFT p50", "p99", &against];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        for round in (0..rounds).map(Some).chain([None]) {
            let name = round.map_or("all turns".to_owned(), |round| format!("turn {}", round + 1));
            let base = first.figures(rounds, round).ttft_ms.p50;
            for side in sides {
                let Figures { ttft_ms, cached_share } = side.figures(rounds, round);
                rows.push(vec![
                    name.clone(),
                    side.tier.name().to_owned(),
                    format!("{:.1} %", cached_share * 100.0),
                    ms(ttft_ms.p50),
                    ms(ttft_ms.p99),
                    format!("{:.3}", ratio(ttft_ms.p50, base)),
                ]);
            }
        }
        terminal::stream(&terminal::table(&rows))?;
        for side in sides {
            let (speed, base) = (side.throughput(), first.throughput());
            terminal::line(format!(
                "throughput with {}: {speed:.0} tok/s, {:.2} times",
                side.tier.name(),
                ratio(speed, base)
            ))?;
        }
        if let Some(Restart { cold_ms, warm_ms, restarted_ms }) = restart {
            terminal::line(format!(
                "prefix of {} tokens: first token after {} cold, {} from the pool, {} after a restart",
                self.prefix,
                ms(cold_ms),
                ms(warm_ms),
                ms(restarted_ms),
            ))?;
        }
        Ok(())
    }
}

fn ms(value: f64) -> String {
    format!("{value:.1} ms")
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
