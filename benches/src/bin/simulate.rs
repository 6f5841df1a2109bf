//! Every policy on every standard workload, in virtual time: a table in Markdown, and plots.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin simulate -- --plots benches/plots
//! ```

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use std::path::PathBuf;

use clap::Parser;
use stolon_actors::{AdmissionPolicy, CoreConfig};
use stolon_benches::cost::CostModel;
use stolon_benches::drive::{Run, capacity, simulate};
use stolon_benches::plot::{self, Line, Words};
use stolon_benches::report::Summary;
use stolon_benches::workload::Shape;

const VOCAB_SIZE: usize = 32_000;

#[derive(Debug, Parser)]
struct Args {
    /// A cost model: `demo` or `100m`, which are kept with the code, or a file that `calibrate` made
    #[arg(long, default_value = "100m")]
    calibration: String,
    /// Where to put the plots; none are drawn if not given
    #[arg(long)]
    plots: Option<PathBuf>,
    /// Unshared requests that the pool holds
    #[arg(long, default_value_t = 8)]
    pool: usize,
    /// Only the workload whose name begins so
    #[arg(long)]
    only: Option<String>,
    /// Bound on overtaking, in tokens
    #[arg(long)]
    overtake: Option<usize>,
    /// Most requests running at a time
    #[arg(long, default_value_t = 64)]
    max_running: usize,
    /// Arrivals as a share of what can be served, instead of the workload's own; `inf` is all at
    /// once
    #[arg(long)]
    load: Option<f64>,
    /// Determines prompts and arrivals
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl Args {
    fn config(&self, policy: AdmissionPolicy, conservative: bool) -> CoreConfig {
        let default = CoreConfig::default();
        CoreConfig {
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
    for shape in Shape::ALL {
        if args.only.as_ref().is_some_and(|only| !shape.name().starts_with(only.as_str())) {
            continue;
        }
        let spec = shape.spec(args.pool, VOCAB_SIZE);
        let config = args.config(AdmissionPolicy::Cost, false);
        let rate =
            args.load.unwrap_or(shape.load()) * capacity(shape, &spec, &config, &cost, args.seed)?;
        let plan = shape.conversations(rate, VOCAB_SIZE, args.seed);
        println!(
            "\n#### {}: {} conversations, {rate:.2} a second, {} blocks\n\n{}",
            shape.name(),
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
            ("priority", AdmissionPolicy::Priority, false),
        ] {
            let config = args.config(policy, conservative);
            let run = simulate(&plan, spec.clone(), config, &cost)?;
            println!("{}", Summary::of(&run).row(name));
            runs.push((name, run));
        }
        if let Some(directory) = &args.plots {
            std::fs::create_dir_all(directory)?;
            let file = shape.name().replace(' ', "-");
            let title = format!("{}: time to first token", shape.name());
            let words = Words { title: &title, x: "ms", y: "share of requests" };
            let lines = |line: fn(&Run) -> Vec<(f64, f64)>| -> Vec<Line> {
                let line = |(name, run): &(&str, Run)| Line {
                    name: (*name).to_owned(),
                    points: line(run),
                };
                runs.iter().map(line).collect()
            };
            plot::lines(&directory.join(format!("{file}-ttft.svg")), words, &lines(ttft), true)?;
            let title = format!("{}: requests running at once", shape.name());
            let words = Words { title: &title, x: "s", y: "requests" };
            let path = directory.join(format!("{file}-running.svg"));
            plot::lines(&path, words, &lines(running), false)?;
        }
    }
    Ok(())
}

/// The distribution of the time to first token, at every hundredth of the requests.
fn ttft(run: &Run) -> Vec<(f64, f64)> {
    let mut times: Vec<f64> =
        run.records.iter().map(|record| (record.first - record.sent) * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let share = |percent: u32| f64::from(percent) / 100.0;
    let at = |percent| stolon_benches::report::percentile(&times, f64::from(percent));
    (1..=100).map(|percent| (at(percent), share(percent))).collect()
}

/// Requests running, the mean over each of 200 stretches of the run.
fn running(run: &Run) -> Vec<(f64, f64)> {
    const STRETCHES: usize = 200;
    let end = run.running.last().map_or(0.0, |&(time, _, _)| time);
    let mut areas = vec![0.0; STRETCHES];
    let width = end / STRETCHES as f64;
    for change in run.running.windows(2) {
        let ((mut from, count, _), (to, _, _)) = (change[0], change[1]);
        while from < to && width > 0.0 {
            let stretch = ((from / width) as usize).min(STRETCHES - 1);
            let border = ((stretch + 1) as f64 * width).max(from + width * 1e-6).min(to);
            areas[stretch] += (border - from) * count as f64;
            from = border;
        }
    }
    let point = |(stretch, area): (usize, &f64)| ((stretch as f64 + 0.5) * width, area / width);
    areas.iter().enumerate().map(point).collect()
}
