//! Time to first token of an engine, with a cold and with a warm cache.

use std::time::{Duration, Instant};

use anyhow::ensure;
use stolon::{Completion, Engine, Request};

use super::report::{FirstToken, Speed};
use super::speed::{Sizes, blocks, open_with_room};
use super::subject::{BLOCK_SIZE, Setup, Subject};
use stolon_loadgen::rng::SeededRng;

/// Tokens of each prompt after the shared ones.
const OWN_TOKENS: usize = 16;
/// Number of warm requests. The result is their median.
const WARM_REQUESTS: usize = 3;

async fn ask(engine: &Engine, prompt: Vec<u32>) -> anyhow::Result<Completion> {
    let request = Request::tokens(prompt).max_tokens(1).ignore_eos(true);
    Ok(engine.generate(request).await?.collect_text().await?)
}

/// Measures requests whose prompts share 1,024 tokens and more, until `until`.
///
/// # Errors
/// If the engine does not start, a request fails, or a warm one reads nothing from the cache.
pub(super) async fn measure(
    subject: &Subject,
    setup: &Setup,
    sizes: &Sizes,
    until: Instant,
    speed: &mut Speed,
) -> anyhow::Result<Vec<FirstToken>> {
    let (config, weights) = tokio::task::block_in_place(|| subject.load())?;
    let (vocab_size, max_positions) = (config.vocab_size, config.max_positions);
    let step_tokens = if setup.device == stolon::DeviceChoice::Cpu { 512 } else { 2048 };
    // The longest prompt, the ends of the others, and a few more.
    let longest = sizes.shared_tokens.iter().max().copied().unwrap_or_default();
    let wanted = blocks(longest) + 16;
    let (own, setup) = (subject.clone(), *setup);
    let open = move || open_with_room(&own, &setup, (config, weights), wanted);
    let engine = Engine::builder()
        .backend_with(subject.name.clone(), open)
        .max_batched_tokens(step_tokens)
        .build()
        .await?;
    let room = engine.model_info().num_blocks.saturating_sub(8) * BLOCK_SIZE;
    let mut random = SeededRng::new(5);
    let mut results: Vec<FirstToken> = Vec::new();
    // The first request compiles and loads kernels.
    ask(&engine, random.tokens(2 * OWN_TOKENS, vocab_size)).await?;
    for &shared_tokens in sizes.shared_tokens {
        let length = shared_tokens + OWN_TOKENS;
        let what = format!("first token with {shared_tokens} shared tokens");
        if length + 1 > max_positions.min(room) {
            speed.left_out.push(format!("{what}: it does not fit"));
            continue;
        }
        // Attention takes four times as long for twice the tokens.
        let expected = results.last().map_or(0.0, |last| 4.0 * last.cold_seconds);
        if Instant::now() + Duration::from_secs_f64(expected) > until {
            speed.left_out.push(format!("{what}: no time was left"));
            continue;
        }
        engine.cache().flush().await?;
        let shared = random.tokens(shared_tokens, vocab_size);
        let mut prompt = || [&shared[..], &random.tokens(OWN_TOKENS, vocab_size)].concat();
        let cold = ask(&engine, prompt()).await?;
        let mut warm = Vec::new();
        for _ in 0..WARM_REQUESTS {
            warm.push(ask(&engine, prompt()).await?.finish);
        }
        warm.sort_by_key(|finish| finish.timings.ttft);
        let median = warm.swap_remove(WARM_REQUESTS / 2);
        let cached_tokens = median.usage.cached_tokens;
        ensure!(
            cached_tokens >= shared_tokens - BLOCK_SIZE,
            "expected {shared_tokens} cached tokens, got {cached_tokens}"
        );
        results.push(FirstToken {
            shared_tokens,
            cold_seconds: cold.finish.timings.ttft.as_secs_f64(),
            warm_seconds: median.timings.ttft.as_secs_f64(),
            cached_tokens,
        });
    }
    engine.shutdown().await;
    Ok(results)
}
