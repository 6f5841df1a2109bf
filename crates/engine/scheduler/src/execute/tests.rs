//! Sampling on several threads.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread::ThreadId;

use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_backend::{LogitRows, SamplerState, SamplingParams};
use stolon_kvcache::BlockId;

use super::*;

/// Goal: the results are in the order of the items for any number of threads, also more than items,
/// and the threads really work at the same time.
#[test]
fn items_are_divided_among_threads() {
    for threads in [0, 1, 2, 5, 40] {
        let doubled = in_parallel((0..20).collect(), threads, |item: usize| 2 * item);
        assert!(doubled.into_iter().eq((0..40).step_by(2)), "{threads} threads");
        assert!(in_parallel(Vec::<u8>::new(), threads, |item| item).is_empty());
    }
    // The barrier opens when three threads have reached it.
    let barrier = Barrier::new(3);
    let meet = |_| {
        barrier.wait();
        thread::current().id()
    };
    let met: HashSet<ThreadId> = in_parallel(vec![(); 3], 3, meet).into_iter().collect();
    assert_eq!(met.len(), 3);
    assert!(met.contains(&thread::current().id()));
}

/// Goal: a panic has the same message on any thread, and no other item is lost before it is passed
/// on.
#[test]
fn a_panic_is_passed_on() {
    for bad in 0..8 {
        let work = |item| assert_ne!(item, bad, "item {bad} is bad");
        let run = AssertUnwindSafe(|| in_parallel((0..8).collect(), 4, work));
        let panic = catch_unwind(run).expect_err("a panic");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(message.contains(&format!("item {bad} is bad")), "{message}");
    }
}

/// Goal: a step with enough logits for several threads has the results of a step on one thread:
/// tokens, log-probabilities, samplers, cached logits and skipped slices.
#[test]
fn several_threads_sample_what_one_samples() {
    const VOCAB: usize = 60_000;
    let step = |sampling_threads| {
        let options = FakeOptions { vocab_size: VOCAB, sampling_threads, ..FakeOptions::default() };
        let mut backend = FakeBackend::new(options);
        let mut batch = StepBatch::default();
        let mut tasks = Vec::new();
        for index in 0..24_u32 {
            let token_count = 1 + index as usize % 3;
            let all = index % 5 == 0;
            batch.tokens.extend((0..token_count as u32).map(|token| 10 * index + token));
            batch.sequences.push(SequenceSlice {
                token_count,
                start: 0,
                write_from: 0,
                block_table: vec![BlockId(index)],
                logit_rows: if all { LogitRows::All } else { LogitRows::Last },
                ..SequenceSlice::default()
            });
            let params = SamplingParams {
                temperature: [0.0, 0.7, 1.0][index as usize % 3],
                top_p: [1.0, 0.9][index as usize % 2],
                logprobs: (index % 4 == 0).then_some(3),
                seed: Some(index.into()),
                ..SamplingParams::default()
            };
            let targets = || PromptTargets { tokens: vec![7; token_count - 1], top: 2 };
            tasks.push(RowTask {
                sampler: Some(Box::new(SamplerState::new(params, &[]))),
                return_logits: index % 7 == 0,
                prompt: all.then(targets),
                load: (index == 9).then_some(0),
                ..RowTask::default()
            });
        }
        let results = forward(&mut backend, batch, tasks, &[false]).expect("a valid step");
        assert_eq!(results.iter().filter(|result| !result.sampled.is_empty()).count(), 23);
        format!("{results:?}")
    };
    let alone = step(1);
    const { assert!(24 * VOCAB > 4 * LOGITS_PER_THREAD, "too few logits for four threads") };
    assert!(step(4) == alone, "the results differ");
}
