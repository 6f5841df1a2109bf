//! `stolon gpu-check`: whether a device computes what the CPU backend computes, and how fast.
//!
//! 1. The device is opened and describes itself.
//! 2. Checks of correctness on small models with random weights, one per architecture: the logits
//!    are those of the CPU backend, and those with a warm cache are those with a cold one; answers
//!    do not change when KV blocks are freed and written again all the time; decode steps compute
//!    the same as CUDA graphs; and LoRA adapters compute the same alone and in one batch.
//! 3. Measurements: the device's limits, prefill and decode as a share of them, and time to first
//!    token.
//!
//! Each check runs on its own, so that one that fails or panics does not end the others.

#![forbid(unsafe_code)]

mod adapters;
mod compare;
mod first_token;
mod formats;
mod graphs;
mod parity;
mod report;
mod reuse;
mod speed;
mod step;
mod subject;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use stolon::{DeviceChoice, ModelSource};
use stolon_checkpoint::KvType;
use stolon_cuda::ComputeType;

use self::report::{Check, Outcome, Report};
use self::speed::Sizes;
use self::subject::{Candle, Setup, Subject, Target};

/// Architectures that are checked in half precision on the CPU, where it is slow: one with dense
/// layers and one with experts.
const HALF_ON_CPU: [&str; 2] = ["llama", "qwen3_moe"];
/// Architectures that the check of reused blocks runs: full attention, and windows.
const REUSED: [&str; 2] = ["llama", "gemma3_text"];
/// Architectures that are checked with keys and values in int8: full attention, windows, latent
/// attention, and recurrent layers, whose checkpoints are in blocks of int8.
const INT8: [&str; 4] = ["llama", "gemma3_text", "deepseek_v2", "qwen3_5_text"];
/// Architectures that the check of adapters runs: dense layers, and experts.
const ADAPTED: [&str; 2] = ["llama", "qwen3_moe"];

/// Prints a line.
pub type Print = fn(&str) -> std::io::Result<()>;

/// Arguments of `stolon gpu-check`.
#[derive(Debug, Args)]
pub struct GpuCheckArgs {
    /// Device to check: cpu, cuda, cuda:INDEX, metal or metal:INDEX
    #[arg(long, default_value_t = default_device(), value_name = "DEVICE")]
    device: DeviceChoice,
    /// Model to measure and to check in addition to the small ones
    ///
    /// As in `stolon serve`. The CPU backend computes 300 tokens of it, too, if it fits in memory.
    /// By default the speed is measured with random weights in the shape of Llama 3.2 1B, or on the
    /// CPU in the shape of a smaller model.
    #[arg(long)]
    model: Option<ModelSource>,
    /// File to which the report is written as JSON, to attach it to a bug report
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Report of an earlier run (--json). At the end, the changes since then are printed
    ///
    /// These are checks that pass or fail now, checks of only one run, and measurements that differ
    /// by 5 % or more.
    #[arg(long, value_name = "OLD")]
    compare: Option<PathBuf>,
}

/// The kind of GPU that this build supports.
fn default_device() -> DeviceChoice {
    if cfg!(feature = "cuda-core") {
        DeviceChoice::Cuda(0)
    } else if cfg!(feature = "metal") {
        DeviceChoice::Metal(0)
    } else {
        DeviceChoice::Cpu
    }
}

impl GpuCheckArgs {
    /// Runs the checks and gives the lines of the report to `print` as they come. The exit status
    /// is 1 if a check or a measurement has failed.
    ///
    /// # Errors
    /// If the report cannot be written.
    pub async fn run(self, print: Print) -> anyhow::Result<ExitCode> {
        // It is read first, so that a wrong path costs no time on the device.
        let old = self.compare.as_deref().map(compare::read).transpose()?;
        let report = Report::new(self.device.to_string(), print);
        let report = check(&Candle, self.device, self.model.as_ref(), report).await?;
        if let Some(path) = &self.json {
            let text = serde_json::to_string_pretty(&report)?;
            let written = std::fs::write(path, text + "\n");
            written.with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let (Some(old), Some(path)) = (old, &self.compare) {
            print(&format!("changes since {}:", path.display()))?;
            let new = serde_json::to_value(&report)?;
            compare::changes(&old, &new).iter().try_for_each(|line| print(line))?;
        }
        Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Checks and measures a device, and prints lines as they come.
async fn check<T: Target>(
    target: &T,
    device: DeviceChoice,
    model: Option<&ModelSource>,
    mut report: Report,
) -> anyhow::Result<Report> {
    let start = Instant::now();
    let info = match tokio::task::spawn_blocking(move || device.info()).await {
        Ok(info) => info.map_err(|error| error.to_string()),
        Err(error) => Err(failed(error)),
    };
    match info {
        Ok(info) => {
            report.set_device(info);
            report.print(&report.head())?;
            // Keeps the driver running, which each check would start again otherwise.
            let _kept = device.open();
            checks(target, device, model, &mut report).await?;
            measurements(device, model, &mut report).await?;
        }
        Err(reason) => {
            report.print(&report.head())?;
            let setup = Setup::new(device, None);
            add(&mut report, "device", "", &setup, start, Err(reason))?;
        }
    }
    report.passed =
        report.checks.iter().all(|check| check.passed) && report.speed.errors.is_empty();
    report.seconds = start.elapsed().as_secs_f64();
    report.print(&report.verdict())?;
    Ok(report)
}

/// The kinds of checks of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    CpuParity,
    WarmEqualsCold,
    BlocksReused,
    CudaGraphs,
    Adapters,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::CpuParity => "cpu-parity",
            Self::WarmEqualsCold => "warm-equals-cold",
            Self::BlocksReused => "blocks-reused",
            Self::CudaGraphs => "cuda-graphs",
            Self::Adapters => "adapters",
        }
    }
}

/// Runs all checks of correctness.
async fn checks<T: Target>(
    target: &T,
    device: DeviceChoice,
    model: Option<&ModelSource>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let subjects = subject::architectures()?;
    for subject in &subjects {
        for compute_type in compute_types(device, &subject.name) {
            let compute_type = Some(compute_type);
            let setup = Setup::new(device, compute_type);
            one(target, Kind::CpuParity, subject, setup, report).await?;
            one(target, Kind::WarmEqualsCold, subject, setup, report).await?;
            let setup = Setup { batch_invariant: false, ..setup };
            one(target, Kind::WarmEqualsCold, subject, setup, report).await?;
        }
    }
    let compute_type = (device != DeviceChoice::Cpu).then_some(ComputeType::Bf16);
    for subject in subjects.iter().filter(|subject| has_int8(device, &subject.name)) {
        let setup = Setup { kv_type: Some(KvType::Int8), ..Setup::new(device, compute_type) };
        one(target, Kind::CpuParity, subject, setup, report).await?;
        one(target, Kind::WarmEqualsCold, subject, setup, report).await?;
    }
    for subject in &subject::quantized()? {
        let setup = Setup::new(device, compute_type);
        one(target, Kind::CpuParity, subject, setup, report).await?;
        one(target, Kind::WarmEqualsCold, subject, setup, report).await?;
    }
    for subject in subjects.iter().filter(|subject| REUSED.contains(&subject.name.as_str())) {
        let setup = Setup::new(device, compute_type);
        one(target, Kind::BlocksReused, subject, setup, report).await?;
    }
    for subject in subjects.iter().filter(|subject| ADAPTED.contains(&subject.name.as_str())) {
        for compute_type in compute_types(device, &subject.name) {
            let setup = Setup::new(device, Some(compute_type));
            one(target, Kind::Adapters, subject, setup, report).await?;
        }
    }
    for subject in &subjects {
        for setup in with_graphs(Setup::new(device, compute_type)) {
            one(target, Kind::CudaGraphs, subject, setup, report).await?;
        }
    }
    if let Some(source) = model {
        let setup = Setup::new(device, None);
        let subject = Subject::model(source);
        one(target, Kind::CpuParity, &subject, setup, report).await?;
        one(target, Kind::WarmEqualsCold, &subject, setup, report).await?;
        for setup in with_graphs(setup) {
            one(target, Kind::CudaGraphs, &subject, setup, report).await?;
        }
    }
    Ok(())
}

/// The ways in which decode steps can be captured on the device of `setup`. On the CPU, a replay
/// computes the step again.
fn with_graphs(setup: Setup) -> impl Iterator<Item = Setup> {
    let batch_invariant: &[bool] = match setup.device {
        DeviceChoice::Cuda(_) => &[true, false],
        DeviceChoice::Cpu => &[false],
        DeviceChoice::Metal(_) => &[],
    };
    let setup = Setup { cuda_graphs: true, ..setup };
    batch_invariant.iter().map(move |on| Setup { batch_invariant: *on, ..setup })
}

/// The types in which an architecture is checked.
fn compute_types(device: DeviceChoice, name: &str) -> Vec<ComputeType> {
    match device {
        DeviceChoice::Cpu if HALF_ON_CPU.contains(&name) => {
            vec![ComputeType::F32, ComputeType::F16]
        }
        DeviceChoice::Cpu => vec![ComputeType::F32],
        _ => vec![ComputeType::F32, ComputeType::F16, ComputeType::Bf16],
    }
}

/// Whether an architecture is checked with keys and values in int8. Apple GPUs do not have them.
fn has_int8(device: DeviceChoice, name: &str) -> bool {
    !matches!(device, DeviceChoice::Metal(_)) && INT8.contains(&name)
}

/// Runs one check on a thread or task of its own and adds its result to the report.
async fn one<T: Target>(
    target: &T,
    kind: Kind,
    subject: &Subject,
    setup: Setup,
    report: &mut Report,
) -> anyhow::Result<()> {
    let start = Instant::now();
    let (name, target, subject) = (subject.name.clone(), target.clone(), subject.clone());
    let compute_type = setup.compute_type.unwrap_or(ComputeType::F32);
    let task = match kind {
        Kind::BlocksReused => {
            tokio::spawn(async move { reuse::small_pool(&target, &subject, &setup).await })
        }
        Kind::CpuParity => tokio::task::spawn_blocking(move || {
            parity::with_cpu(&target, &subject, &setup, compute_type)
        }),
        Kind::WarmEqualsCold => tokio::task::spawn_blocking(move || {
            parity::with_cold(&target, &subject, &setup, compute_type)
        }),
        Kind::CudaGraphs => tokio::task::spawn_blocking(move || {
            graphs::with_steps(&target, &subject, &setup, compute_type)
        }),
        Kind::Adapters => tokio::task::spawn_blocking(move || {
            adapters::in_one_batch(&target, &subject, &setup, compute_type)
        }),
    };
    let outcome = match task.await {
        Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
        Err(error) => Err(failed(error)),
    };
    add(report, kind.name(), &name, &setup, start, outcome)
}

/// Adds the result of a check to the report and prints it.
fn add(
    report: &mut Report,
    kind: &'static str,
    model: &str,
    setup: &Setup,
    start: Instant,
    outcome: Result<Outcome, String>,
) -> anyhow::Result<()> {
    let outcome = outcome.unwrap_or_else(|detail| Outcome {
        is_good: false,
        value: None,
        limit: None,
        detail,
    });
    let check = Check {
        kind,
        model: model.to_owned(),
        compute_type: setup.compute_type.map(ComputeType::name),
        kv_type: setup.kv_type.map(KvType::name),
        batch_invariant: setup.batch_invariant,
        cuda_graphs: setup.cuda_graphs,
        passed: outcome.is_good,
        // JSON has no infinite numbers.
        value: outcome.value.filter(|value| value.is_finite()),
        limit: outcome.limit,
        // A line, like all others. Some messages of panics have several.
        detail: outcome.detail.split_whitespace().collect::<Vec<_>>().join(" "),
        seconds: start.elapsed().as_secs_f64(),
    };
    report.print(&check.line())?;
    report.checks.push(check);
    Ok(())
}

/// Runs all measurements.
async fn measurements(
    device: DeviceChoice,
    model: Option<&ModelSource>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let sizes = Sizes::of(device);
    let source = match model {
        Some(source) => source.clone(),
        None => sizes.model.parse()?,
    };
    let subject = Subject::model(&source);
    let until = Instant::now() + Duration::from_secs_f64(sizes.seconds);
    let mut speed = std::mem::take(&mut report.speed);
    speed.model = subject.name.clone();
    let limits = {
        let (sizes, mut speed) = (sizes.clone(), report::Speed::default());
        tokio::task::spawn_blocking(move || {
            speed::limits(device, &sizes, &mut speed);
            speed
        })
    };
    match limits.await {
        Ok(limits) => speed = report::Speed { model: speed.model, ..limits },
        Err(error) => speed.errors.push(failed(error)),
    }
    report.print(&speed.limits())?;
    let with = Setup::new(device, None);
    let without = Setup { batch_invariant: false, ..with };
    let mut setups = vec![with, without];
    if let DeviceChoice::Cuda(_) = device {
        setups.extend(with_graphs(with));
    }
    for (index, setup) in setups.iter().enumerate() {
        // A run may also use the time that earlier runs did not need.
        let runs = (setups.len() - index) as u32;
        let left = until.saturating_duration_since(Instant::now()) / runs;
        let count = speed.runs.len();
        speed = run(&subject, *setup, &sizes, Instant::now() + left, speed).await;
        for run in &speed.runs[count..] {
            report.print(&run.lines(&speed.model))?;
        }
    }
    for line in speed.errors.iter().map(|error| format!("FAILED {error}")) {
        report.print(&line)?;
    }
    for line in speed.left_out.iter().map(|what| format!("left out: {what}")) {
        report.print(&line)?;
    }
    report.speed = speed;
    Ok(())
}

/// Measures the model opened in one way. Failures are noted in `speed`.
async fn run(
    subject: &Subject,
    setup: Setup,
    sizes: &Sizes,
    until: Instant,
    mut speed: report::Speed,
) -> report::Speed {
    // Half of the time is for the steps, and the rest for the engine.
    let half = Instant::now() + until.saturating_duration_since(Instant::now()) / 2;
    let (own, own_sizes) = (subject.clone(), sizes.clone());
    let mut noted = report::Speed {
        product_flops: speed.product_flops.clone(),
        copy_bytes_per_second: speed.copy_bytes_per_second,
        ..report::Speed::default()
    };
    let steps = tokio::task::spawn_blocking(move || {
        let run = speed::steps(&own, &setup, &own_sizes, half, &mut noted);
        (run, noted)
    });
    let Setup { batch_invariant, cuda_graphs, .. } = setup;
    let mut run = report::Run { batch_invariant, cuda_graphs, ..Default::default() };
    match steps.await {
        Ok((steps, noted)) => {
            speed.left_out.extend(noted.left_out);
            match steps {
                Ok(steps) => run = steps,
                Err(error) => speed.errors.push(format!("prefill and decode: {error:#}")),
            }
        }
        Err(error) => speed.errors.push(format!("prefill and decode: {}", failed(error))),
    }
    if cuda_graphs {
        // CUDA graphs are for decode steps only.
        speed.runs.push(run);
        return speed;
    }
    match first_token::measure(subject, &setup, sizes, until, &mut speed).await {
        Ok(first_token) => run.first_token = first_token,
        Err(error) => speed.errors.push(format!("time to first token: {error:#}")),
    }
    speed.runs.push(run);
    speed
}

/// The message of a task that has panicked.
fn failed(error: tokio::task::JoinError) -> String {
    let message = |panic: &(dyn std::any::Any + Send)| -> Option<String> {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| panic.downcast_ref::<&str>().copied()).map(str::to_owned)
    };
    match error.try_into_panic() {
        Ok(panic) => format!("panicked: {}", message(&*panic).unwrap_or_default()),
        Err(error) => error.to_string(),
    }
}
