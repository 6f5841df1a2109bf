//! Models with a recurrent state, or with windows in the states of sequences: an answer has the
//! same bits wherever its request resumes, and a request computes few tokens more than with a model
//! without a state.

use stolon::{Completion, Engine, EngineBuilder, Request, TokenLogprob, WindowKv};

/// Vocabulary size of the fixtures. The preset's is larger.
const VOCAB_SIZE: u32 = 96;

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * seed + seed) % VOCAB_SIZE).collect()
}

fn builder(model: &str) -> EngineBuilder {
    match model.starts_with("random:") {
        true => Engine::builder().model(model),
        false => Engine::builder().model(stolon_fixtures::path(model)),
    }
}

async fn start(builder: EngineBuilder) -> Engine {
    builder.build().await.expect("the engine starts")
}

async fn complete(engine: &Engine, tokens: &[u32]) -> Completion {
    let request = Request::tokens(tokens).max_tokens(20).logprobs(3).ignore_eos(true);
    engine.complete(request).await.expect("it fits")
}

fn bits(logprobs: &[TokenLogprob]) -> Vec<(u32, u32)> {
    logprobs.iter().map(|token| (token.token_id, token.logprob.to_bits())).collect()
}

/// The turns of a conversation: each prompt is the one before, its answer and more tokens. Returns
/// the answers with the bits of their log-probabilities, and how many tokens of each prompt were
/// not computed.
async fn converse(engine: &Engine, turns: u32) -> (Vec<Vec<(u32, u32)>>, Vec<usize>) {
    let (mut tokens, mut answers, mut cached) = (prompt(1, 70), Vec::new(), Vec::new());
    for turn in 0..turns {
        let answer = complete(engine, &tokens).await;
        answers.push(bits(&answer.logprobs));
        cached.push(answer.finish.usage.cached_tokens);
        tokens.extend(answer.token_ids);
        tokens.extend(prompt(turn + 2, 15));
    }
    (answers, cached)
}

/// Goal: for every architecture and size of blocks and chunks, a conversation has the same bits as
/// without a cache, and each turn resumes near the end of the one before.
#[tokio::test]
async fn conversations_resume_with_the_same_bits() {
    let recurrent = [
        "random:hybrid-tiny",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "granite_mamba",
        "granite_mamba_moe",
        "kimi_linear",
        "nemotron_h",
        "nemotron_h_moe",
        "falcon_h1",
    ];
    let windowed = ["gemma3", "gemma4", "gpt_oss"];
    let recurrent = recurrent.map(|model| (model, WindowKv::Blocks));
    let windowed = windowed.map(|model| (model, WindowKv::States));
    for (model, windows) in recurrent.into_iter().chain(windowed) {
        let cold = start(builder(model).prefix_caching(false)).await;
        let (expected, none) = converse(&cold, 4).await;
        assert_eq!(none, [0; 4]);
        for (block_size, chunk) in [(1, 64), (4, 7), (16, 7), (16, 512), (32, 64)] {
            let warm = builder(model).block_size(block_size).max_batched_tokens(chunk);
            let warm = start(warm.window_kv(windows).kv_memory(64 << 20)).await;
            assert!(warm.model_info().state_bytes > 0, "{model}");
            let (answers, cached) = converse(&warm, 4).await;
            let case = format!("{model}, blocks of {block_size}, chunks of {chunk}");
            assert_eq!(answers, expected, "{case}");
            // A turn ends with its answer. The state after the last token of the answer is not
            // computed.
            let ends = [0, 70 + 19, 105 + 19, 140 + 19];
            for (turn, (cached, end)) in cached.into_iter().zip(ends).enumerate() {
                let distance = block_size.max(16);
                assert_eq!(cached, end / distance * distance, "{case}, turn {turn}");
            }
            warm.audit().await.expect("consistent accounting");
            warm.shutdown().await;
        }
        cold.shutdown().await;
    }
}

/// Goal: prompts that differ from any position on, run at the same time, repeat each other and
/// evict each other's state have the same bits as alone.
#[tokio::test]
async fn requests_at_the_same_time_have_the_same_bits_as_alone() {
    let cold = start(builder("random:hybrid-tiny").prefix_caching(false).max_running(1)).await;
    let shared = prompt(1, 90);
    let prompts: Vec<Vec<u32>> = (0..12)
        .map(|n: u32| [&shared[..(n as usize * 7 + 9).min(90)], &prompt(n % 5, 30)].concat())
        .collect();
    let mut expected = Vec::new();
    for prompt in &prompts {
        expected.push(bits(&complete(&cold, prompt).await.logprobs));
    }
    let spec = cold.model_info();
    let state_blocks = spec.state_bytes.div_ceil(spec.kv_bytes / spec.num_blocks);
    for blocks in [30 + state_blocks, 60 + 4 * state_blocks, 4000] {
        let warm = builder("random:hybrid-tiny").num_blocks(blocks).max_batched_tokens(40);
        let warm = start(warm).await;
        for _ in 0..3 {
            let runs = prompts.iter().map(|prompt| complete(&warm, prompt));
            let answers = futures::future::join_all(runs).await;
            for (answer, expected) in answers.iter().zip(&expected) {
                assert_eq!(&bits(&answer.logprobs), expected, "{blocks} blocks");
            }
        }
        let stats = warm.stats();
        assert!(blocks < 4000 || stats.cached_tokens > stats.prompt_tokens / 2, "{stats:?}");
        warm.audit().await.expect("consistent accounting");
        warm.shutdown().await;
    }
    cold.shutdown().await;
}

/// Goal: callers learn how many tokens are cached and from where a request resumes, before it runs
/// and afterward.
#[tokio::test]
async fn callers_learn_where_a_request_resumes() {
    let engine = start(builder("random:hybrid-tiny")).await;
    let tokens = prompt(1, 100);
    let request = |tokens: &[u32]| Request::tokens(tokens).max_tokens(1);
    let found = |tokens: &[u32]| engine.cache().query_resume(&request(tokens)).expect("tokens");
    assert_eq!((found(&tokens).cached, found(&tokens).resume), (0, 0));
    engine.cache().warm(request(&tokens)).await.expect("it fits");
    assert_eq!((found(&tokens).cached, found(&tokens).resume), (96, 96));
    // Another prompt shares 80 tokens, for which there is KV but no state.
    let other = [&tokens[..80], &prompt(9, 20)].concat();
    assert_eq!((found(&other).cached, found(&other).resume), (80, 0));
    let estimate = engine.estimate(&request(&other)).expect("tokens");
    assert_eq!(estimate.cached_tokens, 0);
    engine.cache().warm(request(&other)).await.expect("it fits");
    assert_eq!(engine.stats().recomputed_tokens, 80);
    let third = [&tokens[..80], &prompt(11, 20)].concat();
    assert_eq!((found(&third).cached, found(&third).resume), (80, 80));
    let dump = engine.cache().dump().expect("it runs");
    let checkpoints = dump.nodes.iter().filter(|node| node.checkpoint).count();
    assert_eq!(checkpoints, 3, "at 80, and before the end of both prompts");
    engine.shutdown().await;
}

/// Goal: after a restart, a conversation continues from its stored state with the same bits.
#[cfg(feature = "tiers")]
#[tokio::test]
async fn a_restarted_engine_resumes_with_the_same_bits() {
    for (model, windows) in [
        ("random:hybrid-tiny", WindowKv::Blocks),
        ("gemma3", WindowKv::States),
        ("gpt_oss", WindowKv::States),
    ] {
        let name = model.replace(':', "-");
        let path = std::env::temp_dir().join(format!("stolon-{name}-{}", std::process::id()));
        let cold = start(builder(model).prefix_caching(false)).await;
        let tokens = prompt(1, 200);
        let longer = [tokens.clone(), prompt(2, 20)].concat();
        let expected = bits(&complete(&cold, &longer).await.logprobs);
        // Records are read however fast this machine computes.
        let with_disk = || {
            let builder = builder(model).window_kv(windows).kv_cache_dir(&path, 1 << 30);
            start(builder.prefetch_policy(stolon::PrefetchPolicy::WaitComplete))
        };
        let first = with_disk().await;
        complete(&first, &tokens).await;
        first.tiers().flush().await.expect("it runs");
        first.shutdown().await;
        let again = with_disk().await;
        let answer = complete(&again, &longer).await;
        assert_eq!(bits(&answer.logprobs), expected, "{model}");
        assert_eq!(answer.finish.usage.cached_tokens, 192, "whole records of 64 positions");
        assert_eq!(again.stats().loaded_tokens, 192, "{model}");
        again.audit().await.expect("consistent accounting");
        again.shutdown().await;
        // Windows that were stored in states are of no use to a server that has them in blocks.
        if windows == WindowKv::States {
            let blocks = start(builder(model).kv_cache_dir(&path, 1 << 30)).await;
            let answer = complete(&blocks, &longer).await;
            assert_eq!(bits(&answer.logprobs), expected, "{model}");
            assert_eq!(answer.finish.usage.cached_tokens, 0, "{model}");
            blocks.shutdown().await;
        }
        std::fs::remove_dir_all(&path).expect("it was made");
    }
}

/// Goal: with a disk tier, a pin keeps the checkpoint of its prefix, too, under a write policy that
/// would not have stored it; and a prompt whose last checkpoint is not at its last full block is
/// warm.
#[cfg(feature = "tiers")]
#[tokio::test]
async fn a_pinned_prefix_keeps_its_checkpoint_on_the_disk() {
    let path = std::env::temp_dir().join(format!("stolon-pinned-state-{}", std::process::id()));
    let spec = start(builder("random:hybrid-tiny")).await.model_info().clone();
    let state_blocks = spec.state_bytes.div_ceil(spec.kv_bytes / spec.num_blocks);
    let policy = stolon::WritePolicy::WriteThroughSelective { hits: 9.try_into().expect("one") };
    let engine = builder("random:hybrid-tiny").num_blocks(40 + 2 * state_blocks);
    let engine = engine.kv_cache_dir(&path, 1 << 30).write_policy(policy);
    let engine = start(engine.prefetch_policy(stolon::PrefetchPolicy::WaitComplete)).await;
    let pinned = prompt(1, 230);
    let request = Request::tokens(pinned.clone());
    assert!(!engine.cache().is_warm(&request).expect("tokens"));
    complete(&engine, &pinned).await;
    assert_eq!(engine.cache().query_resume(&request).expect("tokens").resume, 192);
    assert!(engine.cache().is_warm(&request).expect("tokens"), "it needs no second computation");
    engine.cache().pin(&request, None).await.expect("it is cached");
    engine.tiers().flush().await.expect("it runs");
    for seed in 2..8 {
        complete(&engine, &prompt(seed, 500)).await;
    }
    assert_eq!(engine.cache().query_resume(&request).expect("tokens").resume, 0, "it was evicted");
    let longer = [pinned, prompt(9, 20)].concat();
    assert_eq!(complete(&engine, &longer).await.finish.usage.cached_tokens, 192);
    engine.audit().await.expect("consistent accounting");
    engine.shutdown().await;
    std::fs::remove_dir_all(&path).expect("it was made");
}

/// Goal: a prompt that is computed in the background has its checkpoint where a longer prompt
/// resumes, at every size of blocks, and the answer to that has the same bits as without a cache.
#[tokio::test]
async fn prompts_are_computed_in_the_background() {
    for (model, windows) in [("qwen3_5", WindowKv::Blocks), ("gemma3", WindowKv::States)] {
        let cold = start(builder(model).prefix_caching(false)).await;
        let (first, next) = (prompt(1, 50), prompt(1, 90));
        let expected = bits(&complete(&cold, &next).await.logprobs);
        for block_size in [1, 4, 16] {
            let warm = builder(model).block_size(block_size).window_kv(windows);
            let warm = start(warm.kv_memory(64 << 20)).await;
            let end = 50 / block_size * block_size;
            // The position after the last block is computed, too, and nothing for the second time.
            for _ in 0..2 {
                let request = Request::tokens(&first[..]);
                assert!(warm.cache().warm_when_idle(request).await.expect("it fits"));
                assert_eq!(warm.stats().background_tokens as usize, end + 1);
            }
            let answer = complete(&warm, &next).await;
            assert_eq!(answer.finish.usage.cached_tokens, end, "{model} {block_size}");
            assert_eq!(bits(&answer.logprobs), expected, "{model} {block_size}");
        }
    }
}
