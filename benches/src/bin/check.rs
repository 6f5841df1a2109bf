//! The standard workloads on the CPU engine with the demo model: beside the simulation of the same
//! conversations, or, with `--loads`, offered at shares and multiples of what can be served.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin check
//! cargo run --release -p stolon-benches --bin check -- --loads 0.5,1,2
//! ```

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use clap::Parser;
use stolon::{Engine, ModelSource};
use stolon_actors::CoreConfig;
use stolon_benches::cost::CostModel;
use stolon_benches::drive::{capacity, simulate};
use stolon_benches::real;
use stolon_benches::report::Summary;
use stolon_benches::workload::{Conversation, Shape};

#[derive(Debug, Parser)]
struct Args {
    /// A cost model of the demo model: `demo`, which is kept with the code, or a file
    #[arg(long, default_value = "demo")]
    calibration: String,
    /// Unshared requests that the pool holds
    #[arg(long, default_value_t = 8)]
    pool: usize,
    /// Arrivals as a share of what can be served by the simulation
    #[arg(long, default_value_t = 0.8)]
    load: f64,
    /// Do not simulate: offer these multiples of what as many clients get as may wait, who hold
    /// one conversation after another
    #[arg(long, value_delimiter = ',')]
    loads: Vec<f64>,
    /// Requests that may wait at the door, with `--loads`
    #[arg(long, default_value_t = 32)]
    max_queued: usize,
    /// Uncached prompt tokens that may wait at the door, with `--loads`
    #[arg(long, default_value_t = usize::MAX)]
    max_queued_tokens: usize,
    /// Seconds between an answer's end and the next turn, with `--loads`
    #[arg(long, default_value_t = 0.25)]
    think: f64,
    /// Tokens that a load is to generate at most, with `--loads`: a workload's first conversations
    #[arg(long, default_value_t = 100_000)]
    output: usize,
    /// Only the workload whose name begins so
    #[arg(long)]
    only: Option<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    println!("{}", if args.loads.is_empty() { COMPARE_HEAD } else { OFFER_HEAD });
    for shape in Shape::ALL {
        if args.only.as_ref().is_some_and(|only| !shape.name().starts_with(only.as_str())) {
            continue;
        }
        match args.loads.is_empty() {
            true => compare(&args, shape).await?,
            false => offer(&args, shape).await?,
        }
    }
    Ok(())
}

async fn engine(
    args: &Args,
    shape: Shape,
    max_requests: usize,
    max_tokens: usize,
) -> anyhow::Result<Engine> {
    let builder = Engine::builder()
        .model(ModelSource::Demo)
        .num_blocks(shape.spec(args.pool, 1).block_count)
        .max_queued_requests(max_requests)
        .max_queued_tokens(max_tokens);
    Ok(builder.build().await?)
}

/// The conversations, as far as the model's context holds them.
fn plan(shape: Shape, rate: f64, engine: &Engine, seed: u64) -> Vec<Conversation> {
    let info = engine.model_info();
    let conversations = shape.conversations(rate, info.vocab_size, seed);
    let within = |conversation: Conversation| conversation.within(info.max_positions);
    conversations.into_iter().map(within).collect()
}

const COMPARE_HEAD: &str = "| | TTFT p50, ms | TTFT p99, ms | whole answer p50, ms | \
     output, tokens/s | hit rate |\n|---|---|---|---|---|---|";

/// The same conversations on both, side by side.
async fn compare(args: &Args, shape: Shape) -> anyhow::Result<()> {
    let cost = CostModel::named(&args.calibration)?;
    let engine = engine(args, shape, 1 << 20, usize::MAX).await?;
    let config = CoreConfig {
        max_queued_requests: 1 << 20,
        max_queued_tokens: usize::MAX,
        ..CoreConfig::default()
    };
    let spec = shape.spec(args.pool, engine.model_info().vocab_size);
    let rate = args.load * capacity(shape, &spec, &config, &cost, 0)?;
    let plan = plan(shape, rate, &engine, 0);
    let simulated = Summary::of(&simulate(&plan, spec, config, &cost)?);
    let measured = Summary::of(&real::offer(&engine, &plan).await?);
    for (name, summary) in [("simulated", simulated), ("measured", measured)] {
        println!(
            "| {}, {rate:.1} a second, {name} | {:.1} | {:.1} | {:.1} | {:.0} | {:.1} % |",
            shape.name(),
            summary.ttft_p50,
            summary.ttft_p99,
            summary.latency_p50,
            summary.output_rate,
            summary.hit_rate * 100.0
        );
    }
    engine.shutdown().await;
    Ok(())
}

const OFFER_HEAD: &str = "| | offered | a second | sent | refused | slowest refusal, ms | \
     output, tokens/s | of the peak | TTFT p50, ms | TTFT p99, ms | answer p50, ms | \
     slowest answer, ms | hit rate |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|";

/// Each load on an empty cache, through a door that lets a few wait.
async fn offer(args: &Args, shape: Shape) -> anyhow::Result<()> {
    // What can be served is measured through a door that refuses nobody.
    let open = engine(args, shape, args.max_queued, usize::MAX).await?;
    let engine = engine(args, shape, args.max_queued, args.max_queued_tokens).await?;
    // Four times the 24 conversations, so that a load is there for some while.
    let seeds = if shape == Shape::MultiTurn { 4 } else { 1 };
    let all_at = |rate: f64| {
        let mut all: Vec<Conversation> = Vec::new();
        for seed in 0..seeds {
            let begin = all.last().map_or(0.0, |last| last.at);
            let later = |plan: Conversation| {
                let at = begin + plan.at;
                Conversation { at, think: args.think, ..plan }
            };
            all.extend(plan(shape, rate, &engine, seed).into_iter().map(later));
        }
        let mut output = 0;
        let fits = |plan: &Conversation| {
            output += plan.turns.iter().map(|turn| turn.output).sum::<usize>();
            output <= args.output
        };
        all.into_iter().take_while(fits).collect::<Vec<_>>()
    };
    let capacity = real::capacity(&open, &all_at(f64::INFINITY), args.max_queued).await?;
    open.shutdown().await;
    let mut levels = Vec::new();
    for &load in &args.loads {
        engine.flush().await?;
        let run = real::offer(&engine, &all_at(load * capacity)).await?;
        levels.push((load, Summary::of(&run), run.rejected, run.slowest_refusal));
    }
    let peak = levels.iter().map(|(_, level, ..)| level.output_rate).fold(0.0, f64::max);
    for (load, level, rejected, slowest_refusal) in levels {
        println!(
            "| {} | {load} | {:.1} | {} | {rejected} | {slowest_refusal:.2} | {:.0} | {:.2} | {:.1} | \
             {:.1} | {:.1} | {:.0} | {:.1} % |",
            shape.name(),
            load * capacity,
            level.requests + rejected,
            level.output_rate,
            level.output_rate / peak,
            level.ttft_p50,
            level.ttft_p99,
            level.latency_p50,
            level.latency_most,
            level.hit_rate * 100.0,
        );
    }
    engine.shutdown().await;
    Ok(())
}
