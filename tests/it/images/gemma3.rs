//! Gemma 3, whose positions of an image attend to each other in both directions, with the weights
//! that the parity tests of `stolon-cpu` compare with transformers. Its window of 8 positions is
//! shorter than an image of 9.

use super::*;
use stolon::WindowKv;

const IMAGE: u32 = 60;
const ROWS: usize = 9;

/// The model has no tokenizer, so prompts are token ids.
fn builder(windows: WindowKv) -> EngineBuilder {
    Engine::builder().model(stolon_fixtures::path("images/gemma3")).window_kv(windows).threads(1)
}

/// A prompt with `before` tokens, the images with tokens around each, and `after` tokens.
fn prompt(before: usize, images: &[&Arc<[u8]>], after: usize, seed: u32) -> Request {
    let text = |count: usize, seed: u32| (0..count as u32).map(move |n| 3 + (n * n + seed) % 50);
    let places = images.iter().flat_map(|_| [58, IMAGE, 59]);
    let tokens: Vec<u32> = text(before, 1).chain(places).chain(text(after, seed)).collect();
    let request = Request::tokens(tokens).max_tokens(6).logprobs(0).ignore_eos(true);
    images.iter().fold(request, |request, image| request.image(Arc::clone(image)))
}

/// Goal: an image in the middle of a prompt is computed as a whole, wherever blocks and steps end:
/// answers have the same bits with a warm and with a cold cache, whether a prompt shares the image,
/// the tokens before it, or everything with another one, and whether windows are blocks or states.
#[tokio::test]
async fn images_in_the_middle_are_computed_as_a_whole() -> Result<(), Error> {
    let (one, other) = (picture(40, 30, 1), picture(90, 120, 2));
    let prompts = [
        prompt(5, &[&one], 7, 1),
        prompt(5, &[&one], 7, 9),
        prompt(5, &[&other], 7, 1),
        prompt(5, &[&one, &other], 3, 1),
        prompt(40, &[&one], 30, 1),
        prompt(40, &[&one], 33, 1),
        prompt(21, &[], 0, 1),
    ];
    for windows in [WindowKv::Blocks, WindowKv::States] {
        let mut cold = Vec::new();
        for prompt in &prompts {
            let engine = builder(windows).kv_memory(4 << 20).prefix_caching(false).build().await?;
            cold.push(bits(&engine.complete(prompt.clone()).await?));
            engine.shutdown().await;
        }
        for pair in cold.windows(2) {
            assert_ne!(pair[0], pair[1], "the prompts lead to different logits");
        }
        for block_size in [1, 2, 4, 8, 16, 32, 64] {
            for step in [5, 10, 23, 512] {
                let builder = builder(windows).block_size(block_size).max_batched_tokens(step);
                let engine = builder.kv_memory(4 << 20).build().await?;
                compare(&engine, &prompts, &cold).await?;
                engine.shutdown().await;
            }
        }
    }
    Ok(())
}

/// Asks everything one after the other, again with a warm cache, and all at the same time.
async fn compare(
    engine: &Engine,
    prompts: &[Request],
    cold: &[Vec<(u32, u32)>],
) -> Result<(), Error> {
    let case = format!("blocks of {}", engine.model_info().block_size);
    for round in 0..2 {
        for (prompt, cold) in prompts.iter().zip(cold) {
            let answer = engine.complete(prompt.clone()).await?;
            assert_eq!(bits(&answer), *cold, "{case}, round {round}");
            let usage = answer.finish.usage;
            assert!(usage.image_tokens.is_multiple_of(ROWS), "{usage:?}");
        }
    }
    let all = prompts.iter().map(|prompt| engine.complete(prompt.clone()));
    for (answer, cold) in futures::future::try_join_all(all).await?.iter().zip(cold) {
        assert_eq!(bits(answer), *cold, "{case}, at the same time");
    }
    let stats = engine.stats();
    assert!(stats.images_encoded <= 3, "{}", stats.images_encoded);
    engine.audit().await?;
    Ok(())
}
