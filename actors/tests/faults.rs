//! Every part of the core is made to fail; the rest tells those in flight and starts again.

#[path = "support/bench.rs"]
mod support;

use std::time::{Duration, Instant};

use stolon_actors::{CoreConfig, CoreError, Fault, Part, SequenceRequest};
use stolon_backend::fake::FakeFault;
use support::{Bench, bench, options, prompt, read};

/// Sends the same request until it is answered; at most a second long.
async fn answered_within_a_second(bench: &Bench, tokens: &[u32]) {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < Duration::from_secs(10), "it does not serve again");
        let request = SequenceRequest::new(tokens.to_vec(), 8);
        let outcome = match bench.core.submit(request) {
            Ok(stream) => read(stream).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(answer) => {
                bench.compare(tokens, &answer);
                return;
            }
            Err(CoreError::Interrupted { .. }) => {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Goal: whichever part fails, and however, with requests in flight: each of them ends, with the
/// right tokens or with the right error; the engine serves again; nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_part_may_fail() {
    let parts = [
        Part::Admission,
        Part::PrefixTree,
        Part::BlockAllocator,
        Part::Executor,
        Part::ExecutorThread,
    ];
    let bench = bench(options(16, 64), CoreConfig::default()).await;
    let mut restarts = 0;
    for part in parts {
        for fault in [Fault::Panic, Fault::Error, Fault::Stall(Duration::from_millis(30))] {
            let prompts: Vec<_> = (0..6).map(|n| prompt(n % 3, 70 + n as usize)).collect();
            let streams: Vec<_> = prompts.iter().map(|p| (p, bench.submit(p, 30))).collect();
            let steps = bench.fake.step_count();
            bench.steps(steps + 1).await;
            bench.core.inject(part, fault);
            for (prompt, stream) in streams {
                match read(stream).await {
                    Ok(answer) => bench.compare(prompt, &answer),
                    Err(CoreError::Interrupted { .. }) => {}
                    Err(other) => panic!("{part:?} {fault:?}: {other}"),
                }
            }
            answered_within_a_second(&bench, &prompt(9, 50)).await;
            bench.check_clean().await;
            let now = bench.core.stats().restarts;
            let restarts_it = match (part, fault) {
                (_, Fault::Stall(_)) => false,
                // An error of a step fails its sequences and needs no restart.
                (Part::ExecutorThread, Fault::Error) => false,
                _ => true,
            };
            if restarts_it {
                assert_eq!(now, restarts + 1, "{part:?} {fault:?}");
            } else {
                assert_eq!(now, restarts, "{part:?} {fault:?}");
            }
            restarts = now;
        }
    }
}

/// Goal: a backend that panics or fails, again and again, never stops the engine.
#[tokio::test]
async fn a_backend_may_fail_again_and_again() {
    let bench = bench(options(16, 64), CoreConfig::default()).await;
    for round in 0..10 {
        let fault = if round % 2 == 0 { FakeFault::Panic } else { FakeFault::Fail };
        bench.fake.inject_next(fault);
        let error = read(bench.submit(&prompt(round, 60), 8)).await.expect_err("it fails");
        assert!(matches!(error, CoreError::Interrupted { .. }), "{error}");
        answered_within_a_second(&bench, &prompt(round, 60)).await;
        bench.check_clean().await;
    }
    assert_eq!(bench.core.stats().restarts, 5);
}

/// Goal: dropping the last handle stops the core, and the backend with it.
#[tokio::test]
async fn dropping_the_handle_stops_the_core() {
    let bench = bench(options(16, 64), CoreConfig::default()).await;
    bench.check(&prompt(1, 40), 4).await;
    let support::Bench { core, fake, .. } = bench;
    let stream = core.submit(SequenceRequest::new(prompt(2, 40), 10)).expect("it fits");
    drop(core);
    assert_eq!(read(stream).await.expect("the stream kept it alive").tokens.len(), 10);
    let steps = fake.step_count();
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(fake.step_count(), steps);
}

/// Goal: with a backend that hangs nobody waits for ever: what is in flight and what comes ends
/// with the right error, and when the backend comes back the engine serves again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_hangs_keeps_nobody_waiting() {
    let limit = Duration::from_millis(60);
    let config = CoreConfig { step_timeout: Some(limit), ..CoreConfig::default() };
    let bench = bench(options(16, 64), config).await;
    bench.check(&prompt(1, 60), 8).await;
    let hold = bench.fake.hold();
    let streams: Vec<_> = (0..4).map(|n| bench.submit(&prompt(n, 60), 8)).collect();
    let begun = Instant::now();
    for stream in streams {
        let error = read(stream).await.expect_err("the backend hangs");
        assert_eq!(error, CoreError::BackendHung { limit });
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    // Between the streams' end and the supervisor's word the old generation is still in sight.
    let refused = match bench.core.submit(SequenceRequest::new(prompt(9, 20), 1)) {
        Ok(stream) => read(stream).await.expect_err("it has ended"),
        Err(error) => error,
    };
    assert_eq!(refused, CoreError::BackendHung { limit });
    drop(hold);
    loop {
        match bench.core.submit(SequenceRequest::new(prompt(9, 50), 8)) {
            Ok(stream) => {
                bench.compare(&prompt(9, 50), &read(stream).await.expect("it is back"));
                break;
            }
            Err(error) => assert_eq!(error, CoreError::BackendHung { limit }),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    bench.check_clean().await;
    assert_eq!(bench.core.stats().restarts, 1);
    // Shutting down does not wait for a hanging backend either.
    let hold = bench.fake.hold();
    let stream = bench.submit(&prompt(3, 60), 8);
    tokio::time::timeout(Duration::from_secs(5), bench.core.shutdown()).await.expect("in time");
    assert!(read(stream).await.is_err());
    drop(hold);
}
