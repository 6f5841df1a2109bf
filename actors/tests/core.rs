//! The core's behaviour on the fake backend, whose KV tells every wrong or reused block.

#[path = "support/bench.rs"]
mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stolon_actors::{CoreConfig, CoreError, SequenceEnd, SequenceEvent, SequenceRequest};
use stolon_backend::LogitRows;
use stolon_backend::fake::FakeOptions;
use stolon_backend::fake::expected_logits;
use support::{bench, options, prompt, read};

fn config() -> CoreConfig {
    CoreConfig { max_batched_tokens: 64, ..CoreConfig::default() }
}

/// Goal: what is cached changes no token, and is counted.
#[tokio::test]
async fn warm_equals_cold() {
    let bench = bench(options(16, 64), config()).await;
    let tokens = prompt(1, 100);
    let cold = bench.check(&tokens, 20).await;
    assert_eq!((cold.cached, cold.tokens.len()), (0, 20));
    let warm = bench.check(&tokens, 20).await;
    assert_eq!(warm.cached, 96);
    assert_eq!(warm.tokens, cold.tokens);
    assert_eq!(warm.finish.end, SequenceEnd::Length);
    bench.check_clean().await;
}

/// Goal: a prompt that is cached whole costs one position, which is written nowhere.
#[tokio::test]
async fn a_full_hit_computes_one_position() {
    let config = CoreConfig { kept_logit_bytes: 0, ..config() };
    let bench = bench(options(16, 64), config).await;
    let tokens = prompt(2, 96);
    bench.check(&tokens, 1).await;
    let before = bench.fake.token_count();
    drop(bench.fake.take_batches());
    let answer = bench.check(&tokens, 1).await;
    assert_eq!(answer.cached, 96);
    assert_eq!(bench.fake.token_count() - before, 1);
    let batches = bench.fake.take_batches();
    let slice = &batches[0].sequences[0];
    assert_eq!((slice.start, slice.write_from), (95, 96));
    assert_eq!(slice.logit_rows, LogitRows::Last);
    // And it can go on generating after such a start.
    bench.check(&tokens, 40).await;
    bench.check_clean().await;
}

/// Goal: a prompt repeated to its last token says the same from the kept row as from a forward
/// pass: sampled tokens of a seed, penalties and log-probabilities included.
#[tokio::test]
async fn a_kept_row_says_what_a_forward_pass_says() {
    let mut answers = Vec::new();
    for kept_logit_bytes in [0, 1 << 20] {
        let config = CoreConfig { kept_logit_bytes, ..config() };
        let bench = bench(options(16, 64), config).await;
        let mut said = Vec::new();
        for len in [96, 100] {
            for seed in [None, Some(7), Some(7), Some(8)] {
                let mut request = SequenceRequest::new(prompt(2, len), 12);
                request.sampling.temperature = if seed.is_some() { 1.0 } else { 0.0 };
                request.sampling.seed = seed;
                request.sampling.repetition_penalty = 1.3;
                request.sampling.logprobs = Some(3);
                let mut stream = bench.core.submit(request).expect("it fits");
                while let Some(event) = stream.next().await {
                    if let SequenceEvent::Token { id, logprob } = event.expect("no error") {
                        said.push((id, logprob));
                    }
                }
            }
        }
        let kept = if kept_logit_bytes > 0 { 6 } else { 0 };
        assert_eq!(bench.core.stats().first_tokens_kept, kept);
        bench.check_clean().await;
        answers.push(said);
    }
    assert_eq!(answers[0].len(), 8 * 12);
    assert_eq!(answers[0], answers[1]);
}

/// Goal: several answers to one prompt cost its computation, and its place at the door, once.
#[tokio::test]
async fn choices_share_their_prompt() {
    let config = CoreConfig { max_queued_tokens: 230, ..config() };
    let bench = bench(options(16, 64), config).await;
    let request = SequenceRequest::new(prompt(2, 200), 5);
    let hold = bench.fake.hold();
    let streams = bench.core.submit_choices(request.clone(), 4).expect("they fit");
    drop(hold);
    assert_eq!(streams.len(), 4);
    for stream in streams {
        bench.compare(&prompt(2, 200), &read(stream).await.expect("it ends"));
    }
    // 12 whole blocks and 8 positions; those 8 are each one's own.
    let decodes = 4 * 4;
    assert_eq!(bench.fake.token_count(), 200 + 3 * 8 + decodes);
    let refused = bench.core.submit_choices(request, 0).expect_err("none");
    assert!(refused.to_string().contains("at least 1"), "{refused}");
    bench.check_clean().await;
}

/// Goal: the next turn of a conversation finds the answer cached too.
#[tokio::test]
async fn generated_tokens_are_cached() {
    let bench = bench(options(16, 64), config()).await;
    let mut tokens = prompt(3, 50);
    let answer = bench.check(&tokens, 40).await;
    tokens.extend(&answer.tokens);
    tokens.extend(prompt(4, 10));
    // 89 positions were computed (the last token was not): 5 whole blocks.
    assert_eq!(bench.check(&tokens, 5).await.cached, 80);
    bench.check_clean().await;
}

/// Goal: block size, chunk size and cache state change no token.
#[tokio::test]
async fn sizes_change_nothing() {
    for block_size in [1, 4, 16, 32] {
        for chunk in [7, 64, 512] {
            for caching in [true, false] {
                let config = CoreConfig {
                    max_batched_tokens: chunk,
                    prefix_caching: caching,
                    ..CoreConfig::default()
                };
                let bench = bench(options(block_size, 1024 / block_size), config).await;
                let shared = prompt(5, 70);
                for tail in [0, 1, 13] {
                    let mut tokens = shared.clone();
                    tokens.extend(prompt(tail, tail as usize));
                    let answer = bench.check(&tokens, 12).await;
                    assert!(caching || answer.cached == 0);
                }
                bench.check_clean().await;
                if !caching {
                    assert_eq!(bench.core.stats().blocks_cached, 0);
                }
            }
        }
    }
}

/// Goal: identical prompts sent together are computed once.
#[tokio::test]
async fn a_prompt_in_flight_is_computed_once() {
    let bench = bench(options(16, 256), config()).await;
    let tokens = prompt(6, 320);
    let streams: Vec<_> = (0..8).map(|_| bench.submit(&tokens, 4)).collect();
    for stream in streams {
        let answer = read(stream).await.expect("it finishes");
        bench.compare(&tokens, &answer);
    }
    let stats = bench.core.stats();
    assert_eq!(stats.follows, 7);
    assert_eq!(stats.cached_tokens, 7 * 320);
    // The prompt once, and 3 decodes for each.
    assert_eq!(stats.first_tokens_kept, 7);
    assert_eq!(bench.fake.token_count(), 320 + 8 * 3);
    bench.check_clean().await;
}

/// Goal: when the leader is cancelled, a follower leads and nobody hangs.
#[tokio::test]
async fn a_follower_takes_over_from_a_cancelled_leader() {
    let bench = bench(options(16, 256), config()).await;
    let tokens = prompt(7, 640);
    let hold = bench.fake.hold();
    let leader = bench.submit(&tokens, 4);
    let followers: Vec<_> = (0..3).map(|_| bench.submit(&tokens, 4)).collect();
    bench.steps(1).await;
    drop(leader);
    drop(hold);
    for stream in followers {
        let answer = read(stream).await.expect("it finishes");
        bench.compare(&tokens, &answer);
    }
    assert_eq!(bench.core.stats().cancelled, 1);
    bench.check_clean().await;
}

/// Goal: a stop id ends a sequence and is its last token.
#[tokio::test]
async fn a_stop_id_ends_it() {
    let bench = bench(options(16, 64), config()).await;
    let tokens = prompt(8, 30);
    let free = bench.check(&tokens, 30).await;
    let stop = free.tokens[11];
    let first = free.tokens.iter().position(|&token| token == stop).expect("it is there");
    let mut request = SequenceRequest::new(tokens, 30);
    request.stop_ids = vec![stop];
    let answer = read(bench.core.submit(request).expect("it fits")).await.expect("it finishes");
    assert_eq!(answer.tokens, free.tokens[..=first]);
    assert_eq!(answer.finish.end, SequenceEnd::StopId(stop));
    bench.check_clean().await;
}

/// Goal: a pool too small for all makes some wait and some start again, and all end right.
#[tokio::test]
async fn a_pool_too_small_for_all_serves_all() {
    for block_count in [10, 12, 20] {
        let bench = bench(options(16, block_count), config()).await;
        let prompts: Vec<_> = (0..12).map(|n| prompt(n, 40 + n as usize * 3)).collect();
        let streams: Vec<_> = prompts.iter().map(|tokens| bench.submit(tokens, 80)).collect();
        for (tokens, stream) in prompts.iter().zip(streams) {
            let answer = read(stream).await.expect("it finishes");
            bench.compare(tokens, &answer);
            assert_eq!(answer.tokens.len(), 80);
        }
        bench.check_clean().await;
        assert!(bench.core.stats().evictions > 0);
    }
}

/// Goal: a request that fills the pool to its last position is served, one position more is
/// refused with the numbers.
#[tokio::test]
async fn whatever_fits_an_empty_pool_is_served() {
    let bench = bench(options(16, 4), config()).await;
    bench.check(&prompt(1, 64), 1).await;
    assert_eq!(bench.check(&prompt(2, 60), 100).await.tokens.len(), 5);
    assert_eq!(bench.check(&prompt(1, 64), 1).await.tokens.len(), 1);
    let refused = bench.core.submit(SequenceRequest::new(prompt(3, 65), 1));
    let error = refused.expect_err("too long");
    assert!(matches!(error, CoreError::PromptTooLong { got: 65, limit: 64, .. }), "{error}");
    bench.check_clean().await;
}

/// Goal: what does not belong in a request is named, before anything is taken.
#[tokio::test]
async fn bad_requests_are_refused() {
    let bench = bench(options(16, 8), config()).await;
    let submit = |change: &dyn Fn(&mut SequenceRequest)| {
        let mut request = SequenceRequest::new(prompt(1, 10), 4);
        change(&mut request);
        bench.core.submit(request).expect_err("a bad request").to_string()
    };
    assert!(submit(&|r| r.tokens.clear()).contains("empty"));
    assert!(submit(&|r| r.tokens[3] = 256).contains("token id 256 at index 3"));
    assert!(submit(&|r| r.max_tokens = 0).contains("max_tokens: expected at least 1"));
    assert!(submit(&|r| r.sampling.temperature = -1.0).contains("temperature"));
    assert!(submit(&|r| r.prompt_logprobs = Some(1000)).contains("prompt_logprobs"));
    assert_eq!(bench.core.stats().requests, 0);
    bench.check_clean().await;
}

/// Goal: the door refuses at once what is too much, and takes in again what fits.
#[tokio::test]
async fn the_door_bounds_what_waits() {
    let config = CoreConfig { max_running: 1, max_queued_requests: 2, ..config() };
    let bench = bench(options(16, 64), config).await;
    let hold = bench.fake.hold();
    let running = bench.submit(&prompt(1, 20), 4);
    bench.steps(1).await;
    let waiting = [bench.submit(&prompt(2, 20), 4), bench.submit(&prompt(3, 20), 4)];
    let refused = bench.core.submit(SequenceRequest::new(prompt(4, 20), 4));
    assert!(matches!(refused, Err(CoreError::Overloaded { queued_requests: 2, .. })));
    assert_eq!(bench.core.stats().rejected, 1);
    drop(hold);
    for stream in waiting.into_iter().chain([running]) {
        read(stream).await.expect("it finishes");
    }
    bench.check(&prompt(4, 20), 4).await;
    bench.check_clean().await;
}

/// Goal: deadlines end a request in the queue and while it runs, with the right error.
#[tokio::test]
async fn deadlines_end_requests() {
    let config = CoreConfig { max_running: 1, ..config() };
    let bench = bench(options(16, 64), config).await;
    let hold = bench.fake.hold();
    let mut slow = SequenceRequest::new(prompt(1, 20), 50);
    slow.timeout = Some(Duration::from_millis(30));
    let slow = bench.core.submit(slow).expect("it fits");
    let mut queued = SequenceRequest::new(prompt(2, 20), 50);
    queued.queue_timeout = Some(Duration::from_millis(20));
    let queued = bench.core.submit(queued).expect("it fits");
    let error = read(queued).await.expect_err("it waits too long");
    assert!(matches!(error, CoreError::QueueTimeout { .. }), "{error}");
    tokio::time::sleep(Duration::from_millis(40)).await;
    drop(hold);
    let error = read(slow).await.expect_err("it takes too long");
    assert!(matches!(error, CoreError::Timeout { .. }), "{error}");
    bench.check_clean().await;
}

/// Goal: a reader that does not read holds up itself and nobody else, and loses nothing.
#[tokio::test]
async fn a_slow_reader_pauses_only_itself() {
    let config = CoreConfig { event_capacity: 8, ..config() };
    let bench = bench(options(16, 64), config).await;
    let (slow_prompt, other) = (prompt(1, 20), prompt(2, 20));
    let slow = bench.submit(&slow_prompt, 60);
    for _ in 0..3 {
        bench.check(&other, 60).await;
    }
    assert_eq!(bench.core.stats().running, 1, "the slow one waits");
    let answer = read(slow).await.expect("it finishes");
    bench.compare(&slow_prompt, &answer);
    assert_eq!(answer.tokens.len(), 60);
    bench.check_clean().await;
}

/// Goal: a paused sequence gives its blocks up to one that needs them, and still ends right.
#[tokio::test]
async fn a_paused_sequence_yields_its_blocks() {
    let config = CoreConfig { event_capacity: 8, max_running: 1, ..config() };
    let bench = bench(options(16, 8), config).await;
    let slow_prompt = prompt(1, 60);
    let slow = bench.submit(&slow_prompt, 40);
    bench.steps(2).await;
    bench.check(&prompt(2, 100), 20).await;
    assert!(bench.core.stats().preemptions > 0);
    let answer = read(slow).await.expect("it finishes");
    bench.compare(&slow_prompt, &answer);
    assert_eq!(answer.tokens.len(), 40);
    bench.check_clean().await;
}

/// Goal: prompt log-probabilities are those of the model, whatever is cached and however the
/// prompt is cut.
#[tokio::test]
async fn prompt_logprobs_are_the_models() {
    let config = CoreConfig { max_batched_tokens: 7, ..config() };
    let bench = bench(options(16, 64), config).await;
    let tokens = prompt(1, 40);
    bench.check(&tokens, 3).await;
    let mut request = SequenceRequest::new(tokens.clone(), 3);
    request.prompt_logprobs = Some(2);
    let mut stream = bench.core.submit(request).expect("it fits");
    let mut told = None;
    while let Some(event) = stream.next().await {
        if let SequenceEvent::PromptLogprobs(rows) = event.expect("no error") {
            assert!(told.is_none(), "told once");
            told = Some(rows);
        }
    }
    let told = told.expect("it was asked for");
    assert_eq!(told.len(), 40);
    assert!(told[0].is_none());
    for (index, row) in told.iter().enumerate().skip(1) {
        let row = row.as_ref().expect("every token but the first");
        let logits = expected_logits(&tokens[..index], bench.vocab_size);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = f64::from(logits[tokens[index] as usize]) - sum.ln();
        assert!((f64::from(row.logprob) - expected).abs() < 1e-3, "{index}: {row:?} {expected}");
        assert_eq!((row.token_id, row.top.len()), (tokens[index], 2));
    }
    bench.check_clean().await;
}

/// Goal: cancelling at any moment gives everything back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_anywhere_gives_everything_back() {
    let bench = bench(options(16, 40), config()).await;
    let dice = Dice::new(7);
    for round in 0..60u64 {
        let tokens = prompt(round % 5, 30 + dice.roll(200));
        let mut stream = bench.submit(&tokens, 50);
        let mut neighbour = bench.submit(&prompt(round % 3, 60), 10);
        for _ in 0..dice.roll(12) {
            if stream.next().await.is_none() {
                break;
            }
        }
        drop(stream);
        if dice.roll(2) == 0 {
            while neighbour.next().await.is_some() {}
        }
    }
    bench.check_clean().await;
}

/// Goal: flushing leaves what is in use and takes the rest.
#[tokio::test]
async fn flush_empties_the_cache() {
    let bench = bench(options(16, 64), config()).await;
    let tokens = prompt(1, 100);
    bench.check(&tokens, 4).await;
    let request = SequenceRequest::new(tokens.clone(), 4);
    assert_eq!(bench.core.query_match_len(&request.namespace, &tokens), 96);
    bench.core.flush().await.expect("it runs");
    assert_eq!(bench.core.query_match_len(&request.namespace, &tokens), 0);
    assert_eq!(bench.check(&tokens, 4).await.cached, 0);
    bench.check_clean().await;
}

/// Goal: namespaces share nothing.
#[tokio::test]
async fn salts_share_nothing() {
    let bench = bench(options(16, 64), config()).await;
    let tokens = prompt(1, 64);
    let cached = async |salt: &str| {
        let mut request = SequenceRequest::new(tokens.clone(), 2);
        request.namespace = stolon_kvcache::Namespace::builder().salt(salt).build();
        read(bench.core.submit(request).expect("it fits")).await.expect("it finishes").cached
    };
    assert_eq!(cached("a").await, 0);
    assert_eq!(cached("b").await, 0);
    assert_eq!(cached("a").await, 64);
    bench.check_clean().await;
}

/// Goal: after shutdown streams end with an error, requests are refused, and nothing hangs.
#[tokio::test]
async fn shutdown_ends_everything() {
    let bench = bench(options(16, 64), config()).await;
    let hold = bench.fake.hold();
    let stream = bench.submit(&prompt(1, 20), 50);
    bench.steps(1).await;
    let core = bench.core.clone();
    let shutdown = tokio::spawn(async move { core.shutdown().await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(hold);
    shutdown.await.expect("no panic");
    assert_eq!(read(stream).await.expect_err("it was stopped"), CoreError::Stopped);
    let refused = bench.core.submit(SequenceRequest::new(prompt(1, 20), 1));
    assert_eq!(refused.expect_err("it has stopped"), CoreError::Stopped);
    assert_eq!(bench.core.audit().await.expect_err("it has stopped"), CoreError::Stopped);
    bench.core.shutdown().await;
}

/// Goal: impossible settings are named.
#[tokio::test]
async fn bad_settings_are_refused() {
    let start = async |options: FakeOptions, config: CoreConfig| {
        let backend = Box::new(stolon_backend::fake::FakeBackend::new(options));
        let started = stolon_actors::CoreHandle::start(backend, config).await;
        started.expect_err("bad settings").to_string()
    };
    let error = start(options(12, 64), config()).await;
    assert!(error.contains("power of two") && error.contains("12"), "{error}");
    assert!(start(options(16, 0), config()).await.contains("num_blocks"));
    let config = CoreConfig { max_running: 0, ..config() };
    assert!(start(options(16, 64), config).await.contains("max_running: expected at least 1"));
}

/// A small random number generator, so that tests need no crate for it.
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
