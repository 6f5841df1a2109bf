//! Measures how long a device would be idle between two steps: the time in which the engine
//! samples, sends events and plans the next step. The backend computes nothing: it waits as long as
//! a step takes, and notes when the step ends and when the next one begins. Also measures how many
//! requests are admitted per second if steps take no time.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin step_gap
//! ```

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the figures are printed")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use futures::future::try_join_all;
use stolon::backend::{Backend, BackendError, BackendSpec, LogitRows, StepBatch, StepOutput};
use stolon::{Engine, Request, SamplingParams};

/// Measure how long a device would be idle between two steps.
#[derive(Debug, Parser)]
struct Args {
    /// Numbers of sequences
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    batches: Vec<usize>,
    /// Number of tokens of each answer
    #[arg(long, default_value_t = 100)]
    tokens: usize,
    /// Number of threads that sample. Default: one per core
    #[arg(long)]
    threads: Option<usize>,
    /// Vocabulary size
    #[arg(long, default_value_t = 128_256)]
    vocab: usize,
    /// Duration of a step in microseconds
    #[arg(long, default_value_t = 1000)]
    step_us: u64,
}

/// The durations of the gaps before the measured steps.
type Gaps = Arc<Mutex<Vec<Duration>>>;

/// A backend that returns the same logits for every token.
struct IdleBackend {
    spec: BackendSpec,
    row: Vec<f32>,
    threads: usize,
    step: Duration,
    /// Number of decodes of a measured step. Other steps are not measured.
    decodes: usize,
    ended: Option<Instant>,
    gaps: Gaps,
}

impl IdleBackend {
    fn new(args: &Args, draws: bool, decodes: usize, gaps: Gaps) -> Self {
        let spec = BackendSpec {
            vocab_size: args.vocab,
            max_positions: 4096,
            block_size: 32,
            block_count: 8192,
            block_bytes: 1,
            hidden_size: None,
            draws,
            ..BackendSpec::default()
        };
        // A typical distribution: a few likely tokens and a long tail, at pseudo-random places.
        let place = |token: usize| (token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let row: Vec<f32> =
            (0..args.vocab).map(|token| -1.5 * (1.0 + place(token) as f32).ln()).collect();
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = args.threads.unwrap_or_else(cores);
        let step = Duration::from_micros(args.step_us);
        Self { spec, row, threads, step, decodes, ended: None, gaps }
    }
}

impl Backend for IdleBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn sampling_threads(&self) -> usize {
        self.threads
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let is_measured = batch.sequences.len() == self.decodes
            && batch.sequences.iter().all(|slice| slice.start > 0 && slice.token_count == 1);
        if let Some(ended) = self.ended.take().filter(|_| is_measured) {
            self.gaps.lock().unwrap_or_else(PoisonError::into_inner).push(ended.elapsed());
        }
        let mut output = StepOutput::default();
        for slice in &batch.sequences {
            match slice.logit_rows {
                LogitRows::Drawn(_) => {
                    output.drawn.push(Ok(slice.start as u32 % self.spec.vocab_size as u32));
                }
                LogitRows::Last => output.logits.extend_from_slice(&self.row),
                _ => {}
            }
        }
        std::thread::sleep(self.step);
        self.ended = Some(Instant::now());
        Ok(output)
    }
}

/// The median gap of `batch` sequences.
async fn measure(
    args: &Args,
    draws: bool,
    batch: usize,
    sampling: &SamplingParams,
) -> anyhow::Result<Duration> {
    let gaps = Gaps::default();
    let backend = IdleBackend::new(args, draws, batch, Arc::clone(&gaps));
    let engine =
        Engine::builder().backend("idle", Box::new(backend)).max_running(batch).build().await?;
    // One task per sequence, as in a server.
    let requests = (0..batch).map(|index| {
        let tokens = vec![index as u32; 8];
        let sampling = SamplingParams { seed: Some(index as u64), ..sampling.clone() };
        let request = Request::tokens(tokens).sampling(sampling).max_tokens(args.tokens);
        let engine = engine.clone();
        tokio::spawn(async move { engine.complete(request).await })
    });
    for answer in try_join_all(requests).await? {
        answer?;
    }
    engine.shutdown().await;
    let mut gaps = gaps.lock().unwrap_or_else(PoisonError::into_inner);
    anyhow::ensure!(gaps.len() >= args.tokens / 2, "only {} steps were measured", gaps.len());
    gaps.sort_unstable();
    Ok(gaps[gaps.len() / 2])
}

/// Number of requests whose admission is measured, and how many of them are in flight at a time.
const ADMITTED: usize = 4096;
const IN_FLIGHT: usize = 64;

/// Requests per second through an engine whose steps take no time, with a pool of `blocks` blocks.
async fn admissions(args: &Args, blocks: usize) -> anyhow::Result<f64> {
    let mut backend = IdleBackend::new(args, true, 0, Gaps::default());
    (backend.spec.block_count, backend.step) = (blocks, Duration::ZERO);
    let engine = Engine::builder().backend("idle", Box::new(backend)).build().await?;
    let begun = Instant::now();
    let clients = (0..IN_FLIGHT).map(|client| {
        let engine = engine.clone();
        tokio::spawn(async move {
            for index in (client..ADMITTED).step_by(IN_FLIGHT) {
                // One full block, which stays cached, and a part of another one.
                let request = Request::tokens(vec![index as u32; 40]).max_tokens(1);
                engine.complete(request).await?;
            }
            Ok::<(), stolon::Error>(())
        })
    });
    for client in try_join_all(clients).await? {
        client?;
    }
    let rate = ADMITTED as f64 / begun.elapsed().as_secs_f64();
    engine.shutdown().await;
    Ok(rate)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let greedy = SamplingParams::default();
    let sampled = SamplingParams { temperature: 1.0, ..greedy.clone() };
    let kinds = [
        ("tokens from the device", true, sampled.clone()),
        ("rows, greedy", false, greedy),
        ("rows, top-k 50", false, SamplingParams { top_k: Some(50), ..sampled.clone() }),
        ("rows, top-p 0.95", false, SamplingParams { top_p: 0.95, ..sampled.clone() }),
        ("rows, temperature 1", false, sampled.clone()),
        ("rows, log-probabilities", false, SamplingParams { logprobs: Some(0), ..sampled }),
    ];
    println!("median time between steps in us, vocabulary of {}", args.vocab);
    print!("{:<24}", "sequences");
    args.batches.iter().for_each(|batch| print!("{batch:>10}"));
    println!();
    for (name, draws, sampling) in kinds {
        print!("{name:<24}");
        for &batch in &args.batches {
            print!("{:>10}", measure(&args, draws, batch, &sampling).await?.as_micros());
        }
        println!();
    }
    println!("admissions per second, steps that take no time");
    for (name, blocks) in [("large pool", 2 * ADMITTED), ("pool that must evict", ADMITTED / 8)] {
        println!("{name:<24}{:>10.0}", admissions(&args, blocks).await?);
    }
    Ok(())
}
