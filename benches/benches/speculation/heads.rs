//! What a model's own head for multi-token prediction costs and brings: the time of a prompt, and
//! tokens a second, with the head and without, by turns.
//!
//! The model has the shape of Qwen3.5-0.8B and random weights, and so has its head. The head computes
//! its guesses, of which a chosen share is then made right: it knows the answer of each sequence by
//! its first token. Nothing can be copied from the prompt, so that it is the only source.

use std::time::Instant;

use stolon::backend::{
    Backend, BackendError, BackendSpec, DraftOutput, DraftTask, StepBatch, StepOutput,
};
use stolon::{Engine, Request, Speculation};
use stolon_checkpoint::config::DraftHeadKind;
use stolon_checkpoint::{
    DecoderConfig, DraftHead, LoadedModel, ModelError, Tensor, Weights, random_model,
};
use stolon_cpu::CpuBackend;

use super::drafts::{self, VOCAB, guess, number_of, options, preset};

const MODEL: &str = "qwen3.5-0.8b";
const ROUNDS: usize = 3;
/// Length of the prompts whose time is measured.
const PROMPT_LEN: usize = 512;

/// A model with a head of which a share of the guesses is right.
struct Scripted {
    model: CpuBackend,
    /// The share in percent.
    right: usize,
}

impl Scripted {
    fn new(right: usize) -> Result<Self, ModelError> {
        let LoadedModel { config, weights, .. } = preset(MODEL);
        let head = config.mtp_head().expect("an architecture with heads");
        let head = DraftHead {
            weights: head_weights(&head)?,
            config: head,
            kind: DraftHeadKind::Mtp,
            token_ids: None,
            cluster_tokens: None,
        };
        let model = CpuBackend::with_head(config, None, weights, Some(head), options())?;
        Ok(Self { model, right })
    }
}

impl Backend for Scripted {
    fn spec(&self) -> &BackendSpec {
        self.model.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.model.step(batch)
    }

    fn draft(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        choose: &mut dyn FnMut(usize, &mut [f32]) -> Option<u32>,
    ) -> Result<DraftOutput, BackendError> {
        let next = tasks.iter().map(|task| (number_of(task.tokens[0]), task.tokens.len()));
        let mut next: Vec<_> = next.collect();
        let right = self.right;
        Backend::draft(&mut self.model, tasks, budget, &mut |task, logits| {
            let (number, len) = &mut next[task];
            logits[guess(right, *number, *len)] = 1e4;
            *len += 1;
            choose(task, logits)
        })
    }
}

/// Random weights of a head.
fn head_weights(head: &DecoderConfig) -> Result<Weights, ModelError> {
    let layer = random_model(head, 1)?;
    let shared = ["model.embed_tokens.weight", "lm_head.weight"];
    let specs = head.tensors().into_iter().filter(|spec| !shared.contains(&&*spec.name));
    let mut tensors = Vec::new();
    for spec in specs {
        let Tensor { name, dtype, shape, bytes } = layer.tensor(&spec.name, &spec.shape)?;
        tensors.push(Tensor { name, dtype, shape, bytes: bytes.into_owned().into() });
    }
    // The values of the largest matrix, of which the first are used for the input.
    let largest = tensors.iter().max_by_key(|tensor| tensor.bytes.len()).expect("tensors").clone();
    for spec in head.mtp_weights().tensors() {
        let count: usize = spec.shape.iter().product();
        let len = largest.dtype.bytes_of(count).expect("a plain type");
        // The weights of norms are stored minus one.
        let bytes = if spec.shape.len() > 1 { largest.bytes[..len].to_vec() } else { vec![0; len] };
        tensors.push(Tensor {
            name: spec.name,
            dtype: largest.dtype,
            shape: spec.shape,
            bytes: bytes.into(),
        });
    }
    Weights::from_tensors("random head", tensors)
}

/// Seconds that a prompt takes of which nothing is cached.
async fn prompt_time(engine: &Engine, number: usize) -> f64 {
    engine.cache().flush().await.expect("it runs");
    let prompt: Vec<u32> =
        (0..PROMPT_LEN).map(|n| ((n * 31 + number * 977) % VOCAB) as u32).collect();
    let begun = Instant::now();
    engine.complete(Request::tokens(prompt).max_tokens(1)).await.expect("an answer");
    begun.elapsed().as_secs_f64()
}

/// Prints the tables.
pub(super) async fn run() {
    let model = || {
        let LoadedModel { config, weights, .. } = preset(MODEL);
        CpuBackend::new(config, weights, options())
    };
    let plain = Engine::builder().backend_with("plain", model).speculation(Speculation::off());
    let plain = plain.build().await.expect("an engine");
    for (index, right) in [0, 80, 50].into_iter().enumerate() {
        let engine = Engine::builder().backend_with("head", move || Scripted::new(right));
        let engine = engine.build().await.expect("an engine");
        if index == 0 {
            let turns =
                by_turns([&plain, &engine], async |engine, round| prompt_time(engine, round).await);
            let [alone, both, times] = turns.await;
            println!(
                "a prompt of {PROMPT_LEN} tokens: {alone:.2} s, {both:.2} s, times {times:.3}"
            );
            println!("| right | plain | with the head | times | accepted |");
            println!("|---|---|---|---|---|");
        }
        let before = engine.stats();
        let turns = by_turns([&plain, &engine], async |engine, _| drafts::rate(engine, 1).await);
        let [alone, both, times] = turns.await;
        let stats = engine.stats();
        println!(
            "| {right} % | {alone:.1} | {both:.1} | {times:.3} | {} of {} |",
            stats.model_accepted_tokens - before.model_accepted_tokens,
            stats.model_drafted_tokens - before.model_drafted_tokens,
        );
        engine.shutdown().await;
    }
    plain.shutdown().await;
}

/// Measures two engines by turns: the medians of both, and of their ratios. What a guess costs is
/// measured in a round before the others.
async fn by_turns(engines: [&Engine; 2], measure: impl AsyncFn(&Engine, usize) -> f64) -> [f64; 3] {
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let alone = measure(engines[0], round).await;
        let both = measure(engines[1], round).await;
        if round > 0 {
            let values = [alone, both, both / alone];
            all.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
        }
    }
    all.map(|mut values| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}
