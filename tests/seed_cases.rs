//! The cases of prefix caching that need a model and an engine, each by name: equal logits on
//! every path, full hits, sharing while running, eviction, conservation. Those of the index alone
//! are in `kvcache/tests`.

#[path = "support/fake.rs"]
mod fake;

use std::time::Duration;

use fake::builder;
use stolon::{Completion, Engine, Request, TokenLogprob};

/// Tokens of the small random model below.
const VOCAB_SIZE: usize = 320;

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * seed + seed) % 200).collect()
}

/// An engine on a small model with random weights, which keeps no rows of logits: a full hit
/// computes its last position.
async fn tiny(block_size: usize, chunk: usize, caching: bool) -> Engine {
    let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(1024 / block_size);
    let builder = builder.block_size(block_size).max_batched_tokens(chunk).prefix_caching(caching);
    builder.logit_cache_bytes(0).build().await.expect("the engine starts")
}

async fn run(engine: &Engine, request: Request) -> Completion {
    engine.generate(request).expect("it fits").collect_text().await.expect("it ends")
}

/// The whole distribution at each of some greedy steps, and how much of the prompt was cached.
async fn distributions(engine: &Engine, tokens: &[u32]) -> (Vec<TokenLogprob>, usize) {
    let request = Request::tokens(tokens.to_vec()).max_tokens(3).ignore_eos(true);
    let told = run(engine, request.logprobs(VOCAB_SIZE)).await;
    (told.logprobs, told.finish.usage.cached_tokens)
}

/// Case 8: a prompt that is cached to its last position still gets its logits, by computing that
/// one position and writing it nowhere, where its row of logits was not kept.
#[tokio::test]
async fn case_08_full_prompt_match_computes_its_last_position() {
    let (builder, handle) = builder(64);
    let engine = builder.logit_cache_bytes(0).build().await.expect("valid settings");
    let tokens = prompt(1, 64);
    let first = run(&engine, Request::tokens(tokens.clone()).max_tokens(1)).await;
    drop(handle.take_batches());
    let second = run(&engine, Request::tokens(tokens).max_tokens(1)).await;
    assert_eq!(second.token_ids, first.token_ids);
    assert_eq!(second.finish.usage.cached_tokens, 64);
    let batches = handle.take_batches();
    assert_eq!(batches.len(), 1);
    let slice = &batches[0].sequences[0];
    assert_eq!((batches[0].tokens.len(), slice.start), (1, 63));
    assert!(slice.write_from > 63, "nothing is written");
    assert_eq!(engine.audit().await.expect("clean books").blocks_committed, 4);
}

/// Case 9: requests that share cached blocks decode side by side, each as if it were alone.
#[tokio::test]
async fn case_09_shared_blocks_are_not_corrupted() {
    let engine = tiny(16, 512, true).await;
    let shared = prompt(3, 96);
    let ask = |tail: u32| {
        let mut tokens = shared.clone();
        tokens.push(tail);
        Request::tokens(tokens).max_tokens(20).ignore_eos(true)
    };
    let alone = tiny(16, 512, false).await;
    run(&engine, ask(200)).await;
    let together = futures::future::join_all((0..4).map(|tail| run(&engine, ask(tail)))).await;
    for (tail, answer) in (0..).zip(together) {
        assert_eq!(answer.finish.usage.cached_tokens, 96);
        assert_eq!(answer.token_ids, run(&alone, ask(tail)).await.token_ids, "tail {tail}");
    }
    engine.audit().await.expect("clean books");
}

/// Case 12: the logits after a prompt are the same to the last bit without a cache, with an empty
/// one, after a partial hit and after a full one, for any size of blocks and chunks.
#[tokio::test]
async fn case_12_logit_consistency() {
    let tokens = prompt(5, 80);
    let reference = distributions(&tiny(16, 512, false).await, &tokens).await.0;
    assert_eq!(reference.len(), 3);
    assert!(reference.iter().all(|step| step.top.len() > 100), "the whole distribution");
    for block_size in [1, 16] {
        for chunk in [33, 512] {
            let engine = tiny(block_size, chunk, true).await;
            let mut other = tokens[..40].to_vec();
            other.extend(prompt(9, 30));
            run(&engine, Request::tokens(other).max_tokens(1)).await;
            let partial = distributions(&engine, &tokens).await;
            assert_eq!(partial.1, 40 / block_size * block_size);
            let full = distributions(&engine, &tokens).await;
            assert_eq!(full.1, 80);
            engine.flush().await.expect("it runs");
            let cold = distributions(&engine, &tokens).await;
            assert_eq!(cold.1, 0);
            for got in [partial.0, full.0, cold.0] {
                assert_eq!(got, reference, "block size {block_size}, chunk {chunk}");
            }
        }
    }
}

/// Case 13, with a model: a pool full of cached prompts makes room for new ones, which are
/// answered right, and so are the old ones when they come again.
#[tokio::test]
async fn case_13_eviction_correctness() {
    let (engine, alone) = (tiny(16, 512, true).await, tiny(16, 512, false).await);
    let ask = |seed| Request::tokens(prompt(seed, 200)).max_tokens(4).ignore_eos(true);
    for seed in (1..12).chain(1..12) {
        let answer = run(&engine, ask(seed)).await;
        assert_eq!(answer.token_ids, run(&alone, ask(seed)).await.token_ids, "seed {seed}");
    }
    assert!(engine.stats().evictions > 0);
    engine.audit().await.expect("clean books");
}

/// Cases 14 and 15, with an engine: after requests of all kinds, cancelled ones among them, every
/// block is free or cached, and after a flush free.
#[tokio::test]
async fn case_14_and_15_page_conservation() {
    let (builder, _) = builder(20);
    let engine = builder.build().await.expect("valid settings");
    for round in 0..200u32 {
        let tokens: Vec<u32> = (0..round * 7 % 90 + 1).map(|i| i * (1 + round % 3) % 256).collect();
        let request = Request::tokens(tokens).max_tokens(1 + round as usize % 5);
        let stream = engine.generate(request).expect("it fits");
        if round % 4 == 3 {
            drop(stream);
        } else {
            stream.collect_text().await.expect("it ends");
        }
    }
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let audit = engine.audit().await.expect("clean books");
    assert_eq!((audit.blocks_reserved, audit.blocks_evictable), (0, audit.blocks_committed));
    assert_eq!(audit.blocks_free + audit.blocks_committed, 20);
    engine.flush().await.expect("it runs");
    assert_eq!(engine.audit().await.expect("clean books").blocks_free, 20);
}

/// Without a cache there is nothing to match, nothing is kept, and the answers are the same.
#[tokio::test]
async fn caching_can_be_turned_off() {
    let mut answers = Vec::new();
    for caching in [true, false] {
        let (builder, _) = builder(64);
        let engine = builder.prefix_caching(caching).build().await.expect("valid settings");
        let request = || Request::tokens(prompt(2, 70)).max_tokens(6);
        run(&engine, request()).await;
        let again = run(&engine, request()).await;
        assert_eq!(again.finish.usage.cached_tokens, if caching { 64 } else { 0 });
        assert_eq!(engine.audit().await.expect("clean books").blocks_committed > 0, caching);
        assert_eq!(engine.dump().expect("it runs").nodes.is_empty(), !caching);
        answers.push(again.token_ids);
    }
    assert_eq!(answers[0], answers[1]);
}
