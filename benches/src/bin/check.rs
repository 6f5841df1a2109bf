//! Checks the simulation against the CPU engine: the same conversations on both, side by side.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin check
//! ```

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use clap::Parser;
use stolon::{Engine, ModelSource};
use stolon_actors::CoreConfig;
use stolon_benches::cost::CostModel;
use stolon_benches::drive::{capacity, real, simulate};
use stolon_benches::report::Summary;
use stolon_benches::workload::Shape;

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
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let cost = CostModel::named(&args.calibration)?;
    println!(
        "| | TTFT p50, ms | TTFT p99, ms | whole answer p50, ms | output, tokens/s | hit rate |\n\
         |---|---|---|---|---|---|"
    );
    for shape in [Shape::PrefixRepetition, Shape::NothingShared, Shape::ThinLeaves] {
        let engine = Engine::builder()
            .model(ModelSource::Demo)
            .num_blocks(shape.spec(args.pool, 1).block_count)
            .max_queued_requests(1 << 20)
            .max_queued_tokens(usize::MAX)
            .build()
            .await?;
        let config = CoreConfig {
            max_queued_requests: 1 << 20,
            max_queued_tokens: usize::MAX,
            ..CoreConfig::default()
        };
        let spec = shape.spec(args.pool, engine.model_info().vocab_size);
        let rate = args.load * capacity(shape, &spec, &config, &cost, 0)?;
        let plan = shape.conversations(rate, spec.vocab_size, 0);
        let simulated = Summary::of(&simulate(&plan, spec, config, &cost)?);
        let measured = Summary::of(&real(&engine, &plan).await?);
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
    }
    Ok(())
}
