//! Runs every admission policy on every standard workload in virtual time. Prints Markdown tables
//! and draws plots.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin simulate -- --plots benches/plots
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the tables are printed")]

use std::path::PathBuf;

use clap::Parser;
use stolon_benches::cost::CostModel;
use stolon_benches::plot::{self, Labels, Line};
use stolon_benches::report::Summary;
use stolon_benches::simulation::{Run, capacity, simulate};
use stolon_benches::workload::Workload;
use stolon_loadgen::metrics::{Distribution, RequestRecord};
use stolon_scheduler::{AdmissionPolicy, EngineConfig};

const VOCAB_SIZE: usize = 32_000;

/// Simulate every admission policy on every standard workload.
#[derive(Debug, Parser)]
struct Args {
    /// Cost model of a step: `demo`, `100m`, `demo-amx` or `100m-amx`, which are part of this
    /// program, or a file written by `calibrate`
    #[arg(long, default_value = "100m")]
    calibration: String,
    /// Directory to write plots to, as SVG; it is created if it does not exist. No plots if not
    /// given
    #[arg(long, value_name = "DIRECTORY")]
    plots: Option<PathBuf>,
    /// Size of the KV pool, as the number of requests of the largest size that it holds if they
    /// share nothing
    #[arg(long, default_value_t = 8, value_name = "REQUESTS")]
    pool: usize,
    /// Run only the workload whose name begins with this. Default: all
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// The scheduler's `max_overtake_tokens`. Default: the scheduler's own
    #[arg(long, value_name = "TOKENS")]
    overtake: Option<usize>,
    /// Maximum number of requests that run at the same time
    #[arg(long, default_value_t = 64, value_name = "REQUESTS")]
    max_running: usize,
    /// Arrival rate as a multiple of the capacity; `inf` sends everything at once. Default: the
    /// workload's own, 0.9 or 1.5
    #[arg(long)]
    load: Option<f64>,
    /// Seed of prompts and arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Args {
    fn config(&self, policy: AdmissionPolicy, conservative: bool) -> EngineConfig {
        let default = EngineConfig::default();
        EngineConfig {
            policy,
            conservative,
            max_running: self.max_running,
            max_queued_requests: 1 << 20,
            max_queued_tokens: usize::MAX,
            max_overtake_tokens: self.overtake.unwrap_or(default.max_overtake_tokens),
            ..default
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let cost = CostModel::named(&args.calibration)?;
    for workload in Workload::ALL {
        if args.only.as_ref().is_some_and(|only| !workload.name().starts_with(only.as_str())) {
            continue;
        }
        let spec = workload.spec(args.pool, VOCAB_SIZE);
        let config = args.config(AdmissionPolicy::Cost, false);
        let rate = args.load.unwrap_or(workload.load())
            * capacity(workload, &spec, &config, &cost, args.seed)?;
        let plan = workload.conversations(rate, VOCAB_SIZE, args.seed);
        println!(
            "\n#### {}: {} conversations, {rate:.2} per second, {} blocks\n\n{}",
            workload.name(),
            plan.len(),
            spec.block_count,
            Summary::TABLE_HEAD
        );
        let mut runs: Vec<(&str, Run)> = Vec::new();
        for (name, policy, conservative) in [
            ("fcfs, conservative", AdmissionPolicy::Fcfs, true),
            ("fcfs", AdmissionPolicy::Fcfs, false),
            ("longest-prefix", AdmissionPolicy::LongestPrefix, false),
            ("cost", AdmissionPolicy::Cost, false),
        ] {
            let config = args.config(policy, conservative);
            let run = simulate(&plan, spec.clone(), config, &cost)?;
            println!("{}", Summary::of(&run).row(name));
            runs.push((name, run));
        }
        if let Some(directory) = &args.plots {
            std::fs::create_dir_all(directory)?;
            let file = workload.name().replace(' ', "-");
            let title = format!("{}: time to first token", workload.name());
            let labels = Labels { title: &title, x: "ms", y: "fraction of requests" };
            let lines = |line: fn(&Run) -> Vec<(f64, f64)>| -> Vec<Line> {
                let line = |(name, run): &(&str, Run)| Line {
                    name: (*name).to_owned(),
                    points: line(run),
                };
                runs.iter().map(line).collect()
            };
            plot::lines(&directory.join(format!("{file}-ttft.svg")), labels, &lines(ttft), true)?;
            let title = format!("{}: running requests", workload.name());
            let labels = Labels { title: &title, x: "s", y: "requests" };
            let path = directory.join(format!("{file}-running.svg"));
            plot::lines(&path, labels, &lines(running), false)?;
        }
    }
    Ok(())
}

/// The distribution of the time to first token, at every percentile.
fn ttft(run: &Run) -> Vec<(f64, f64)> {
    let times = Distribution::of_ms(run.records.iter().filter_map(RequestRecord::ttft_ms));
    (1..=100).map(f64::from).map(|p| (times.percentile_ms(p), p / 100.0)).collect()
}

/// The number of running requests, averaged over each of 200 equal intervals of the run.
fn running(run: &Run) -> Vec<(f64, f64)> {
    const INTERVALS: usize = 200;
    let end = run.running.last().map_or(0.0, |&(time, _, _)| time);
    let mut areas = vec![0.0; INTERVALS];
    let width = end / INTERVALS as f64;
    for change in run.running.windows(2) {
        let ((mut from, count, _), (to, _, _)) = (change[0], change[1]);
        while from < to && width > 0.0 {
            let interval = ((from / width) as usize).min(INTERVALS - 1);
            let boundary = ((interval + 1) as f64 * width).max(from + width * 1e-6).min(to);
            areas[interval] += (boundary - from) * count as f64;
            from = boundary;
        }
    }
    let point = |(interval, area): (usize, &f64)| ((interval as f64 + 0.5) * width, area / width);
    areas.iter().enumerate().map(point).collect()
}
