//! Computes how many of their prompt tokens requests find in the cache, for a model with a
//! recurrent state of the shape of Qwen3.5-0.8B, with different amounts of memory and orders of
//! eviction. Prints a Markdown table.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin checkpoints
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the table is printed")]

use clap::Parser;
use stolon_benches::checkpoints::{Order, Savings, StateWorkload, ends_of_prompts, run};
use stolon_kvcache::EvictionPolicy;

/// A pool in which nothing is evicted.
const ENOUGH_BLOCKS: usize = 1 << 23;

/// Simulate the cache of a model with a recurrent state.
#[derive(Debug, Parser)]
struct Args {
    /// Number of requests of each workload
    #[arg(long, default_value_t = 10_000)]
    requests: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let lru = Order::Policy(EvictionPolicy::Lru);
    println!(
        "| workload | memory | attention only | ends of prompts | LRU | SLRU | Marconi | cost-aware |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for workload in StateWorkload::ALL {
        let run =
            |blocks, order, has_states| run(workload, args.requests, blocks, order, has_states);
        let everything = run(ENOUGH_BLOCKS, lru, true)?;
        let attention = run(ENOUGH_BLOCKS, lru, false)?;
        println!(
            "| {} | all | {} | {} | {} | | | |",
            workload.name(),
            show(attention),
            show(ends_of_prompts(workload, args.requests)),
            show(everything)
        );
        for percent in [1, 5, 20] {
            let blocks = everything.blocks * percent / 100;
            let mut marconi = Savings::default();
            for weight in [0, 100, 1_000, 10_000] {
                let other = run(blocks, Order::Marconi { weight }, true)?;
                marconi = if other.rate() > marconi.rate() { other } else { marconi };
            }
            println!(
                "| | {percent} % | {} | | {} | {} | {} | {} |",
                show(run(blocks, lru, false)?),
                show(run(blocks, lru, true)?),
                show(run(blocks, Order::Policy(EvictionPolicy::Slru), true)?),
                show(marconi),
                show(run(blocks, Order::Policy(EvictionPolicy::CostAware), true)?),
            );
        }
    }
    println!("\nMarconi: the best of four weights for each row.");
    Ok(())
}

fn show(savings: Savings) -> String {
    format!("{:.1} %", 100.0 * savings.rate())
}
