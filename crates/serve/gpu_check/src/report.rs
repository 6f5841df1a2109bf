//! What `stolon gpu-check` finds, as JSON and as lines.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use stolon_cuda::DeviceInfo;

use crate::Print;

/// A size with a binary unit and at most one decimal.
fn format_bytes(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string().replace(".0 ", " ")
}

/// The version of the report's fields. It is raised when one changes its meaning.
pub(super) const VERSION: u32 = 1;

/// Everything that was found. A value that could not be determined is `null`.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) report_version: u32,
    pub(super) stolon_version: &'static str,
    /// The features of this build that concern GPUs.
    pub(super) features: Vec<&'static str>,
    pub(super) operating_system: String,
    /// Number of CPU threads that the process may use.
    pub(super) cpu_threads: usize,
    /// Seconds since 1970-01-01 UTC.
    pub(super) started: u64,
    pub(super) device: Device,
    /// Whether all checks passed and all measurements ended.
    pub(super) passed: bool,
    pub(super) checks: Vec<Check>,
    pub(super) speed: Speed,
    /// Prints lines as they come.
    #[serde(skip)]
    print: Print,
    /// Duration of the whole in seconds.
    pub(super) seconds: f64,
}

/// The device that was asked for, and its properties.
#[derive(Debug, Default, Serialize)]
pub(super) struct Device {
    /// As on the command line.
    pub(super) choice: String,
    pub(super) name: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) free_memory_bytes: Option<u64>,
    pub(super) compute_capability: Option<String>,
    pub(super) multiprocessors: Option<u32>,
    pub(super) driver: Option<String>,
}

/// A check of correctness.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    /// `device`, `cpu-parity`, `warm-equals-cold`, `blocks-reused`, `cuda-graphs` or `adapters`.
    pub(super) kind: &'static str,
    pub(super) model: String,
    /// `f32`, `f16` or `bf16`; `null` for the model's default.
    pub(super) compute_type: Option<&'static str>,
    /// Type of keys and values; `null` for that of `compute_type`.
    pub(super) kv_type: Option<&'static str>,
    pub(super) batch_invariant: bool,
    pub(super) cuda_graphs: bool,
    pub(super) passed: bool,
    /// The compared quantity: a difference in standard deviations of the logits, or a number of
    /// rows or answers that differ.
    pub(super) value: Option<f64>,
    /// Largest value with which the check passes.
    pub(super) limit: Option<f64>,
    /// A message for people. It says why the check could not be done if there is no value.
    pub(super) detail: String,
    pub(super) seconds: f64,
}

/// The result of a check.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) is_good: bool,
    pub(super) value: Option<f64>,
    pub(super) limit: Option<f64>,
    pub(super) detail: String,
}

/// The limits of the device, and the share of them that a model uses.
#[derive(Debug, Default, Serialize)]
pub(super) struct Speed {
    pub(super) model: String,
    /// Bytes per second of a large copy, read and written.
    pub(super) copy_bytes_per_second: Option<f64>,
    /// Floating-point operations per second of a large matrix product, by type.
    pub(super) product_flops: BTreeMap<&'static str, f64>,
    pub(super) runs: Vec<Run>,
    /// Messages of measurements that failed.
    pub(super) errors: Vec<String>,
    /// Names of measurements that were left out because they did not fit in the device or the
    /// context, or for lack of time.
    pub(super) left_out: Vec<String>,
}

/// The measurements of a model opened in one way.
#[derive(Debug, Default, Serialize)]
pub(super) struct Run {
    pub(super) batch_invariant: bool,
    /// Whether decode steps were captured as CUDA graphs. If so, only they were measured.
    pub(super) cuda_graphs: bool,
    /// Number of graphs.
    pub(super) captured_graphs: usize,
    /// How attention was computed: `flash`, `split-KV` or `gather`, perhaps with split-KV decoding.
    pub(super) attention: String,
    /// Memory of the largest step besides weights and KV store: estimated, and measured on CUDA.
    pub(super) step_memory_estimated_bytes: u64,
    pub(super) step_memory_measured_bytes: Option<u64>,
    pub(super) prefill: Vec<Prefill>,
    pub(super) decode: Vec<Decode>,
    pub(super) first_token: Vec<FirstToken>,
}

/// One step that computes a prompt.
#[derive(Debug, Serialize)]
pub(super) struct Prefill {
    pub(super) tokens: usize,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    /// Share of the speed of a large matrix product.
    pub(super) share: Option<f64>,
}

/// One step that computes a token of each sequence.
#[derive(Debug, Serialize)]
pub(super) struct Decode {
    /// Number of sequences.
    pub(super) batch: usize,
    /// Number of tokens of each.
    pub(super) context: usize,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    /// Share of the speed of a large copy, if weights, keys and values are read once.
    pub(super) share: Option<f64>,
}

/// Time to first token of requests to an engine.
#[derive(Debug, Serialize)]
pub(super) struct FirstToken {
    /// Number of tokens that the prompts have in common.
    pub(super) shared_tokens: usize,
    pub(super) cold_seconds: f64,
    /// With the shared tokens cached.
    pub(super) warm_seconds: f64,
    /// Number of tokens that the warm request read from the cache.
    pub(super) cached_tokens: usize,
}

impl Report {
    pub(super) fn new(choice: String, print: Print) -> Self {
        let mut features = vec!["candle"];
        features.extend(cfg!(feature = "cuda-core").then_some("cuda-core"));
        features.extend(cfg!(feature = "cuda").then_some("cuda"));
        features.extend(cfg!(feature = "metal").then_some("metal"));
        Self {
            report_version: VERSION,
            stolon_version: env!("CARGO_PKG_VERSION"),
            features,
            operating_system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu_threads: std::thread::available_parallelism().map_or(1, usize::from),
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            device: Device { choice, ..Device::default() },
            passed: false,
            checks: Vec::new(),
            speed: Speed::default(),
            seconds: 0.0,
            print,
        }
    }

    /// Prints lines of the report.
    pub(super) fn print(&self, lines: &str) -> std::io::Result<()> {
        (self.print)(lines)
    }

    pub(super) fn set_device(&mut self, info: DeviceInfo) {
        self.device = Device {
            choice: std::mem::take(&mut self.device.choice),
            name: info.name,
            memory_bytes: info.memory_bytes,
            free_memory_bytes: info.free_memory_bytes,
            compute_capability: info.compute_capability,
            multiprocessors: info.multiprocessors,
            driver: info.driver,
        };
    }

    /// The first lines of the text: this build and the device.
    pub(super) fn head(&self) -> String {
        let Device { choice, name, memory_bytes, free_memory_bytes, .. } = &self.device;
        let bytes = |bytes: &Option<u64>| bytes.map_or_else(|| "?".to_owned(), format_bytes);
        let features = self.features.join(", ");
        let mut text = format!(
            "stolon {} ({features}), {}, {} CPU threads\ndevice {choice}: {}, memory {}, free {}",
            self.stolon_version,
            self.operating_system,
            self.cpu_threads,
            name.as_deref().unwrap_or("?"),
            bytes(memory_bytes),
            bytes(free_memory_bytes),
        );
        if let Some(capability) = &self.device.compute_capability {
            let count = self.device.multiprocessors.unwrap_or_default();
            text += &format!(", compute capability {capability}, {count} multiprocessors");
        }
        if let Some(driver) = &self.device.driver {
            text += &format!("\ndriver {driver}");
        }
        text
    }

    /// The last line of the text.
    pub(super) fn verdict(&self) -> String {
        let failed = self.checks.iter().filter(|check| !check.passed).count();
        let (checks, errors) = (self.checks.len(), self.speed.errors.len());
        let verdict = if self.passed { "passed" } else { "FAILED" };
        format!(
            "{verdict}: {failed} of {checks} checks failed, {errors} measurements failed, {:.0} s",
            self.seconds
        )
    }
}

impl Check {
    /// The check as a line of text.
    pub(super) fn line(&self) -> String {
        let Self { kind, model, detail, .. } = self;
        let verdict = if self.passed { "ok    " } else { "FAILED" };
        let compute = self.compute_type.unwrap_or("-");
        let kv = self.kv_type.map(|kv_type| format!(", KV in {kv_type}")).unwrap_or_default();
        let rounding = if self.batch_invariant { "" } else { ", without batch invariance" };
        format!("{verdict} {kind:<16} {model:<12} {compute:<4} {detail}{kv}{rounding}")
    }
}

impl Speed {
    /// The limits of the device as a line of text.
    pub(super) fn limits(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(
            self.copy_bytes_per_second.map(|speed| format!("copies {:.1} GB/s", speed / 1e9)),
        );
        for (compute, flops) in &self.product_flops {
            parts.push(format!("matrix products in {compute} {:.2} TFLOP/s", flops / 1e12));
        }
        parts.join(", ")
    }
}

impl Run {
    /// The measurements as lines of text.
    pub(super) fn lines(&self, model: &str) -> String {
        let share = |share: Option<f64>, of: &str| {
            share.map_or_else(String::new, |share| format!(", {:.1} % of {of}", 100.0 * share))
        };
        let with = if self.batch_invariant { "with" } else { "without" };
        let graphs = match (self.cuda_graphs, self.captured_graphs) {
            (true, count) => format!("{count} CUDA graphs, "),
            (false, _) => String::new(),
        };
        let measured = self.step_memory_measured_bytes;
        let mut text = format!(
            "{model}, {with} batch invariance, {graphs}attention: {}, memory of a step: {} estimated, \
             {} measured",
            self.attention,
            format_bytes(self.step_memory_estimated_bytes),
            measured.map_or_else(|| "not".to_owned(), format_bytes),
        );
        for Prefill { tokens, tokens_per_second: rate, share: part, .. } in &self.prefill {
            let part = share(*part, "matrix products");
            text += &format!("\n  prefill of {tokens} tokens: {rate:.0} tokens/s{part}");
        }
        for Decode { batch, context, seconds, tokens_per_second: rate, share: part } in &self.decode
        {
            let (ms, part) = (1e3 * seconds, share(*part, "copies"));
            text += &format!(
                "\n  decode of {batch} sequences of {context} tokens: {ms:.2} ms, {rate:.0} tokens/s{part}"
            );
        }
        for FirstToken { shared_tokens, cold_seconds, warm_seconds, cached_tokens } in
            &self.first_token
        {
            let (cold, warm) = (1e3 * cold_seconds, 1e3 * warm_seconds);
            text += &format!(
                "\n  first token with {shared_tokens} shared tokens: {cold:.1} ms cold, {warm:.1} ms \
                 warm ({cached_tokens} cached)"
            );
        }
        text
    }
}
