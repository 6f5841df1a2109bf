//! Draws the times to first token that `stolon bench tiers --json` has measured, per turn and tier.
//!
//! ```sh
//! stolon bench tiers --json | cargo run --release -p stolon-benches --bin plot_tiers -- tiers.svg
//! ```

#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use serde_json::Value;
use stolon_benches::plot::{self, Labels, Line};

/// Draw the output of `stolon bench tiers --json`, which is read from standard input.
#[derive(Debug, Parser)]
struct Args {
    /// SVG file to write
    file: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let measured: Value = serde_json::from_reader(std::io::stdin().lock())?;
    let tiers =
        measured["tiers"].as_array().context("expected the tiers of `bench tiers --json`")?;
    let line = |tier: &Value| {
        let turns = tier["turns"].as_array().into_iter().flatten();
        let medians = turns.filter_map(|turn| turn["ttft_ms"]["p50"].as_f64());
        Line {
            name: tier["tier"].as_str().unwrap_or_default().to_owned(),
            points: medians.zip(1..).map(|(ms, turn)| (f64::from(turn), ms)).collect(),
        }
    };
    let model = measured["model"].as_str().unwrap_or_default();
    let title = format!("{model}: conversations whose KV is larger than the pool");
    let labels = Labels { title: &title, x: "turn", y: "time to first token, ms" };
    plot::lines(&args.file, labels, &tiers.iter().map(line).collect::<Vec<_>>(), false)
}
