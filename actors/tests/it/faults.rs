//! Every part of the engine is made to fail. Requests in flight end with an error and the engine
//! restarts.

use std::time::{Duration, Instant};

use stolon_actors::{EnginePart, Fault};
use stolon_backend::fake::FakeFault;
use stolon_scheduler::{EngineConfig, EngineError, EngineHealth, SequenceRequest};
use support::{Harness, options, prompt, read_to_end, start};

use crate::support::harness as support;

/// Submits a request again and again until it is answered, for at most ten seconds.
async fn retry_until_answered(harness: &Harness, tokens: &[u32]) {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < Duration::from_secs(10), "the engine does not recover");
        let request = SequenceRequest::new(tokens.to_vec(), 8);
        let outcome = match harness.engine.submit(request) {
            Ok(stream) => read_to_end(stream).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(answer) => {
                harness.check_tokens(tokens, &answer);
                return;
            }
            // A fault that was injected earlier may take effect only now.
            Err(EngineError::Interrupted { .. } | EngineError::StepFailed { .. }) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Goal: whichever part fails while requests are in flight, and however it fails, each request ends
/// with the right tokens or with the right error, the engine recovers, and no block is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_recovers_from_a_failure_of_any_part() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    let mut restarts = 0;
    for part in EnginePart::ALL {
        for fault in [Fault::Panic, Fault::Error, Fault::Stall(Duration::from_millis(30))] {
            let prompts: Vec<_> = (0..6).map(|n| prompt(n % 3, 70 + n as usize)).collect();
            let streams: Vec<_> = prompts.iter().map(|p| (p, harness.submit(p, 30))).collect();
            let steps = harness.fake.step_count();
            harness.wait_for_steps(steps + 1).await;
            harness.engine.inject(part, fault);
            for (prompt, stream) in streams {
                match read_to_end(stream).await {
                    Ok(answer) => harness.check_tokens(prompt, &answer),
                    Err(EngineError::Interrupted { .. }) => {}
                    Err(EngineError::StepFailed { .. })
                        if part == EnginePart::ExecutorThread && fault == Fault::Error => {}
                    Err(other) => panic!("{part:?} {fault:?}: {other}"),
                }
            }
            retry_until_answered(&harness, &prompt(9, 50)).await;
            harness.check_nothing_held().await;
            let now = harness.engine.context().stats().restarts;
            let restarts_engine = match (part, fault) {
                (_, Fault::Stall(_)) => false,
                // If a step returns an error, its sequences fail and no restart is needed.
                (EnginePart::ExecutorThread, Fault::Error) => false,
                _ => true,
            };
            if restarts_engine {
                assert_eq!(now, restarts + 1, "{part:?} {fault:?}");
            } else {
                assert_eq!(now, restarts, "{part:?} {fault:?}");
            }
            restarts = now;
        }
    }
}

/// Goal: a backend that panics or fails repeatedly never stops the engine for good.
#[tokio::test]
async fn the_engine_recovers_from_repeated_backend_failures() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    for round in 0..10 {
        let fault = if round % 2 == 0 { FakeFault::Panic } else { FakeFault::Fail };
        harness.fake.inject_next(fault);
        let error =
            read_to_end(harness.submit(&prompt(round, 60), 8)).await.expect_err("the step fails");
        match fault {
            FakeFault::Panic => {
                assert!(matches!(error, EngineError::Interrupted { .. }), "{error}")
            }
            _ => assert!(matches!(error, EngineError::StepFailed { .. }), "{error}"),
        }
        retry_until_answered(&harness, &prompt(round, 60)).await;
        harness.check_nothing_held().await;
    }
    assert_eq!(harness.engine.context().stats().restarts, 5);
}

/// Goal: an engine whose backend panics at every step restarts with growing pauses, and in the end
/// stops with an error that says so, instead of restarting forever. Then the backend is dropped.
#[tokio::test(start_paused = true)]
async fn the_engine_gives_up_a_backend_that_fails_every_time() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    let begun = tokio::time::Instant::now();
    let mut interrupted = 0;
    let last = loop {
        let error = match harness.engine.submit(SequenceRequest::new(prompt(1, 60), 8)) {
            Ok(stream) => {
                harness.fake.inject_next(FakeFault::Panic);
                read_to_end(stream).await.expect_err("the step panics")
            }
            Err(error) => error,
        };
        let is_down = matches!(error, EngineError::Interrupted { .. });
        if !is_down {
            break error;
        }
        interrupted += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let EngineError::GaveUp { failures: 10, last: reason } = &last else { panic!("{last}") };
    assert!(reason.contains("restarts"), "{last}");
    assert!(interrupted >= 9 && begun.elapsed() > Duration::from_secs(10), "{interrupted}");
    assert!(!last.is_retryable());
    assert_eq!(harness.engine.context().stats().restarts, 9);
    assert_eq!(harness.engine.health(), EngineHealth::Stopped);
    let refused = harness.engine.submit(SequenceRequest::new(prompt(1, 20), 1));
    assert_eq!(refused.err(), Some(last));
    assert!(harness.engine.shutdown().await, "nothing hangs");
}

/// Goal: the engine and its backend stop when the last handle and the last stream are dropped.
#[tokio::test]
async fn dropping_the_last_handle_and_stream_stops_the_engine() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    harness.check_greedy(&prompt(1, 40), 4).await;
    let support::Harness { engine, fake, .. } = harness;
    let stream =
        engine.submit(SequenceRequest::new(prompt(2, 40), 10)).expect("the request is accepted");
    drop(engine);
    assert_eq!(
        read_to_end(stream).await.expect("the stream keeps the engine alive").tokens.len(),
        10
    );
    let steps = fake.step_count();
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(fake.step_count(), steps);
}

/// Goal: while the backend hangs, running and new requests end with the right error instead of
/// waiting. When the backend returns, the engine recovers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_end_with_an_error_while_the_backend_hangs() {
    let limit = Duration::from_millis(60);
    let config = EngineConfig { step_timeout: Some(limit), ..EngineConfig::default() };
    let harness = start(options(16, 64), config).await;
    harness.check_greedy(&prompt(1, 60), 8).await;
    let hold = harness.fake.hold();
    let streams: Vec<_> = (0..4).map(|n| harness.submit(&prompt(n, 60), 8)).collect();
    let begun = Instant::now();
    for stream in streams {
        let error = read_to_end(stream).await.expect_err("the backend hangs");
        assert_eq!(error, EngineError::BackendHung { limit });
        assert_eq!(harness.engine.health(), EngineHealth::Hung);
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    // The old generation stays visible between the end of the streams and the supervisor's
    // reaction.
    let refused = match harness.engine.submit(SequenceRequest::new(prompt(9, 20), 1)) {
        Ok(stream) => read_to_end(stream).await.expect_err("the backend still hangs"),
        Err(error) => error,
    };
    assert_eq!(refused, EngineError::BackendHung { limit });
    drop(hold);
    loop {
        match harness.engine.submit(SequenceRequest::new(prompt(9, 50), 8)) {
            Ok(stream) => {
                harness.check_tokens(
                    &prompt(9, 50),
                    &read_to_end(stream).await.expect("the backend is back"),
                );
                break;
            }
            Err(error) => assert_eq!(error, EngineError::BackendHung { limit }),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(harness.engine.health(), EngineHealth::Running);
    harness.check_nothing_held().await;
    assert_eq!(harness.engine.context().stats().restarts, 1);
    // A shutdown does not wait for a hanging backend either.
    let hold = harness.fake.hold();
    let steps = harness.fake.step_count();
    let stream = harness.submit(&prompt(3, 60), 8);
    harness.wait_for_steps(steps + 1).await;
    let released = tokio::time::timeout(Duration::from_secs(5), harness.engine.shutdown())
        .await
        .expect("the shutdown completes");
    assert!(!released, "the backend still hangs");
    assert!(read_to_end(stream).await.is_err());
    drop(hold);
}

/// Goal: if the runtime that an engine was started on ends, requests in flight and later ones end
/// with `Stopped`, which says that no retry helps; also after `shutdown`.
#[test]
fn an_engine_whose_runtime_has_ended_has_stopped() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let harness = runtime.block_on(start(options(16, 64), EngineConfig::default()));
    let hold = harness.fake.hold();
    let streams: Vec<_> = (0..3).map(|n| harness.submit(&prompt(n, 60), 8)).collect();
    assert_eq!(harness.engine.health(), EngineHealth::Running);
    runtime.shutdown_background();
    let submit = || match harness.engine.submit(SequenceRequest::new(prompt(9, 20), 1)) {
        Ok(stream) => futures::executor::block_on(read_to_end(stream)).expect_err("it has ended"),
        Err(error) => error,
    };
    for stream in streams {
        let error = futures::executor::block_on(read_to_end(stream)).expect_err("it has ended");
        assert_eq!(error, EngineError::Stopped);
    }
    assert_eq!(submit(), EngineError::Stopped);
    assert_eq!(futures::executor::block_on(harness.engine.audit()), Err(EngineError::Stopped));
    drop(hold);
    futures::executor::block_on(harness.engine.shutdown());
    assert_eq!(submit(), EngineError::Stopped);
    assert_eq!(harness.engine.health(), EngineHealth::Stopped);
}
