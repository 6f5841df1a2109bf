//! Runs the standard workloads on the CPU engine with the demo model. By default it also simulates
//! the same conversations, to check the simulation. With `--loads` it sends the workloads at
//! multiples of the engine's capacity.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin check
//! cargo run --release -p stolon-benches --bin check -- --loads 0.5,1,2
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the tables are printed")]

use std::time::Duration;

use clap::Parser;
use stolon::{Engine, ModelSource};
use stolon_benches::cost::CostModel;
use stolon_benches::report::Summary;
use stolon_benches::simulation::{capacity, simulate};
use stolon_benches::workload::Workload;
use stolon_loadgen::drive::{closed_loop, open_loop};
use stolon_loadgen::workload::Conversation;
use stolon_scheduler::EngineConfig;

/// Run the standard workloads on the CPU engine with the demo model.
#[derive(Debug, Parser)]
struct Args {
    /// Cost model of the demo model for the simulation: `demo`, `demo-amx`, or a file written by
    /// `calibrate`
    #[arg(long, default_value = "demo")]
    calibration: String,
    /// Size of the KV pool, as the number of requests of the largest size that it holds if they
    /// share nothing
    #[arg(long, default_value_t = 8, value_name = "REQUESTS")]
    pool: usize,
    /// Arrival rate as a multiple of the simulated capacity
    #[arg(long, default_value_t = 0.8)]
    load: f64,
    /// Do not simulate. Measure the engine's capacity with `--max-queued` clients, each of which
    /// holds one conversation after another, and send conversations at these multiples of it
    #[arg(long, value_delimiter = ',')]
    loads: Vec<f64>,
    /// Maximum number of queued requests, with `--loads`; more are refused
    #[arg(long, default_value_t = 32, value_name = "REQUESTS")]
    max_queued: usize,
    /// Maximum number of queued uncached prompt tokens, with `--loads`; more are refused
    #[arg(long, default_value_t = usize::MAX, value_name = "TOKENS")]
    max_queued_tokens: usize,
    /// Seconds between the end of an answer and the next turn, with `--loads`
    #[arg(long, default_value_t = 0.25, value_name = "SECONDS")]
    pause: f64,
    /// Use only the first conversations of a workload, which generate at most this many tokens;
    /// with `--loads`
    #[arg(long, default_value_t = 100_000, value_name = "TOKENS")]
    output: usize,
    /// Run only the workload whose name begins with this. Default: all
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    println!("{}", if args.loads.is_empty() { COMPARE_HEAD } else { OFFER_HEAD });
    for workload in Workload::ALL {
        if args.only.as_ref().is_some_and(|only| !workload.name().starts_with(only.as_str())) {
            continue;
        }
        match args.loads.is_empty() {
            true => compare(&args, workload).await?,
            false => offer(&args, workload).await?,
        }
    }
    Ok(())
}

async fn engine(
    args: &Args,
    workload: Workload,
    max_requests: usize,
    max_tokens: usize,
) -> anyhow::Result<Engine> {
    let builder = Engine::builder()
        .model(ModelSource::Demo)
        .num_blocks(workload.spec(args.pool, 1).block_count)
        .max_queued_requests(max_requests)
        .max_queued_tokens(max_tokens);
    Ok(builder.build().await?)
}

/// The workload's conversations, truncated to the model's context length.
fn plan(workload: Workload, rate: f64, engine: &Engine, seed: u64) -> Vec<Conversation> {
    let info = engine.model_info();
    let conversations = workload.conversations(rate, info.vocab_size, seed);
    let truncated = |conversation: Conversation| conversation.truncated(info.max_positions);
    conversations.into_iter().map(truncated).collect()
}

const COMPARE_HEAD: &str = "| | TTFT p50, ms | TTFT p99, ms | whole answer p50, ms | \
     output, tokens/s | hit rate |\n|---|---|---|---|---|---|";

/// Runs the same conversations in the simulation and on the engine, and prints both results.
async fn compare(args: &Args, workload: Workload) -> anyhow::Result<()> {
    let cost = CostModel::named(&args.calibration)?;
    let engine = engine(args, workload, 1 << 20, usize::MAX).await?;
    let config = EngineConfig {
        max_queued_requests: 1 << 20,
        max_queued_tokens: usize::MAX,
        ..EngineConfig::default()
    };
    let spec = workload.spec(args.pool, engine.model_info().vocab_size);
    let rate = args.load * capacity(workload, &spec, &config, &cost, 0)?;
    let plan = plan(workload, rate, &engine, 0);
    let simulated = Summary::of(&simulate(&plan, spec, config, &cost)?);
    let measured = Summary::of_records(&open_loop(&engine, &plan, || {}).await?.records);
    for (name, summary) in [("simulated", simulated), ("measured", measured)] {
        println!(
            "| {}, {rate:.1} per second, {name} | {:.1} | {:.1} | {:.1} | {:.0} | {:.1} % |",
            workload.name(),
            summary.ttft_ms.p50,
            summary.ttft_ms.p99,
            summary.latency_ms.p50,
            summary.output_rate,
            summary.hit_rate * 100.0
        );
    }
    engine.shutdown().await;
    Ok(())
}

const OFFER_HEAD: &str = "| | load | conversations/s | requests sent | refused | \
     slowest refusal, ms | output, tokens/s | fraction of the peak | TTFT p50, ms | TTFT p99, ms | \
     answer p50, ms | slowest answer, ms | hit rate |\n\
     |---|---|---|---|---|---|---|---|---|---|---|---|---|";

/// Sends the workload at each of the loads to an engine with a short queue and an empty cache.
async fn offer(args: &Args, workload: Workload) -> anyhow::Result<()> {
    // The capacity is measured on an engine that refuses nothing.
    let unlimited = engine(args, workload, args.max_queued, usize::MAX).await?;
    let engine = engine(args, workload, args.max_queued, args.max_queued_tokens).await?;
    // The 24 conversations of this workload are too few to load the engine for long.
    let seeds = if workload == Workload::MultiTurn { 4 } else { 1 };
    let all_at = |rate: f64| {
        let mut all: Vec<Conversation> = Vec::new();
        for seed in 0..seeds {
            let begin = all.last().map_or(Duration::ZERO, |last| last.start);
            let later = |conversation: Conversation| {
                let start = begin + conversation.start;
                let pause = Duration::from_secs_f64(args.pause);
                Conversation { start, pause, ..conversation }
            };
            all.extend(plan(workload, rate, &engine, seed).into_iter().map(later));
        }
        let mut output = 0;
        let fits = |conversation: &Conversation| {
            output += conversation.turns.iter().map(|turn| turn.output_tokens).sum::<usize>();
            output <= args.output
        };
        all.into_iter().take_while(fits).collect::<Vec<_>>()
    };
    let burst = all_at(f64::INFINITY);
    let served = closed_loop(&unlimited, &burst, args.max_queued, || {}).await?;
    anyhow::ensure!(served.refusals.is_empty(), "{} clients are too many", args.max_queued);
    unlimited.shutdown().await;
    let capacity = burst.len() as f64 / served.elapsed.as_secs_f64();
    let mut levels = Vec::new();
    for &load in &args.loads {
        engine.cache().flush().await?;
        let measured = open_loop(&engine, &all_at(load * capacity), || {}).await?;
        let slowest_refusal = measured.refusals.iter().max().copied().unwrap_or_default();
        let summary = Summary::of_records(&measured.records);
        levels.push((load, summary, measured.refusals.len(), slowest_refusal.as_secs_f64() * 1e3));
    }
    let peak = levels.iter().map(|(_, level, ..)| level.output_rate).fold(0.0, f64::max);
    for (load, level, refused, slowest_refusal) in levels {
        println!(
            "| {} | {load} | {:.1} | {} | {refused} | {slowest_refusal:.2} | {:.0} | {:.2} | {:.1} | \
             {:.1} | {:.1} | {:.0} | {:.1} % |",
            workload.name(),
            load * capacity,
            level.requests + refused,
            level.output_rate,
            level.output_rate / peak,
            level.ttft_ms.p50,
            level.ttft_ms.p99,
            level.latency_ms.p50,
            level.latency_ms_max,
            level.hit_rate * 100.0,
        );
    }
    engine.shutdown().await;
    Ok(())
}
