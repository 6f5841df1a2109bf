//! Measures what a step of the CPU engine costs, and writes the cost model of the simulations.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin calibrate -- --machine "2 cores of ..." \
//!     > benches/calibration/demo.json
//! ```

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use clap::Parser;
use stolon_benches::cost;
use stolon_model::{CpuBackend, CpuOptions, KvBudget, LoadOptions, ModelSource};

#[derive(Debug, Parser)]
struct Args {
    /// The model: `demo`, a directory, a .gguf file or `random:PRESET`
    #[arg(long, default_value = "demo")]
    model: String,
    /// The machine, in words, for the record
    #[arg(long)]
    machine: String,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let source = match args.model.as_str() {
        "demo" => ModelSource::Demo,
        other => other.parse()?,
    };
    let loaded = stolon_model::load(&source, &LoadOptions::default())?;
    let options = CpuOptions { kv_budget: KvBudget::Blocks(18 * 128), ..CpuOptions::default() };
    let mut backend = CpuBackend::new(loaded.config, loaded.weights, options)?;
    let model = cost::measure(&mut backend, args.model, args.machine)?;
    println!("{}", serde_json::to_string_pretty(&model)?);
    Ok(())
}
