//! Requests, streams, errors and lifetime of an engine through its public API, on the fake backend.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use fake::builder;
use futures::future::try_join_all;
use futures::stream::FuturesUnordered;
use futures::{StreamExt, poll};
use stolon::{
    AdmissionPolicy, Engine, EngineError, Error, Event, FinishReason, Request, SamplingParams,
};
use stolon_backend::fake::expected_next;
use stolon_backend::fake::{FakeFault, FakeHandle};

use crate::support::fake;

/// An engine on a fake backend of `block_count` blocks.
async fn engine(block_count: usize) -> (Engine, FakeHandle) {
    let (builder, handle) = builder(block_count);
    (builder.build().await.expect("valid settings"), handle)
}

/// The greedy continuation of `prompt` that follows from the definition of the fake backend,
/// without a cache.
fn expected(prompt: &[u8], count: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> = prompt.iter().map(|&byte| u32::from(byte)).collect();
    for _ in 0..count {
        tokens.push(expected_next(&tokens, 256));
    }
    tokens.split_off(prompt.len())
}

/// Goal: engines, requests and streams can be moved between tasks and threads.
#[test]
fn handles_are_send_sync_and_owned() {
    fn check<T: Send + Sync + 'static>() {}
    fn check_stream<T: futures::Stream + Send + Unpin + 'static>() {}
    check::<Engine>();
    check::<Error>();
    check::<Request>();
    check::<Event>();
    check_stream::<stolon::TokenStream>();
}

/// Goal: a stream yields the start, the tokens and the end in this order, with consistent counts
/// and times.
#[tokio::test]
async fn a_stream_yields_start_tokens_and_end() {
    let (engine, _) = engine(64).await;
    let prompt = "a prompt of some length, for more than one block";
    let mut stream = engine.generate(Request::text(prompt).max_tokens(5)).await.expect("it fits");
    assert_eq!(stream.prompt_tokens(), prompt.len());
    let first = stream.next().await.expect("a start").expect("no error");
    assert_eq!(first, Event::Started { prompt_tokens: prompt.len(), cached_tokens: 0 });
    let mut ids = Vec::new();
    loop {
        match stream.next().await.expect("an end").expect("no error") {
            Event::Token(token) => ids.extend(token.id),
            Event::Finished(end) => {
                assert_eq!(end.reason, FinishReason::Length);
                assert_eq!(end.usage.prompt_tokens, prompt.len());
                assert_eq!(end.usage.completion_tokens, 5);
                assert!(end.timings.queue <= end.timings.ttft);
                assert!(end.timings.ttft <= end.timings.total);
                break;
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(ids, expected(prompt.as_bytes(), 5));
    assert!(stream.next().await.is_none());
}

/// Goal: a shared prefix is computed once. Querying it has no side effect, and it does not change
/// the answer.
#[tokio::test]
async fn a_shared_prefix_is_computed_once() {
    let (engine, _) = engine(64).await;
    let shared = "x".repeat(100) + "yz";
    let ask = |tail: &str| Request::text(format!("{shared}{tail}")).max_tokens(4);
    let cold = engine.complete(ask("one")).await.expect("it ends");
    assert_eq!(cold.finish.usage.cached_tokens, 0);
    for _ in 0..3 {
        assert_eq!(engine.cache().query_match_len(&ask("two")).expect("text"), 96);
    }
    let warm = engine.complete(ask("two")).await.expect("it ends");
    assert_eq!(warm.finish.usage.cached_tokens, 96);
    assert_eq!(warm.token_ids, expected(format!("{shared}two").as_bytes(), 4));
    let salted = ask("two").cache_salt("tenant");
    assert_eq!(engine.cache().query_match_len(&salted).expect("text"), 0);
    let stats = engine.stats();
    assert_eq!((stats.requests, stats.finished, stats.requests_hit), (2, 2, 1));
    assert_eq!(stats.cached_tokens, 96);
    assert!(stats.token_hit_rate() > 0.4 && stats.request_hit_rate() == 0.5);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: after `warm`, the full blocks of a prompt are cached for prompts that start with it.
#[tokio::test]
async fn warming_caches_a_prompt() {
    let (engine, _) = engine(64).await;
    let prompt = "w".repeat(70);
    assert_eq!(engine.cache().warm(Request::text(prompt.clone())).await.expect("it fits"), 70);
    let longer = Request::text(prompt + " and more");
    assert_eq!(engine.cache().query_match_len(&longer).expect("text"), 64);
}

/// Goal: a stop string, even one that spans tokens, ends the text before it and releases the
/// request's blocks.
#[tokio::test]
async fn a_stop_string_ends_the_text() {
    let (engine, _) = engine(64).await;
    let free = engine.generate(Request::text("abc").max_tokens(40)).await.expect("it fits");
    let free = free.collect_text().await.expect("it ends");
    // Two characters from the middle of the unrestricted answer.
    let stop: String = free.text.chars().skip(6).take(2).collect();
    let place = free.text.find(&stop).expect("it is there");
    let request = Request::text("abc").max_tokens(40).stop([stop.clone(), "never".to_owned()]);
    let stopped = engine.complete(request).await.expect("it ends");
    assert_eq!(stopped.text, free.text[..place]);
    assert_eq!(stopped.finish.reason, FinishReason::StopString(stop));
    while engine.stats().running > 0 {
        tokio::task::yield_now().await;
    }
    let stats = engine.stats();
    assert_eq!((stats.finished, stats.canceled), (2, 0), "a stop string completes a request");
    assert!(stopped.token_ids.len() < 40);
    while engine.stats().running > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_reserved, 0);
}

/// Goal: text that was withheld because it could begin a stop string is emitted at the end.
#[tokio::test]
async fn withheld_text_is_emitted_at_the_end() {
    let (engine, _) = engine(64).await;
    let run = async |request: Request| engine.complete(request).await.expect("it ends");
    let free = run(Request::text("abc").max_tokens(8)).await;
    let last = free.text.chars().last().expect("some text");
    let held = run(Request::text("abc").max_tokens(8).stop([format!("{last}never")])).await;
    assert_eq!(held.text, free.text);
    assert_eq!(held.finish.reason, FinishReason::Length);
}

/// Goal: end-of-sequence and stop ids end a generation, but not before `min_tokens`; `ignore_eos`
/// disables the model's end-of-sequence ids.
#[tokio::test]
async fn end_of_sequence_ids_end_an_answer_and_can_be_ignored() {
    let answer = expected(b"abc", 20);
    let eos = answer[7];
    let first = answer.iter().position(|&id| id == eos).expect("it is there");
    let backend =
        stolon_backend::fake::FakeBackend::new(stolon_backend::fake::FakeOptions::default());
    let engine = Engine::builder()
        .backend("fake", Box::new(backend))
        .text_model(fake::bytes(&[eos]))
        .build()
        .await
        .expect("valid settings");
    let run = async |request: Request| engine.complete(request).await.expect("it ends");
    let ended = run(Request::text("abc").max_tokens(20)).await;
    assert_eq!(ended.finish.reason, FinishReason::Stop);
    assert_eq!(ended.token_ids, answer[..=first]);
    let ignored = run(Request::text("abc").max_tokens(20).ignore_eos(true)).await;
    assert_eq!((ignored.token_ids.len(), ignored.finish.reason), (20, FinishReason::Length));
    let least = run(Request::text("abc").max_tokens(20).min_tokens(first + 4)).await;
    assert!(least.token_ids.len() >= first + 4, "{:?}", least.token_ids);
    assert_eq!(least.token_ids[..first], answer[..first]);
    assert!(!least.token_ids[..first + 3].contains(&eos), "{:?}", least.token_ids);
    let stop = answer[3];
    let place = answer.iter().position(|&id| id == stop).expect("it is there");
    let request = Request::text("abc").max_tokens(20).ignore_eos(true).stop_ids([stop]);
    let stopped = run(request).await;
    assert_eq!(stopped.finish.reason, FinishReason::StopToken(stop));
    assert_eq!(stopped.token_ids.len(), place + 1);
}

/// Goal: the same seed gives the same text, alone and in a batch with other requests.
#[tokio::test]
async fn a_seed_gives_the_same_text_in_any_batch() {
    let (engine, _) = engine(256).await;
    let sampling = SamplingParams { temperature: 1.5, seed: Some(7), ..SamplingParams::default() };
    let request = || Request::text("seeded").max_tokens(30).sampling(sampling.clone());
    let alone = engine.complete(request()).await.expect("it ends");
    let other = |n| engine.generate(Request::text(format!("other {n}")).max_tokens(40));
    let others = try_join_all((0..6).map(other)).await.expect("they fit");
    let again = engine.complete(request()).await.expect("it ends");
    assert_eq!(alone.token_ids, again.token_ids);
    drop(others);
}

/// Goal: if requested, each token has its log-probability and the log-probabilities of the
/// requested number of most likely tokens.
#[tokio::test]
async fn logprobs_are_reported_if_requested() {
    let (engine, _) = engine(64).await;
    let request = Request::text("abcdef").max_tokens(6).logprobs(3).prompt_logprobs(1);
    let answer = engine.complete(request).await.expect("it ends");
    assert_eq!((answer.logprobs.len(), answer.prompt_logprobs.len()), (6, 6));
    for (id, entry) in answer.token_ids.iter().zip(&answer.logprobs) {
        assert_eq!((entry.token_id, entry.top.len()), (*id, 3));
        assert_eq!(entry.top[0].0, *id, "greedy sampling takes the most likely token");
    }
    assert!(answer.prompt_logprobs[0].is_none());
    assert_eq!(
        answer.prompt_logprobs[3].as_ref().map(|entry| entry.token_id),
        Some(u32::from(b'd'))
    );
    let request = Request::text("abcdef").max_tokens(2).prompt_logprobs(1);
    let streams = engine.generate_choices(request.clone(), 3).await.expect("they fit");
    let mut lengths = Vec::new();
    for stream in streams {
        lengths.push(stream.collect_text().await.expect("ends").prompt_logprobs.len());
    }
    assert_eq!(lengths, [6, 0, 0], "the prompt is scored once");
    let best = engine.best_of(request, 3, 2).await.expect("they fit").completions;
    let lengths: Vec<_> = best.iter().map(|answer| answer.prompt_logprobs.len()).collect();
    assert_eq!(lengths, [6, 0]);
}

/// Goal: `best_of` returns the most likely candidates first, reports log-probabilities only if
/// requested, and counts the tokens of all candidates.
#[tokio::test]
async fn best_of_returns_the_most_likely_answers() {
    let (engine, _) = engine(256).await;
    let sampling = SamplingParams { temperature: 1.0, seed: Some(3), ..SamplingParams::default() };
    let prompt = "a prompt of two blocks and of a few more tokens";
    let request = Request::text(prompt).max_tokens(8).ignore_eos(true).sampling(sampling);
    let with_logprobs = request.clone().logprobs(0);
    let all = engine.best_of(with_logprobs.clone(), 6, 6).await.expect("it ends");
    let mean = |completion: &stolon::Completion| {
        completion.logprobs.iter().map(|entry| f64::from(entry.logprob)).sum::<f64>() / 8.0
    };
    assert!(all.completions.is_sorted_by(|a, b| mean(a) >= mean(b)));
    assert!(all.completions.windows(2).any(|pair| pair[0].token_ids != pair[1].token_ids));
    assert_eq!((all.usage.prompt_tokens, all.usage.completion_tokens), (prompt.len(), 48));
    let best_two = engine.best_of(request, 6, 2).await.expect("it ends");
    for (completion, best) in best_two.completions.iter().zip(&all.completions) {
        assert_eq!(completion.token_ids, best.token_ids);
        assert!(completion.logprobs.is_empty() && best.logprobs.len() == 8);
    }
    assert_eq!((best_two.completions.len(), best_two.usage.completion_tokens), (2, 48));
    for (candidates, count) in [(0, 0), (4, 0), (2, 3)] {
        let refused = engine.best_of(with_logprobs.clone(), candidates, count).await;
        assert!(
            matches!(refused, Err(Error::Engine(EngineError::InvalidParameter { .. }))),
            "{refused:?}"
        );
    }
    assert_eq!(engine.audit().await.expect("clean").running, 0);
}

/// Goal: an invalid request is refused with the expected and the actual value, and uses no
/// resources.
#[tokio::test]
async fn invalid_requests_are_refused_with_expected_and_actual_values() {
    let (engine, _) = engine(4).await;
    let sampled = |change: &dyn Fn(&mut SamplingParams)| {
        let mut sampling = SamplingParams::default();
        change(&mut sampling);
        Request::text("abc").sampling(sampling)
    };
    let cases: Vec<(Request, &[&str])> = vec![
        (Request::tokens(vec![]), &["empty", "at least 1"]),
        (Request::text(""), &["empty"]),
        (Request::tokens(vec![1; 65]), &["at most 64", "got 65", "4 blocks of 16"]),
        (Request::tokens(vec![1; 5000]), &["at most 64", "got 5000"]),
        (Request::tokens(vec![1, 256]), &["256 at index 1", "below 256"]),
        (Request::text("abc").max_tokens(0), &["max_tokens", "at least 1", "got 0"]),
        (Request::text("abc").stop([""]), &["stop", "at least one character"]),
        (sampled(&|s| s.temperature = f32::NAN), &["temperature", "NaN"]),
        (sampled(&|s| s.temperature = -0.5), &["temperature", "-0.5"]),
        (sampled(&|s| s.top_p = 0.0), &["top_p", "above 0"]),
        (sampled(&|s| s.top_k = Some(0)), &["top_k", "got 0"]),
        (sampled(&|s| s.min_p = 2.0), &["min_p", "0 to 1"]),
        (sampled(&|s| s.repetition_penalty = 0.0), &["repetition_penalty"]),
        (sampled(&|s| s.logit_bias = [(999, 1.0)].into()), &["logit_bias", "999"]),
        (sampled(&|s| s.repetition_penalty = 1e-45), &["repetition_penalty", "0.01 to 100"]),
        (sampled(&|s| s.logit_bias = vec![(1, 1.0); 1000].into()), &["logit_bias", "256"]),
        (Request::text("abc").stop_ids([1, 256]), &["stop_ids", "below", "256"]),
        (Request::text("abc").stop_ids(0..), &["stop_ids", "4096"]),
        (Request::text("abc").cache_salt("x".repeat(10_000_000)), &["cache_salt", "1024 bytes"]),
        (Request::text("abc").logprobs(1000), &["logprobs", "256"]),
        (Request::text("abc").prompt_logprobs(129), &["prompt_logprobs", "128"]),
        (Request::chat(vec![stolon::ChatMessage::user("hi")]), &["chat template"]),
    ];
    for (request, expected) in cases {
        let shown = format!("{request:?}");
        let error = engine.generate(request).await.expect_err("an invalid request").to_string();
        for part in expected {
            assert!(error.contains(part), "{shown}: {error}");
        }
    }
    assert_eq!(engine.stats().requests, 0);
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 4);
}

/// Goal: a number of choices that the admission queue can never hold is reported as an invalid
/// parameter, and not as an overload, which would suggest a retry.
#[tokio::test]
async fn more_choices_than_the_queue_can_hold_are_invalid() {
    let engine = builder(64).0.max_queued_requests(4).build().await.expect("valid settings");
    for count in [0, 5, usize::MAX] {
        let refused = engine.generate_choices(Request::text("abc"), count).await;
        let error = refused.expect_err("an invalid number").to_string();
        assert!(error.contains("choices: expected from 1 to 4"), "{error}");
    }
    let streams = engine.generate_choices(Request::text("abc").max_tokens(2), 4).await;
    assert_eq!(streams.expect("they fit").len(), 4);
}

/// Goal: a request without `max_tokens` runs until the context or the pool is exhausted, or up to
/// the operator's default, and other requests can run at the same time.
#[tokio::test]
async fn without_max_tokens_an_answer_is_as_long_as_it_fits() {
    let run = async |engine: &Engine, request| engine.complete(request).await.expect("it ends");
    let (whole, _) = engine(32).await;
    let open = || Request::text("abc").ignore_eos(true);
    let answer = run(&whole, open()).await;
    assert_eq!(answer.finish.usage.completion_tokens, 32 * 16 - 3 + 1);
    assert_eq!(answer.finish.reason, FinishReason::Length);
    // Several requests can start, although each could fill the pool and none is read to its end.
    let (shared, _) = engine(32).await;
    let mut streams = Vec::new();
    for index in 0..5 {
        let request = Request::text(format!("{index} abc")).ignore_eos(true);
        let mut stream = shared.generate(request).await.expect("it fits");
        let first = stream.next().await.expect("it starts");
        assert!(matches!(first, Ok(Event::Started { .. })));
        streams.push(stream);
    }
    drop(streams);
    let limited = builder(32).0.default_max_tokens(7).build().await.expect("valid settings");
    assert_eq!(run(&limited, open()).await.token_ids.len(), 7);
    assert_eq!(run(&limited, open().max_tokens(9)).await.token_ids.len(), 9);
    assert!(builder(4).0.default_max_tokens(0).build().await.is_err());
}

/// Goal: tokenizing the prompt of a request changes nothing else in it, and an estimate of its cost
/// has no side effect.
#[tokio::test]
async fn a_router_tokenizes_once_and_asks_for_the_cost() {
    let (engine, _) = engine(64).await;
    let text = "abc ".repeat(20);
    let request = Request::text(&text).max_tokens(5).cache_salt("tenant").stop(["never"]);
    let tokenized = engine.tokenized(request.clone()).await.expect("text");
    assert!(matches!(tokenized.prompt(), stolon::Prompt::Tokens(tokens) if tokens.len() == 80));
    assert_eq!(tokenized.get_max_tokens(), Some(5));
    assert_eq!(tokenized.get_cache_salt(), Some("tenant"));
    assert_eq!(tokenized.get_stop(), ["never"]);
    let before = engine.estimate(&tokenized).expect("token ids");
    assert_eq!((before.prompt_tokens, before.cached_tokens, before.queued_tokens), (80, 0, 0));
    assert_eq!(before.expected_wait, None, "nothing was computed yet");
    let answer = engine.complete(tokenized.clone()).await.expect("it ends");
    assert_eq!(answer.token_ids, expected(text.as_bytes(), 5));
    let json = serde_json::to_value(&answer).expect("it can be serialized");
    assert_eq!(json["finish"]["usage"]["completion_tokens"], 5);
    assert!(json["finish"]["timings"]["total"].is_f64());
    let after = engine.estimate(&request).expect("text");
    assert_eq!((after.prompt_tokens, after.cached_tokens), (80, 80));
    // The estimate may still count the step that has ended the answer.
    assert!(after.expected_wait.is_some_and(|wait| wait < Duration::from_millis(1)), "{after:?}");
    assert!(after.expected_first_token > after.expected_wait);
}

/// Goal: an estimate counts the prefix that a request is waiting to compute, in its namespace and
/// until the request ends, so that a router keeps a burst of equal prefixes together.
#[tokio::test]
async fn an_estimate_counts_what_another_request_will_compute() {
    let (engine, _) = engine(64).await;
    let prefix = "a long system prompt ".repeat(10);
    let request = |end: &str| Request::text(format!("{prefix}{end}")).max_tokens(5);
    let estimate = |request: &Request| engine.estimate(request).expect("text");
    assert_eq!(estimate(&request("one")).pending_tokens, 0);
    // Nothing is computed before this task waits.
    let stream = engine.generate(request("one")).await.expect("it fits");
    let same = estimate(&request("two"));
    assert_eq!((same.cached_tokens, same.pending_tokens, same.prompt_tokens), (0, 208, 213));
    assert_eq!(estimate(&request("two").cache_salt("other")).pending_tokens, 0);
    stream.collect_text().await.expect("it ends");
    let cached = estimate(&request("two"));
    assert_eq!((cached.cached_tokens, cached.pending_tokens), (208, 0));
    let unshared = request("three").skip_writing_prefix_cache(true);
    engine.cache().evict_salt(None).await.expect("it runs");
    let _stream = engine.generate(unshared).await.expect("it fits");
    assert_eq!(estimate(&request("two")).pending_tokens, 0);
}

/// Goal: many callers that ask for audits all the time are answered by a few common audits, and a
/// request completes meanwhile.
#[tokio::test]
async fn concurrent_audits_are_answered_together() {
    let (engine, _) = engine(64).await;
    let stream = engine.generate(Request::text("abc").max_tokens(200)).await.expect("it fits");
    let auditors: Vec<_> = (0..8)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    engine.audit().await.expect("consistent accounting");
                }
            })
        })
        .collect();
    assert_eq!(stream.collect_text().await.expect("it ends").token_ids.len(), 200);
    for auditor in auditors {
        auditor.await.expect("no panic");
    }
    assert_eq!(engine.audit().await.expect("consistent accounting").running, 0);
}

/// Goal: a long prompt is tokenized on another thread, so that the calling task does not block. A
/// caller that drops the future submits nothing and blocks no other caller.
#[tokio::test]
async fn long_prompts_are_tokenized_off_the_callers_thread() {
    let (engine, _) = engine(512).await;
    let huge = || "abc ".repeat(100_000);
    let mut pending = 0;
    for _ in 0..100 {
        let mut future = Box::pin(engine.tokenize(huge(), false));
        pending += usize::from(poll!(&mut future).is_pending());
        let mut future = Box::pin(engine.generate(Request::text("abc ".repeat(1_000))));
        let _ = poll!(&mut future);
    }
    // Not all of them are pending: the other thread may be done before its result is asked for.
    assert!(pending > 0, "it does not tokenize while it is polled");
    assert_eq!(engine.tokenize(huge(), false).await.expect("text").len(), 400_000);
    let long = engine.generate(Request::text("abc ".repeat(1_000)).max_tokens(1)).await;
    let answer = long.expect("it fits").collect_text().await.expect("it ends");
    assert_eq!(answer.finish.usage.prompt_tokens, 4_000);
    // The change to another thread would take longer than tokenizing a short prompt.
    let short = Request::text("abc");
    assert!(poll!(Box::pin(engine.prompt_tokens(&short))).is_ready());
    assert_eq!(engine.audit().await.expect("consistent accounting").running, 0);
}

/// Goal: a client's text is tokenized before most texts of another client, however many of these
/// came first.
#[tokio::test]
async fn many_texts_of_one_client_do_not_delay_those_of_another() {
    let (engine, _) = engine(512).await;
    let tokenize =
        |words, client: &str| engine.tokenize_for("abc ".repeat(words), false, Some(client.into()));
    let mut many: FuturesUnordered<_> = (0..100).map(|_| tokenize(30_000, "many")).collect();
    // This poll starts all of them. One may be done already.
    drop(poll!(many.next()));
    let mut one = pin!(tokenize(1_000, "one"));
    if poll!(&mut one).is_ready() {
        return;
    }
    // Texts that were done before this one was submitted do not count.
    while let Poll::Ready(Some(_)) = poll!(many.next()) {}
    let mut before = 0;
    loop {
        tokio::select! {
            biased;
            tokens = &mut one => break assert_eq!(tokens.expect("text").len(), 4_000),
            Some(tokens) = many.next() => {
                assert_eq!(tokens.expect("text").len(), 120_000);
                before += 1;
            }
        }
    }
    assert!(before < 50, "it waited for {before} of 100 texts");
}

/// Goal: a text that cannot fit is refused by its length, before it is rendered or tokenized: in
/// the first poll, on the caller's thread, and even by an engine that has no chat template.
#[tokio::test]
async fn a_text_that_cannot_fit_is_refused_before_it_is_tokenized() {
    let (engine, _) = engine(4).await;
    let huge = "z".repeat(15_000_000);
    let chat = |content: &str| Request::chat(vec![stolon::ChatMessage::user(content)]);
    for request in [Request::text(&huge), chat(&huge)] {
        let Poll::Ready(refused) = poll!(Box::pin(engine.generate(request.clone()))) else {
            panic!("the prompt is tokenized although it cannot fit");
        };
        let error = refused.expect_err("it cannot fit");
        let Error::Engine(EngineError::PromptTooLong { got, limit: 64, .. }) = error else {
            panic!("expected that the prompt is too long, got {error}");
        };
        assert!(got >= 15_000_000);
        assert!(engine.cache().query_match_len(&request).is_err());
    }
}

/// Goal: invalid settings of the builder are refused with an error that names them.
#[tokio::test]
async fn invalid_settings_are_refused() {
    let error = async |builder: stolon::EngineBuilder| {
        builder.build().await.expect_err("invalid settings").to_string()
    };
    let nothing = error(Engine::builder()).await;
    assert!(nothing.contains("a model or a backend"), "{nothing}");
    assert!(error(Engine::builder().model("/no/such/dir/")).await.contains("/no/such/dir"));
    let tiny = || Engine::builder().model("random:tiny");
    assert!(error(tiny().num_blocks(0)).await.contains("block"));
    assert!(error(tiny().block_size(12).num_blocks(4)).await.contains("12"));
    assert!(error(tiny().block_size(512).num_blocks(4)).await.contains("512"));
    assert!(error(tiny().kv_memory(10)).await.contains("10"));
    assert!(error(tiny().threads(0).num_blocks(4)).await.contains("threads"));
    assert!(error(builder(4).0.max_running(0)).await.contains("max_running"));
    assert!(error(builder(4).0.max_batched_tokens(0)).await.contains("max_batched_tokens"));
}

/// Goal: if the backend panics, requests in flight end with `Interrupted`, and if it fails, with
/// `StepFailed`. The engine recovers, and answers are the same as before.
#[tokio::test]
async fn the_engine_recovers_from_a_failing_backend() {
    let (engine, handle) = engine(64).await;
    let request = || Request::text("some prompt that fills a block").max_tokens(6);
    let run = async || engine.generate(request()).await?.collect_text().await;
    let before = run().await.expect("it ends");
    for fault in [FakeFault::Panic, FakeFault::Fail] {
        handle.inject_next(fault);
        let error = run().await.expect_err("it was interrupted");
        assert_eq!(error.is_retryable(), fault == FakeFault::Panic, "{error}");
        match (fault, &error) {
            (FakeFault::Panic, Error::Engine(EngineError::Interrupted { .. })) => {}
            (FakeFault::Fail, Error::Engine(EngineError::StepFailed { .. })) => {}
            _ => panic!("{error}"),
        }
        let again = loop {
            match run().await {
                Ok(again) => break again,
                Err(Error::Engine(EngineError::Interrupted { .. })) => {
                    tokio::time::sleep(Duration::from_millis(1)).await
                }
                Err(other) => panic!("{other}"),
            }
        };
        assert_eq!(again.token_ids, before.token_ids);
        assert_eq!(again.finish.usage.cached_tokens, 0, "the cache is discarded");
        engine.audit().await.expect("consistent accounting");
    }
    assert_eq!(engine.stats().restarts, 1, "an error needs no restart");
}

/// Goal: two engines in one process share neither caches nor failures.
#[tokio::test]
async fn two_engines_are_independent() {
    let (one, _) = engine(64).await;
    let (two, handle) = engine(32).await;
    let prompt = "the same prompt for both, of some length";
    let run = async |engine: &Engine| {
        let stream = engine.generate(Request::text(prompt).max_tokens(8)).await?;
        stream.collect_text().await
    };
    let first = run(&one).await.expect("it ends");
    let second = run(&two).await.expect("it ends");
    assert_eq!(second.finish.usage.cached_tokens, 0);
    assert_eq!(first.token_ids, second.token_ids);
    handle.inject_next(FakeFault::Panic);
    run(&two).await.expect_err("it panics");
    assert_eq!(run(&one).await.expect("it ends").finish.usage.cached_tokens, 32);
    two.shutdown().await;
    assert!(matches!(run(&two).await, Err(Error::Engine(EngineError::Stopped))));
    run(&one).await.expect("it goes on");
    assert_eq!(one.stats().restarts, 0);
}

/// Goal: a stream can be read after its `Engine` was dropped, and the engine stops after both.
#[tokio::test]
async fn a_stream_keeps_its_engine_alive() {
    let (engine, handle) = engine(64).await;
    let stream = engine.generate(Request::text("abc").max_tokens(20)).await.expect("it fits");
    drop(engine);
    assert_eq!(stream.collect_text().await.expect("it ends").token_ids.len(), 20);
    let steps = handle.step_count();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(handle.step_count(), steps);
}

/// Goal: `drain` completes running requests before it stops the engine.
#[tokio::test]
async fn drain_completes_running_requests() {
    let (engine, _) = engine(64).await;
    let stream = engine.generate(Request::text("abc").max_tokens(30)).await.expect("it fits");
    let reader = tokio::spawn(stream.collect_text());
    engine.drain(Duration::from_secs(20)).await;
    assert_eq!(reader.await.expect("no panic").expect("it ends").token_ids.len(), 30);
}

/// Goal: the priority and then the admission policy order the queue. The policy can be changed
/// while the engine runs.
#[tokio::test]
async fn the_policy_orders_the_queue() {
    for (policy, expected) in
        [(AdmissionPolicy::Fcfs, [1, 0, 2]), (AdmissionPolicy::Cost, [1, 2, 0])]
    {
        let (builder, handle) = builder(64);
        let engine = builder.max_running(1).build().await.expect("valid settings");
        engine.set_admission(policy);
        assert_eq!(engine.admission(), policy);
        let hold = handle.hold();
        let blocker =
            engine.generate(Request::text("blocker").max_tokens(2)).await.expect("it fits");
        while handle.step_count() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
        for (index, len) in [90, 60, 30].into_iter().enumerate() {
            let prompt = vec![index as u32; len];
            let request = Request::tokens(prompt).max_tokens(2).priority(i32::from(index == 1));
            let stream = engine.generate(request).await.expect("it fits");
            let sender = sender.clone();
            tokio::spawn(async move {
                stream.collect_text().await.expect("it ends");
                sender.send(index).expect("the receiver is open");
            });
        }
        drop(hold);
        blocker.collect_text().await.expect("it ends");
        let mut got = [0; 3];
        for place in &mut got {
            *place = order.recv().await.expect("three of them");
        }
        assert_eq!(got, expected, "{policy}");
    }
}

/// Always chooses the token after the number of tokens so far, and panics at the given number.
struct Count {
    panic_at: usize,
}

impl stolon::LogitsProcessor for Count {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), stolon::SamplingError> {
        assert!(output.len() < self.panic_at, "too many");
        logits.fill(f32::NEG_INFINITY);
        logits[output.len()] = 0.0;
        Ok(())
    }
}

/// Goal: a logits processor decides every token of its request, also when the logits of the prompt
/// are cached, and no token of others. A panic in it ends its own request and nothing else.
#[tokio::test]
async fn a_logits_processor_changes_its_own_request_only() {
    let (engine, _) = engine(64).await;
    let prompt = "a prompt of 2 full blocks, no more";
    let plain = || Request::text(prompt).max_tokens(6).ignore_eos(true);
    for _ in 0..2 {
        let counting = plain().logits_processor(Count { panic_at: 100 });
        let (counted, other) = futures::join!(engine.complete(counting), engine.complete(plain()));
        assert_eq!(counted.expect("it ends").token_ids, [0, 1, 2, 3, 4, 5]);
        assert_eq!(other.expect("it ends").token_ids, expected(prompt.as_bytes(), 6));
    }
    let panicking = plain().logits_processor(Count { panic_at: 3 });
    let (failed, other) = futures::join!(engine.complete(panicking), engine.complete(plain()));
    let error = failed.expect_err("it panicked");
    assert!(matches!(error, Error::Engine(EngineError::InvalidLogits { .. })), "{error}");
    assert!(error.to_string().contains("too many") && !error.is_retryable(), "{error}");
    assert_eq!(other.expect("it ends").token_ids, expected(prompt.as_bytes(), 6));
    assert_eq!(engine.stats().restarts, 0);
}
