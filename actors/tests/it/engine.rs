//! The engine on the fake backend, whose KV store detects every wrong or reused block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stolon_actors::EngineHandle;
use stolon_backend::LogitRows;
use stolon_backend::fake::{FakeBackend, FakeOptions, expected_logits};
use stolon_kvcache::Namespace;
use stolon_scheduler::{EngineConfig, EngineError, Event, FinishReason, SequenceRequest};
use support::{options, prompt, read_to_end, start};

use crate::support::harness as support;

fn config() -> EngineConfig {
    EngineConfig { max_batched_tokens: 64, ..EngineConfig::default() }
}

/// Goal: a cached prefix changes no generated token, and its length is reported.
#[tokio::test]
async fn a_cached_prefix_changes_no_token() {
    let harness = start(options(16, 64), config()).await;
    let tokens = prompt(1, 100);
    let cold = harness.check_greedy(&tokens, 20).await;
    assert_eq!((cold.cached, cold.tokens.len()), (0, 20));
    let warm = harness.check_greedy(&tokens, 20).await;
    assert_eq!(warm.cached, 96);
    assert_eq!(warm.tokens, cold.tokens);
    assert_eq!(warm.finish.reason, FinishReason::Length);
    harness.check_nothing_held().await;
}

/// Goal: for a prompt that is cached completely only the last position is computed, and its keys
/// and values are not written.
#[tokio::test]
async fn a_full_hit_computes_one_position() {
    let config = EngineConfig { logit_cache_bytes: 0, ..config() };
    let harness = start(options(16, 64), config).await;
    let tokens = prompt(2, 96);
    harness.check_greedy(&tokens, 1).await;
    let before = harness.fake.token_count();
    drop(harness.fake.take_batches());
    let answer = harness.check_greedy(&tokens, 1).await;
    assert_eq!(answer.cached, 96);
    assert_eq!(harness.fake.token_count() - before, 1);
    let batches = harness.fake.take_batches();
    let slice = &batches[0].sequences[0];
    assert_eq!((slice.start, slice.write_from), (95, 96));
    assert_eq!(slice.logit_rows, LogitRows::Last);
    // Generation continues correctly after a full hit.
    harness.check_greedy(&tokens, 40).await;
    harness.check_nothing_held().await;
}

/// Goal: cached logits yield the same first token as a forward pass, including seeded sampling,
/// penalties and log-probabilities.
#[tokio::test]
async fn cached_logits_yield_the_same_tokens_as_a_forward_pass() {
    let mut answers = Vec::new();
    for logit_cache_bytes in [0, 1 << 20] {
        let config = EngineConfig { logit_cache_bytes, ..config() };
        let harness = start(options(16, 64), config).await;
        let mut generated = Vec::new();
        for len in [96, 100] {
            for seed in [None, Some(7), Some(7), Some(8)] {
                let mut request = SequenceRequest::new(prompt(2, len), 12);
                request.options.sampling.temperature = if seed.is_some() { 1.0 } else { 0.0 };
                request.options.sampling.seed = seed;
                request.options.sampling.repetition_penalty = 1.3;
                request.options.sampling.logprobs = Some(3);
                let mut stream = harness.engine.submit(request).expect("the request is accepted");
                while let Some(event) = stream.next().await {
                    if let Event::Token(token) = event.expect("no error") {
                        generated.push(token);
                    }
                }
            }
        }
        let from_cache = if logit_cache_bytes > 0 { 6 } else { 0 };
        assert_eq!(harness.engine.context().stats().first_tokens_from_cache, from_cache);
        harness.check_nothing_held().await;
        answers.push(generated);
    }
    assert_eq!(answers[0].len(), 8 * 12);
    assert_eq!(answers[0], answers[1]);
}

/// Goal: a backend that draws tokens itself gives the same tokens as one that returns whole rows,
/// and is asked for tokens only if a request needs nothing else.
#[tokio::test]
async fn drawn_tokens_are_those_of_whole_rows() {
    let mut answers = Vec::new();
    for draws in [false, true] {
        let harness = start(FakeOptions { draws, ..options(16, 64) }, config()).await;
        let mut generated = Vec::new();
        for (temperature, top_k, logprobs) in [
            (0.0, None, None),
            (0.0, None, Some(2)),
            (1.0, Some(20), None),
            (2.0, Some(5), None),
            (1.0, None, None),
            (1.0, None, Some(0)),
        ] {
            let mut request = SequenceRequest::new(prompt(2, 40), 12);
            request.options.sampling.temperature = temperature;
            request.options.sampling.top_k = top_k;
            request.options.sampling.top_p = 0.9;
            request.options.sampling.logprobs = logprobs;
            request.options.sampling.seed = Some(7);
            let stream = harness.engine.submit(request).expect("the request is accepted");
            generated.push(read_to_end(stream).await.expect("it finishes").tokens);
            let batches = harness.fake.take_batches();
            // The first tokens are sampled from rows that may be cached.
            let last = batches.last().expect("steps").sequences[0].logit_rows;
            match last {
                LogitRows::Drawn(draw) => {
                    assert!(draws && logprobs.is_none());
                    assert_eq!((draw.temperature, draw.top_k), (temperature, top_k));
                }
                rows => {
                    assert_eq!(rows, LogitRows::Last);
                    assert!(!draws || logprobs.is_some());
                }
            }
        }
        harness.check_nothing_held().await;
        answers.push(generated);
    }
    assert!(answers[0].iter().all(|tokens| tokens.len() == 12));
    assert_eq!(answers[0], answers[1]);
}

/// Goal: several choices for one prompt compute it once, and count once in the admission queue.
#[tokio::test]
async fn choices_share_the_computation_of_their_prompt() {
    let config = EngineConfig { max_queued_tokens: 230, ..config() };
    let harness = start(options(16, 64), config).await;
    let request = SequenceRequest::new(prompt(2, 200), 5);
    let hold = harness.fake.hold();
    let streams =
        harness.engine.submit_choices(request.clone(), 4).expect("the requests are accepted");
    drop(hold);
    assert_eq!(streams.len(), 4);
    for stream in streams {
        harness.check_tokens(
            &prompt(2, 200),
            &read_to_end(stream).await.expect("the request finishes"),
        );
    }
    // The prompt has 12 full blocks and 8 more positions, which each choice computes for itself.
    let decodes = 4 * 4;
    assert_eq!(harness.fake.token_count(), 200 + 3 * 8 + decodes);
    let refused = harness.engine.submit_choices(request, 0).expect_err("no choices");
    assert!(refused.to_string().contains("from 1 to"), "{refused}");
    harness.check_nothing_held().await;
}

/// Goal: the next turn of a conversation finds the previous answer in the cache.
#[tokio::test]
async fn generated_tokens_are_cached() {
    let harness = start(options(16, 64), config()).await;
    let mut tokens = prompt(3, 50);
    let answer = harness.check_greedy(&tokens, 40).await;
    tokens.extend(&answer.tokens);
    tokens.extend(prompt(4, 10));
    // 89 positions were computed, because the last token is never fed back: 5 full blocks.
    assert_eq!(harness.check_greedy(&tokens, 5).await.cached, 80);
    harness.check_nothing_held().await;
}

/// Goal: block size, chunk size and prefix caching change no token.
#[tokio::test]
async fn block_size_chunk_size_and_caching_change_no_token() {
    for block_size in [1, 4, 16, 32] {
        for chunk in [7, 64, 512] {
            for caching in [true, false] {
                let config = EngineConfig {
                    max_batched_tokens: chunk,
                    prefix_caching: caching,
                    ..EngineConfig::default()
                };
                let harness = start(options(block_size, 1024 / block_size), config).await;
                let shared = prompt(5, 70);
                for tail in [0, 1, 13] {
                    let mut tokens = shared.clone();
                    tokens.extend(prompt(tail, tail as usize));
                    let answer = harness.check_greedy(&tokens, 12).await;
                    assert!(caching || answer.cached == 0);
                }
                harness.check_nothing_held().await;
                if !caching {
                    assert_eq!(harness.engine.context().stats().blocks_cached, 0);
                }
            }
        }
    }
}

/// Goal: identical prompts that are submitted together are computed once.
#[tokio::test]
async fn a_prompt_in_flight_is_computed_once() {
    let harness = start(options(16, 256), config()).await;
    let tokens = prompt(6, 320);
    let streams: Vec<_> = (0..8).map(|_| harness.submit(&tokens, 4)).collect();
    for stream in streams {
        let answer = read_to_end(stream).await.expect("the request finishes");
        harness.check_tokens(&tokens, &answer);
    }
    let stats = harness.engine.context().stats();
    assert_eq!(stats.follows, 7);
    assert_eq!(stats.cached_tokens, 7 * 320);
    // The prompt is computed once, and each request takes 3 decode steps.
    assert_eq!(stats.first_tokens_from_cache, 7);
    assert_eq!(harness.fake.token_count(), 320 + 8 * 3);
    harness.check_nothing_held().await;
}

/// Goal: if the leader is canceled, one of its followers becomes the leader and all of them
/// finish.
#[tokio::test]
async fn a_follower_takes_over_from_a_canceled_leader() {
    let harness = start(options(16, 256), config()).await;
    let tokens = prompt(7, 640);
    let hold = harness.fake.hold();
    let leader = harness.submit(&tokens, 4);
    let followers: Vec<_> = (0..3).map(|_| harness.submit(&tokens, 4)).collect();
    harness.wait_for_steps(1).await;
    drop(leader);
    drop(hold);
    for stream in followers {
        let answer = read_to_end(stream).await.expect("the request finishes");
        harness.check_tokens(&tokens, &answer);
    }
    assert_eq!(harness.engine.context().stats().canceled, 1);
    harness.check_nothing_held().await;
}

/// Goal: a stop id ends the generation and is its last token.
#[tokio::test]
async fn a_stop_id_ends_the_generation() {
    let harness = start(options(16, 64), config()).await;
    let tokens = prompt(8, 30);
    let unlimited = harness.check_greedy(&tokens, 30).await;
    let stop = unlimited.tokens[11];
    let first = unlimited.tokens.iter().position(|&token| token == stop).expect("the token occurs");
    let mut request = SequenceRequest::new(tokens, 30);
    request.options.stop_ids = [stop].into_iter().collect();
    let answer = read_to_end(harness.engine.submit(request).expect("the request is accepted"))
        .await
        .expect("the request finishes");
    assert_eq!(answer.tokens, unlimited.tokens[..=first]);
    assert_eq!(answer.finish.reason, FinishReason::StopToken(stop));
    harness.check_nothing_held().await;
}

/// Goal: if the pool is too small for all requests, some wait and some are preempted, but all
/// finish with the right tokens.
#[tokio::test]
async fn a_pool_too_small_for_all_serves_all() {
    for block_count in [10, 12, 20] {
        let harness = start(options(16, block_count), config()).await;
        let prompts: Vec<_> = (0..12).map(|n| prompt(n, 40 + n as usize * 3)).collect();
        let streams: Vec<_> = prompts.iter().map(|tokens| harness.submit(tokens, 80)).collect();
        for (tokens, stream) in prompts.iter().zip(streams) {
            let answer = read_to_end(stream).await.expect("the request finishes");
            harness.check_tokens(tokens, &answer);
            assert_eq!(answer.tokens.len(), 80);
        }
        harness.check_nothing_held().await;
        assert!(harness.engine.context().stats().evictions > 0);
    }
}

/// Goal: a request that fills the pool to its last position is served. A prompt that is one
/// position longer is refused, and the error carries both numbers.
#[tokio::test]
async fn a_request_that_fits_an_empty_pool_is_served() {
    let harness = start(options(16, 4), config()).await;
    harness.check_greedy(&prompt(1, 64), 1).await;
    assert_eq!(harness.check_greedy(&prompt(2, 60), 100).await.tokens.len(), 5);
    assert_eq!(harness.check_greedy(&prompt(1, 64), 1).await.tokens.len(), 1);
    let refused = harness.engine.submit(SequenceRequest::new(prompt(3, 65), 1));
    let error = refused.expect_err("too long");
    assert!(matches!(error, EngineError::PromptTooLong { got: 65, limit: 64, .. }), "{error}");
    harness.check_nothing_held().await;
}

/// Goal: an invalid request is refused with an error that names the problem, and is not counted.
#[tokio::test]
async fn invalid_requests_are_refused() {
    let harness = start(options(16, 8), config()).await;
    let submit = |change: &dyn Fn(&mut SequenceRequest)| {
        let mut request = SequenceRequest::new(prompt(1, 10), 4);
        change(&mut request);
        harness.engine.submit(request).expect_err("an invalid request").to_string()
    };
    assert!(submit(&|r| Arc::make_mut(&mut r.tokens).clear()).contains("empty"));
    assert!(submit(&|r| Arc::make_mut(&mut r.tokens)[3] = 256).contains("token id 256 at index 3"));
    assert!(
        submit(&|r| r.options.max_tokens = Some(0)).contains("max_tokens: expected at least 1")
    );
    assert!(submit(&|r| r.options.sampling.temperature = -1.0).contains("temperature"));
    assert!(submit(&|r| r.options.prompt_logprobs = Some(1000)).contains("prompt_logprobs"));
    assert_eq!(harness.engine.context().stats().requests, 0);
    harness.check_nothing_held().await;
}

/// Goal: a full admission queue refuses requests at once, and accepts them again when it has room.
#[tokio::test]
async fn a_full_admission_queue_refuses_requests() {
    let config = EngineConfig { max_running: 1, max_queued_requests: 2, ..config() };
    let harness = start(options(16, 64), config).await;
    let hold = harness.fake.hold();
    let running = harness.submit(&prompt(1, 20), 4);
    harness.wait_for_steps(1).await;
    let waiting = [harness.submit(&prompt(2, 20), 4), harness.submit(&prompt(3, 20), 4)];
    let refused = harness.engine.submit(SequenceRequest::new(prompt(4, 20), 4));
    assert!(matches!(refused, Err(EngineError::Overloaded { queued_requests: 2, .. })));
    assert_eq!(harness.engine.context().stats().rejected, 1);
    drop(hold);
    for stream in waiting.into_iter().chain([running]) {
        read_to_end(stream).await.expect("the request finishes");
    }
    harness.check_greedy(&prompt(4, 20), 4).await;
    harness.check_nothing_held().await;
}

/// Goal: a deadline ends a waiting request with a queue timeout and a running one with a timeout.
#[tokio::test]
async fn deadlines_end_waiting_and_running_requests() {
    let config = EngineConfig { max_running: 1, ..config() };
    let harness = start(options(16, 64), config).await;
    let hold = harness.fake.hold();
    let mut slow = SequenceRequest::new(prompt(1, 20), 50);
    slow.options.timeout = Some(Duration::from_millis(30));
    let slow = harness.engine.submit(slow).expect("the request is accepted");
    let mut queued = SequenceRequest::new(prompt(2, 20), 50);
    queued.options.queue_timeout = Some(Duration::from_millis(20));
    let queued = harness.engine.submit(queued).expect("the request is accepted");
    let error = read_to_end(queued).await.expect_err("the queue timeout passes");
    assert!(matches!(error, EngineError::QueueTimeout { .. }), "{error}");
    tokio::time::sleep(Duration::from_millis(40)).await;
    drop(hold);
    let error = read_to_end(slow).await.expect_err("the timeout passes");
    assert!(matches!(error, EngineError::Timeout { .. }), "{error}");
    harness.check_nothing_held().await;
}

/// Goal: a slow consumer stalls its own request and no other, and loses no event.
#[tokio::test]
async fn a_slow_consumer_stalls_only_its_own_request() {
    let config = EngineConfig { event_capacity: 8, ..config() };
    let harness = start(options(16, 64), config).await;
    let (slow_prompt, other) = (prompt(1, 20), prompt(2, 20));
    let slow = harness.submit(&slow_prompt, 60);
    for _ in 0..3 {
        harness.check_greedy(&other, 60).await;
    }
    assert_eq!(harness.engine.context().stats().running, 1, "the stalled request still runs");
    let answer = read_to_end(slow).await.expect("the request finishes");
    harness.check_tokens(&slow_prompt, &answer);
    assert_eq!(answer.tokens.len(), 60);
    harness.check_nothing_held().await;
}

/// Goal: a stalled request is preempted if another one needs its blocks, and still finishes with
/// the right tokens.
#[tokio::test]
async fn a_stalled_request_is_preempted_for_another() {
    let config = EngineConfig { event_capacity: 8, max_running: 1, ..config() };
    let harness = start(options(16, 8), config).await;
    let slow_prompt = prompt(1, 60);
    let slow = harness.submit(&slow_prompt, 40);
    harness.wait_for_steps(2).await;
    harness.check_greedy(&prompt(2, 100), 20).await;
    assert!(harness.engine.context().stats().preemptions > 0);
    let answer = read_to_end(slow).await.expect("the request finishes");
    harness.check_tokens(&slow_prompt, &answer);
    assert_eq!(answer.tokens.len(), 40);
    harness.check_nothing_held().await;
}

/// Goal: prompt log-probabilities equal those of the model, for a cached prompt that is computed in
/// chunks as well.
#[tokio::test]
async fn prompt_logprobs_equal_those_of_the_model() {
    let config = EngineConfig { max_batched_tokens: 7, ..config() };
    let harness = start(options(16, 64), config).await;
    let tokens = prompt(1, 40);
    harness.check_greedy(&tokens, 3).await;
    let mut request = SequenceRequest::new(tokens.clone(), 3);
    request.options.prompt_logprobs = Some(2);
    let mut stream = harness.engine.submit(request).expect("the request is accepted");
    let mut reported = None;
    while let Some(event) = stream.next().await {
        if let Event::PromptLogprobs(rows) = event.expect("no error") {
            assert!(reported.is_none(), "the event comes once");
            reported = Some(rows);
        }
    }
    let rows = reported.expect("the request asked for them");
    assert_eq!(rows.len(), 40);
    assert!(rows[0].is_none());
    for (index, row) in rows.iter().enumerate().skip(1) {
        let row = row.as_ref().expect("every token except the first has an entry");
        let logits = expected_logits(&tokens[..index], harness.vocab_size);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = f64::from(logits[tokens[index] as usize]) - sum.ln();
        assert!((f64::from(row.logprob) - expected).abs() < 1e-3, "{index}: {row:?} {expected}");
        assert_eq!((row.token_id, row.top.len()), (tokens[index], 2));
    }
    harness.check_nothing_held().await;
}

/// Goal: a request that is canceled at any moment releases everything it held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn canceling_at_any_moment_releases_everything() {
    let harness = start(options(16, 40), config()).await;
    let dice = Dice::new(7);
    for round in 0..60u64 {
        let tokens = prompt(round % 5, 30 + dice.roll(200));
        let mut stream = harness.submit(&tokens, 50);
        let mut neighbor = harness.submit(&prompt(round % 3, 60), 10);
        for _ in 0..dice.roll(12) {
            if stream.next().await.is_none() {
                break;
            }
        }
        drop(stream);
        if dice.roll(2) == 0 {
            while neighbor.next().await.is_some() {}
        }
    }
    harness.check_nothing_held().await;
}

/// Goal: a flush removes everything that no request uses.
#[tokio::test]
async fn a_flush_empties_the_cache() {
    let harness = start(options(16, 64), config()).await;
    let tokens = prompt(1, 100);
    harness.check_greedy(&tokens, 4).await;
    let request = SequenceRequest::new(tokens.clone(), 4);
    assert_eq!(harness.engine.query_match_len(&request.namespace, &tokens), 96);
    harness.engine.flush().await.expect("the engine runs");
    assert_eq!(harness.engine.query_match_len(&request.namespace, &tokens), 0);
    assert_eq!(harness.check_greedy(&tokens, 4).await.cached, 0);
    harness.check_nothing_held().await;
}

/// Goal: requests with different cache salts share no cached positions.
#[tokio::test]
async fn cache_salts_share_nothing() {
    let harness = start(options(16, 64), config()).await;
    let tokens = prompt(1, 64);
    let cached = async |salt: &str| {
        let mut request = SequenceRequest::new(tokens.clone(), 2);
        request.namespace = Namespace::builder().salt(salt).build();
        read_to_end(harness.engine.submit(request).expect("the request is accepted"))
            .await
            .expect("the request finishes")
            .cached
    };
    assert_eq!(cached("a").await, 0);
    assert_eq!(cached("b").await, 0);
    assert_eq!(cached("a").await, 64);
    harness.check_nothing_held().await;
}

/// Goal: after a shutdown, streams end with an error, requests are refused, and no call hangs.
#[tokio::test]
async fn a_shutdown_ends_streams_and_refuses_requests() {
    let harness = start(options(16, 64), config()).await;
    let hold = harness.fake.hold();
    let stream = harness.submit(&prompt(1, 20), 50);
    harness.wait_for_steps(1).await;
    let engine = harness.engine.clone();
    let shutdown = tokio::spawn(async move { engine.shutdown().await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(hold);
    shutdown.await.expect("no panic");
    assert_eq!(
        read_to_end(stream).await.expect_err("the engine was stopped"),
        EngineError::Stopped
    );
    let refused = harness.engine.submit(SequenceRequest::new(prompt(1, 20), 1));
    assert_eq!(refused.expect_err("the engine has stopped"), EngineError::Stopped);
    assert_eq!(
        harness.engine.audit().await.expect_err("the engine has stopped"),
        EngineError::Stopped
    );
    harness.engine.shutdown().await;
}

/// Goal: impossible settings are refused with an error that names them.
#[tokio::test]
async fn impossible_settings_are_refused() {
    let start = async |options: FakeOptions, config: EngineConfig| {
        let backend = Box::new(FakeBackend::new(options));
        let started = EngineHandle::start(backend, config).await;
        started.expect_err("impossible settings").to_string()
    };
    let error = start(options(12, 64), config()).await;
    assert!(error.contains("power of two") && error.contains("12"), "{error}");
    assert!(start(options(16, 0), config()).await.contains("num_blocks"));
    let config = EngineConfig { max_running: 0, ..config() };
    assert!(start(options(16, 64), config).await.contains("max_running: expected at least 1"));
}

/// A random number generator that tasks can share.
struct Dice(AtomicU64);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(AtomicU64::new(seed))
    }

    /// A number below `limit`.
    fn roll(&self, limit: usize) -> usize {
        let mut x = self.0.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % limit as u64) as usize
    }
}
