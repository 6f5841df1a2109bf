//! What a program can implement itself with the crate `stolon` alone: a backend and an eviction
//! order. Both are the ones in `examples/own_backend.rs`.

#[expect(dead_code, reason = "the tests use the example's types, not its main function")]
#[path = "../examples/own_backend.rs"]
mod example;

use example::{AttentionBackend, ShortestPrefixFirst};
use stolon::{Completion, Engine, EngineBuilder, EngineError, Error, Event, LengthBound, Request};

fn builder(block_count: usize) -> EngineBuilder {
    // Without cached logits, a prompt that is cached completely computes its last position again.
    Engine::builder()
        .backend("attention", Box::new(AttentionBackend::new(block_count)))
        .logit_cache_bytes(0)
}

/// A prompt of `length` tokens whose first token is `first`.
fn prompt(first: u32, length: u32) -> Vec<u32> {
    (0..length).map(|n| (first + n * n * 5) % 64).collect()
}

async fn run(engine: &Engine, tokens: &[u32]) -> Completion {
    let request = Request::tokens(tokens).max_tokens(12).logprobs(3);
    let stream = engine.generate(request).await.expect("a valid request");
    stream.collect_text().await.expect("a complete answer")
}

/// Goal: with a backend of the caller's own, an answer is the same, bit for bit, with an empty
/// cache, with a cached prefix, and with the whole prompt cached, however the prompt is cut into
/// chunks.
#[tokio::test]
async fn own_backend_answers_the_same_with_a_warm_and_a_cold_cache() {
    let cold = builder(64).prefix_caching(false).build().await.expect("valid settings");
    for chunk in [5, 512] {
        let warm = builder(64).max_batched_tokens(chunk).build().await.expect("valid settings");
        let shared = prompt(1, 64);
        for (tail, cached_tokens) in [(vec![5, 6], 0), (vec![7, 8, 9], 64), (vec![], 64)] {
            let tokens = [shared.clone(), tail].concat();
            let expected = run(&cold, &tokens).await;
            let answer = run(&warm, &tokens).await;
            assert_eq!(answer.finish.usage.cached_tokens, cached_tokens, "chunk {chunk}");
            assert_eq!(answer.token_ids, expected.token_ids, "chunk {chunk}");
            assert_eq!(answer.logprobs, expected.logprobs, "chunk {chunk}");
        }
        warm.audit().await.expect("consistent accounting");
    }
}

/// Goal: the next token depends on early tokens of the prompt too, so that the test above would
/// notice keys and values read from a wrong block.
#[tokio::test]
async fn own_backend_reads_the_whole_prefix() {
    let engine = builder(64).prefix_caching(false).build().await.expect("valid settings");
    let tokens = prompt(1, 40);
    let original = run(&engine, &tokens).await;
    for index in [0, 17, 38] {
        let mut changed = tokens.clone();
        changed[index] = (changed[index] + 9) % 64;
        assert_ne!(run(&engine, &changed).await.logprobs, original.logprobs, "index {index}");
    }
}

/// Goal: a custom eviction order decides which prefix is evicted. LRU evicts the oldest one, the
/// custom order the shortest one.
#[tokio::test]
async fn custom_eviction_order_selects_the_victim() {
    for (is_custom, evicted) in [(false, "long"), (true, "short")] {
        let mut builder = builder(8);
        if is_custom {
            builder = builder.eviction_order(|| Box::new(ShortestPrefixFirst));
        }
        let engine = builder.build().await.expect("valid settings");
        let prompts = [("long", prompt(2, 64)), ("short", prompt(3, 32))];
        for (_, tokens) in &prompts {
            engine.cache().warm(Request::tokens(tokens.clone())).await.expect("it fits");
        }
        // Six of the eight blocks are cached, so that three new ones need room.
        engine.cache().warm(Request::tokens(prompt(4, 48))).await.expect("it fits");
        for (name, tokens) in prompts {
            let length = tokens.len();
            let cached =
                engine.cache().query_match_len(&Request::tokens(tokens)).expect("token ids");
            assert_eq!(cached < length, name == evicted, "{name}: {cached}, custom: {is_custom}");
        }
        assert!(engine.stats().evictions > 0);
        engine.audit().await.expect("consistent accounting");
    }
}

/// Goal: a caller can match on the payload of an error, down to the type of the limit.
#[tokio::test]
async fn error_payloads_are_public() {
    let engine = builder(8).build().await.expect("valid settings");
    let error = engine.generate(Request::tokens(prompt(1, 500))).await.expect_err("it cannot fit");
    let Error::Engine(EngineError::PromptTooLong { got: 500, limit, bound }) = error else {
        panic!("{error}");
    };
    assert_eq!((limit, bound), (128, LengthBound::Pool { blocks: 8, block_size: 16 }));
}

/// Goal: a stream can be read without any other crate, and ends after its last event.
#[tokio::test]
async fn streams_are_read_without_further_crates() {
    let engine = builder(8).build().await.expect("valid settings");
    let request = Request::tokens(prompt(1, 20)).max_tokens(3);
    let mut stream = engine.generate(request).await.expect("a valid request");
    let (mut tokens, mut is_finished) = (0, false);
    while let Some(event) = stream.next().await {
        match event.expect("no error") {
            Event::Token(_) => tokens += 1,
            Event::Finished(_) => is_finished = true,
            _ => {}
        }
    }
    assert_eq!((tokens, is_finished), (3, true));
    // The engine still runs, so the error of one more read is the caller's.
    let error = stream.collect_text().await.expect_err("it was read to its end");
    assert!(matches!(error, Error::Engine(EngineError::InvalidParameter { .. })), "{error}");
    run(&engine, &prompt(1, 20)).await;
}
