//! Correctness of prefix caching in a running engine: equal logits on every path, full hits, shared
//! blocks, eviction and block accounting. `crates/engine/kvcache/tests` covers the prefix index alone.

use std::time::Duration;

use fake::builder;
use stolon::{Completion, Engine, Request, TokenLogprob};

use crate::support::fake;

/// Vocabulary size of the model `random:tiny`.
const VOCAB_SIZE: usize = 320;

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * seed + seed) % 200).collect()
}

/// An engine on a small model with random weights. It does not cache logits, so a full hit computes
/// the last position of the prompt.
async fn tiny(block_size: usize, chunk: usize, caching: bool) -> Engine {
    let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(1024 / block_size);
    let builder = builder.block_size(block_size).max_batched_tokens(chunk).prefix_caching(caching);
    builder.logit_cache_bytes(0).build().await.expect("the engine starts")
}

async fn run(engine: &Engine, request: Request) -> Completion {
    engine.complete(request).await.expect("it ends")
}

/// The log-probabilities of the whole vocabulary at each of three greedy steps, and the number of
/// cached prompt tokens.
async fn distributions(engine: &Engine, tokens: &[u32]) -> (Vec<TokenLogprob>, usize) {
    let request = Request::tokens(tokens.to_vec()).max_tokens(3).ignore_eos(true);
    let answer = run(engine, request.logprobs(VOCAB_SIZE)).await;
    (answer.logprobs, answer.finish.usage.cached_tokens)
}

/// Goal: for a prompt that is cached to its last position, and whose logits are not cached, the
/// engine computes that position alone and writes no keys and values.
#[tokio::test]
async fn full_hit_computes_only_the_last_position() {
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
    assert!(slice.write_from > 63, "no position is written");
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_committed, 4);
}

/// Goal: requests that share cached blocks and decode at the same time get the same tokens as
/// alone.
#[tokio::test]
async fn concurrent_requests_do_not_corrupt_shared_blocks() {
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
    engine.audit().await.expect("consistent accounting");
}

/// Goal: the logits after a prompt are the same, bit for bit, without a cache, with an empty cache,
/// after a partial hit and after a full hit, for several block and chunk sizes.
#[tokio::test]
async fn logits_do_not_depend_on_the_cache() {
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
            engine.cache().flush().await.expect("it runs");
            let cold = distributions(&engine, &tokens).await;
            assert_eq!(cold.1, 0);
            for got in [partial.0, full.0, cold.0] {
                assert_eq!(got, reference, "block size {block_size}, chunk {chunk}");
            }
        }
    }
}

/// Goal: if new prompts evict cached ones, both the new prompts and the repeated old ones get the
/// right tokens.
#[tokio::test]
async fn eviction_does_not_change_answers() {
    let (engine, alone) = (tiny(16, 512, true).await, tiny(16, 512, false).await);
    let ask = |seed| Request::tokens(prompt(seed, 200)).max_tokens(4).ignore_eos(true);
    for seed in (1..12).chain(1..12) {
        let answer = run(&engine, ask(seed)).await;
        assert_eq!(answer.token_ids, run(&alone, ask(seed)).await.token_ids, "seed {seed}");
    }
    assert!(engine.stats().evictions > 0);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: after many completed and canceled requests every block is free or cached, and after a
/// flush every block is free.
#[tokio::test]
async fn every_block_is_free_or_cached_after_all_requests() {
    let (builder, _) = builder(20);
    let engine = builder.build().await.expect("valid settings");
    for round in 0..200u32 {
        let tokens: Vec<u32> = (0..round * 7 % 90 + 1).map(|i| i * (1 + round % 3) % 256).collect();
        let request = Request::tokens(tokens).max_tokens(1 + round as usize % 5);
        let stream = engine.generate(request).await.expect("it fits");
        if round % 4 == 3 {
            drop(stream);
        } else {
            stream.collect_text().await.expect("it ends");
        }
    }
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let audit = engine.audit().await.expect("consistent accounting");
    assert_eq!((audit.blocks_reserved, audit.blocks_evictable), (0, audit.blocks_committed));
    assert_eq!(audit.blocks_free + audit.blocks_committed, 20);
    engine.cache().flush().await.expect("it runs");
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 20);
}

/// Goal: a request that writes nothing to the cache uses cached prefixes, adds none, and no other
/// request waits for it. A request that reads nothing from the cache computes its whole prompt. The
/// answers are the same.
#[tokio::test]
async fn a_request_can_skip_the_cache() {
    let (builder, _) = builder(64);
    let engine = builder.build().await.expect("valid settings");
    let blocks = async || engine.audit().await.expect("consistent accounting").blocks_committed;
    let request = |len: u32| Request::tokens(prompt(2, len)).max_tokens(20);
    let unwritten = |len: u32| request(len).skip_writing_prefix_cache(true);
    // Without this setting, two requests at the same time would share the prefill, and preempt each
    // other.
    let (first, second) = tokio::join!(run(&engine, unwritten(70)), run(&engine, unwritten(70)));
    assert_eq!((first.finish.usage.cached_tokens, second.finish.usage.cached_tokens), (0, 0));
    assert_eq!((blocks().await, first.token_ids), (0, second.token_ids.clone()));
    let choices = engine.generate_choices(unwritten(70), 3).await.expect("it fits");
    assert_eq!((choices.len(), blocks().await), (3, 0));
    for choice in choices {
        let answer = choice.collect_text().await.expect("it ends");
        assert_eq!((answer.finish.usage.cached_tokens, &answer.token_ids), (0, &second.token_ids));
    }

    run(&engine, request(32).max_tokens(1)).await;
    assert_eq!(blocks().await, 2);
    let reader = run(&engine, unwritten(70)).await;
    assert_eq!((reader.finish.usage.cached_tokens, blocks().await), (32, 2));
    assert_eq!(reader.token_ids, second.token_ids);
    let whole = run(&engine, request(70).skip_reading_prefix_cache(true)).await;
    assert_eq!((whole.finish.usage.cached_tokens, whole.token_ids), (0, second.token_ids));
    assert!(blocks().await > 2, "what was computed is cached");

    let session = engine.sessions().open(Default::default()).expect("a session");
    let refused = engine.generate(unwritten(70).session(session.id)).await;
    let error = refused.expect_err("a session keeps what is cached of it").to_string();
    assert!(error.contains("skip_writing_prefix_cache"), "{error}");
}

/// Goal: without prefix caching no prefix is matched, no block stays cached, and the answers are
/// the same.
#[tokio::test]
async fn prefix_caching_can_be_disabled() {
    let mut answers = Vec::new();
    for caching in [true, false] {
        let (builder, _) = builder(64);
        let engine = builder.prefix_caching(caching).build().await.expect("valid settings");
        let request = || Request::tokens(prompt(2, 70)).max_tokens(6);
        run(&engine, request()).await;
        let again = run(&engine, request()).await;
        assert_eq!(again.finish.usage.cached_tokens, if caching { 64 } else { 0 });
        assert_eq!(
            engine.audit().await.expect("consistent accounting").blocks_committed > 0,
            caching
        );
        assert_eq!(engine.cache().dump().expect("it runs").nodes.is_empty(), !caching);
        answers.push(again.token_ids);
    }
    assert_eq!(answers[0], answers[1]);
}

/// Goal: with a quota, a client that floods the cache loses its own oldest prompts only, and every
/// block of the pool can be used. Without one, it evicts the prompts of all others.
#[tokio::test]
async fn a_quota_keeps_one_salt_from_evicting_the_others() {
    let request = |first: u32, blocks: u32| {
        let tokens: Vec<u32> = (0..16 * blocks).map(|n| (first + n * 7) % 256).collect();
        Request::tokens(tokens).max_tokens(1)
    };
    for (quota, others) in [(Some(5), 48), (None, 0)] {
        let mut builder = builder(16).0.max_running(2);
        if let Some(blocks) = quota {
            builder = builder.namespace_quota(blocks);
        }
        let engine = builder.build().await.expect("valid settings");
        let (quiet, unsalted) = (request(3, 3).cache_salt("quiet"), request(3, 3));
        let flood = |round: u32| request(round * 10, 2).cache_salt("flood");
        for prompt in [quiet.clone(), unsalted.clone()] {
            run(&engine, prompt).await;
        }
        // Two of them run at any time, so the engine is never idle in between.
        let floods: Vec<_> =
            (0..20).map(|round| tokio::spawn(warm(&engine, flood(round)))).collect();
        for flood in floods {
            flood.await.expect("no panic");
        }
        let cached = |request: &Request| engine.cache().query_match_len(request).expect("tokens");
        assert_eq!((cached(&quiet), cached(&unsalted)), (others, others), "{quota:?}");
        let flooded: usize = (0..20).map(|round| cached(&flood(round))).sum();
        let report = engine.audit().await.expect("consistent accounting");
        let stats = engine.stats();
        if let Some(blocks) = quota {
            assert_eq!(flooded, blocks * 16);
            assert_eq!((stats.evictions, stats.evictions_for_quota), (0, 35));
            assert_eq!((report.blocks_committed, report.blocks_free), (11, 5));
            // The next request needs more than the free blocks, so it evicts in the default order.
            run(&engine, request(200, 8)).await;
            assert!(engine.stats().evictions > 0);
        } else {
            assert_eq!(stats.evictions_for_quota, 0);
        }
        engine.audit().await.expect("consistent accounting");
    }
    let refused = builder(8).0.namespace_quota(9).build().await.expect_err("too many").to_string();
    assert!(refused.contains("namespace_quota") && refused.contains("got 9"), "{refused}");
}

/// Computes a prompt on a separate task.
fn warm(engine: &Engine, request: Request) -> impl Future<Output = ()> + Send + use<> {
    let engine = engine.clone();
    async move {
        run(&engine, request).await;
    }
}
