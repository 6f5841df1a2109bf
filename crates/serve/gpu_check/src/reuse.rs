//! Many requests at a time through an engine whose KV pool is much too small for them, so that
//! blocks are freed and written again all the time. The answers must equal those of a pool in which
//! no block is used twice.

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use stolon::{Completion, Engine, Request};

use super::report::Outcome;
use super::subject::{BLOCK_SIZE, Setup, Subject, Target};
use stolon_loadgen::rng::SeededRng;

/// Number of requests at a time.
const REQUESTS: usize = 48;
/// Number of tokens that each request generates.
const GENERATED: usize = 24;
/// Longest prompt in tokens.
const LONGEST: usize = 120;
/// Blocks of the small pool: enough for a few requests.
const FEW_BLOCKS: usize = 24;

/// The prompts: four prefixes, each with several ends.
fn prompts(vocab_size: usize) -> Vec<Vec<u32>> {
    let mut random = SeededRng::new(3);
    let prefixes: Vec<_> = (0..4).map(|_| random.tokens(2 * BLOCK_SIZE, vocab_size)).collect();
    let prompt = |index: usize| {
        let mut prompt = prefixes[index % prefixes.len()].clone();
        let length = random.between(1, LONGEST - prompt.len());
        prompt.extend(random.tokens(length, vocab_size));
        prompt
    };
    (0..REQUESTS).map(prompt).collect()
}

async fn answers<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
    blocks: usize,
) -> anyhow::Result<Vec<Completion>> {
    let (config, weights) = tokio::task::block_in_place(|| subject.load())?;
    let prompts = prompts(config.vocab_size);
    let (target, options) = (target.clone(), setup.options(blocks));
    let engine = Engine::builder()
        .backend_with(subject.name.clone(), move || target.open(config, weights, options))
        .max_running(16)
        .max_batched_tokens(256)
        .build()
        .await?;
    let ask = |prompt: Vec<u32>| {
        let request = Request::tokens(prompt).max_tokens(GENERATED).ignore_eos(true).logprobs(0);
        async { engine.generate(request).await?.collect_text().await }
    };
    let answers = try_join_all(prompts.into_iter().map(ask)).await?;
    engine.audit().await.context("the accounting of blocks")?;
    engine.shutdown().await;
    Ok(answers)
}

/// Compares the answers of a small pool with those of a large one: tokens and log-probabilities,
/// bit for bit.
pub(super) async fn small_pool<T: Target>(
    target: &T,
    subject: &Subject,
    setup: &Setup,
) -> anyhow::Result<Outcome> {
    ensure!(setup.batch_invariant, "answers are comparable with batch invariance only");
    let enough = REQUESTS * (LONGEST + GENERATED).div_ceil(BLOCK_SIZE);
    let expected = answers(target, subject, setup, enough).await?;
    let got = answers(target, subject, setup, FEW_BLOCKS).await?;
    let is_same = |(got, expected): &(&Completion, &Completion)| {
        got.token_ids.len() == GENERATED
            && got.token_ids == expected.token_ids
            && got.logprobs == expected.logprobs
    };
    let different = got.iter().zip(&expected).filter(|pair| !is_same(pair)).count();
    let detail = format!(
        "{different} of {REQUESTS} answers differ with {FEW_BLOCKS} blocks and with {enough}"
    );
    let (value, limit) = (Some(different as f64), Some(0.0));
    Ok(Outcome { is_good: different == 0 && got.len() == REQUESTS, value, limit, detail })
}
