//! Computes what a main agent and its three sub-agents find in a cache that is too small for all of
//! them, with each order of eviction. Prints a Markdown table.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin sub_agents
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the table is printed")]

use clap::Parser;
use stolon_benches::cost::CostModel;
use stolon_benches::sub_agents::{Hints, Outcome, run};
use stolon_kvcache::EvictionPolicy;
use stolon_loadgen::metrics::Distribution;

/// Simulate an hour of agents with sub-agents in a small pool.
#[derive(Debug, Parser)]
struct Args {
    /// Cost model of the steps: `100m`, `demo`, or a file written by `calibrate`
    #[arg(long, default_value = "100m")]
    calibration: String,
    /// Size of the KV pool, as a share of what all agents have in their contexts at most
    #[arg(long, default_values_t = [0.5, 0.75], value_delimiter = ',')]
    pools: Vec<f64>,
    /// Number of main agents, each with three sub-agents
    #[arg(long, default_values_t = [1, 2], value_delimiter = ',')]
    teams: Vec<usize>,
    /// A model with recurrent layers, of the shape of Qwen3.5-0.8B
    #[arg(long)]
    recurrent: bool,
    /// Speeds of a disk that has everything that was computed, in GB/s. Not with `--recurrent`
    #[arg(long, value_delimiter = ',', conflicts_with = "recurrent")]
    disks: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let cost = CostModel::named(&args.calibration)?;
    for &teams in &args.teams {
        for &pool in &args.pools {
            println!("\n## {teams} main agents, pool of {:.0} %\n", pool * 100.0);
            println!(
                "| order | hit rate | read from the disk, tokens | computed again, tokens | used within a minute before | turns | \
                 first token p50 / p95, main, ms | sub-agents |"
            );
            println!("|---|---|---|---|---|---|---|---|");
            for policy in EvictionPolicy::ALL {
                let outcome = run(teams, pool, policy, Hints::None, args.recurrent, None, &cost)?;
                println!("{}", row(policy.name(), &outcome));
            }
            for &speed in &args.disks {
                for policy in [EvictionPolicy::Lru, EvictionPolicy::CostAware] {
                    let outcome =
                        run(teams, pool, policy, Hints::None, false, Some(speed * 1e9), &cost)?;
                    println!("{}", row(&format!("{policy}, disk of {speed} GB/s"), &outcome));
                }
            }
            for policy in [EvictionPolicy::Priority, EvictionPolicy::Lru] {
                let outcome =
                    run(teams, pool, policy, Hints::MainFirst, args.recurrent, None, &cost)?;
                println!("{}", row(&format!("{policy}, main agent first"), &outcome));
            }
        }
    }
    Ok(())
}

fn row(name: &str, outcome: &Outcome) -> String {
    let [main, sub] = outcome.first_token_ms.clone().map(|times| {
        let times = Distribution::of_ms(times);
        format!("{:.0} / {:.0}", times.percentile_ms(50.0), times.percentile_ms(95.0))
    });
    format!(
        "| {name} | {:.1} % | {} | {} | {} | {} + {} | {main} | {sub} |",
        100.0 * outcome.hit_rate(),
        outcome.read_tokens,
        outcome.lost_tokens,
        outcome.soon_lost_tokens,
        outcome.turns[0],
        outcome.turns[1],
    )
}
