//! Measures the cost of a step of the CPU backend and prints the cost model for simulations.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin calibrate -- --machine "2 cores of ..." \
//!     > benches/calibration/demo.json
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the cost model is printed")]

use clap::Parser;
use stolon_benches::cost;
use stolon_checkpoint::{KvBudget, LoadOptions, ModelSource};
use stolon_cpu::{CpuBackend, CpuOptions};

/// Measure the cost model of simulations and print it as JSON.
#[derive(Debug, Parser)]
struct Args {
    /// Model to measure: `demo`, a Hugging Face directory, a `.gguf` file or `random:PRESET`
    #[arg(long, default_value = "demo")]
    model: String,
    /// Description of this machine, which is stored in the cost model
    #[arg(long, value_name = "TEXT")]
    machine: String,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let source = match args.model.as_str() {
        "demo" => ModelSource::Demo,
        other => other.parse()?,
    };
    let loaded = stolon_checkpoint::load(&source, &LoadOptions::default())?;
    let options = CpuOptions { kv_budget: KvBudget::Blocks(18 * 128), ..CpuOptions::default() };
    let mut backend = CpuBackend::new(loaded.config, loaded.weights, options)?;
    let model = cost::measure(&mut backend, args.model, args.machine)?;
    println!("{}", serde_json::to_string_pretty(&model)?);
    Ok(())
}
