//! Tokens a second with a draft model of a tenth of the size, of which a chosen share of the guesses is
//! right, and with plain decoding, by turns.
//!
//! The weights of both are random. The draft model computes its guesses and then gives others: it knows
//! the answer of each sequence by its first token. Nothing can be copied from the prompt, so that it is
//! the only source.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use futures::future::join_all;
use stolon::backend::{
    Backend, BackendError, BackendSpec, BlockId, StepBatch, StepOutput, WithDraft,
};
use stolon::{Engine, KvBudget, Request, SamplingParams, SharedProcessor, Speculation};
use stolon_checkpoint::{LoadOptions, LoadedModel, ModelError, ModelSource, load, random_model};
use stolon_cpu::{CpuBackend, CpuOptions};

use super::Script;

const ROUNDS: usize = 3;
const PROMPT_LEN: usize = 160;
const ANSWER_LEN: usize = 96;
/// Token ids of the draft model.
pub(super) const VOCAB: usize = 32_000;
/// Number of layers of the draft model, in the shape of a model of 100 million parameters.
const LAYERS: usize = 4;

/// The tokens of a sequence, which do not repeat themselves.
pub(super) fn tokens(number: usize) -> Vec<u32> {
    let token = |n: usize| (n * 7_919 + number * 104_729 + n * n * 31) % VOCAB;
    (0..PROMPT_LEN + ANSWER_LEN).map(|n| token(n) as u32).collect()
}

/// A draft model of which a share of the guesses is right.
struct Scripted {
    model: CpuBackend,
    /// The share in percent.
    right: usize,
    /// The sequence that begins with each block.
    numbers: HashMap<BlockId, usize>,
}

/// The token that is guessed after `len` tokens of the sequence `number`, of which `share` percent
/// are right.
pub(super) fn guess(share: usize, number: usize, len: usize) -> usize {
    let right = tokens(number).get(len).map_or(0, |token| *token as usize);
    let hash = (len * 2_654_435_761 + number * 40_503) / 7 % 100;
    if hash < share { right } else { (right + 1) % VOCAB }
}

/// The sequence that begins with a token.
pub(super) fn number_of(first: u32) -> usize {
    let is_first = |number: &usize| tokens(*number)[0] == first;
    (0..64).find(is_first).expect("the first token of a sequence")
}

impl Backend for Scripted {
    fn spec(&self) -> &BackendSpec {
        self.model.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let mut output = self.model.step(batch)?;
        let (mut at, mut rows) = (0, output.logits.chunks_mut(VOCAB));
        for slice in &batch.sequences {
            let first = slice.block_table[0];
            if slice.start == 0 {
                self.numbers.insert(first, number_of(batch.tokens[at]));
            }
            at += slice.token_count;
            if slice.logit_rows.logits(slice.token_count).is_empty() {
                continue;
            }
            let guess = guess(self.right, self.numbers[&first], slice.start + slice.token_count);
            rows.next().expect("a row")[guess] = 1e4;
        }
        Ok(output)
    }
}

/// A preset with random weights.
pub(super) fn preset(name: &str) -> LoadedModel {
    let source: ModelSource = format!("random:{name}").parse().expect("a preset");
    load(&source, &LoadOptions::default()).expect("a preset")
}

pub(super) fn options() -> CpuOptions {
    CpuOptions { kv_budget: KvBudget::Blocks(2_048), ..CpuOptions::default() }
}

fn model() -> Result<CpuBackend, ModelError> {
    let LoadedModel { config, weights, .. } = preset("474m");
    CpuBackend::new(config, weights, options())
}

/// The model with a draft model of which this share of the guesses is right.
fn pair(right: usize) -> Result<WithDraft, ModelError> {
    let model = model()?;
    let mut config = preset("100m").config;
    config.layers.truncate(LAYERS);
    let weights = random_model(&config, 1)?;
    let draft = model.draft(config, weights, options())?;
    let draft = Scripted { model: draft, right, numbers: HashMap::new() };
    Ok(WithDraft::new(Box::new(model), Box::new(draft)).expect("equal stores"))
}

/// Tokens a second of some sequences at the same time, whose prompts are cached.
pub(super) async fn rate(engine: &Engine, sequences: usize) -> f64 {
    let request = |number: usize, len: usize| {
        let all = tokens(number);
        let answer: Arc<[u32]> = all[PROMPT_LEN..].into();
        let processor = Some(SharedProcessor::new(Script(answer)));
        let sampling = SamplingParams { processor, ..SamplingParams::default() };
        Request::tokens(&all[..PROMPT_LEN]).sampling(sampling).max_tokens(len).ignore_eos(true)
    };
    engine.cache().flush().await.expect("it runs");
    join_all((0..sequences).map(|number| engine.complete(request(number, 1)))).await;
    let begun = Instant::now();
    let answers = (0..sequences).map(|number| engine.complete(request(number, ANSWER_LEN)));
    let answers = join_all(answers).await;
    let time = begun.elapsed();
    for (number, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.expect("an answer").token_ids, tokens(number)[PROMPT_LEN..]);
    }
    (sequences * ANSWER_LEN) as f64 / time.as_secs_f64()
}

/// Prints the table.
pub(super) async fn run() {
    let plain = Engine::builder().backend_with("plain", model).speculation(Speculation::off());
    let plain = plain.build().await.expect("an engine");
    println!("| right | sequences | plain | with a draft model | times | accepted | computed |");
    println!("|---|---|---|---|---|---|---|");
    for right in [90, 70, 20] {
        let engine = Engine::builder().backend_with("pair", move || pair(right));
        let engine = engine.build().await.expect("an engine");
        for sequences in [1, 4] {
            let (mut rates, before) = ([Vec::new(), Vec::new()], engine.stats());
            for round in 0..=ROUNDS {
                for (rates, engine) in rates.iter_mut().zip([&plain, &engine]) {
                    let rate = rate(engine, sequences).await;
                    rates.extend((round > 0).then_some(rate));
                }
            }
            rates.iter_mut().for_each(|rates| rates.sort_by(f64::total_cmp));
            let [alone, both] = rates.map(|rates| rates[ROUNDS / 2]);
            let stats = engine.stats();
            println!(
                "| {right} % | {sequences} | {alone:.1} | {both:.1} | {:.2} | {} of {} | {} |",
                both / alone,
                stats.model_accepted_tokens - before.model_accepted_tokens,
                stats.model_drafted_tokens - before.model_drafted_tokens,
                stats.model_computed_tokens - before.model_computed_tokens,
            );
        }
        engine.shutdown().await;
    }
}
