//! Prompts that are computed in the background, while there is no request.

use super::*;
use crate::session::{NewSession, SessionId};

/// The ids of such prompts begin here, so that they differ from those of the callers.
const FIRST_ID: u64 = 1 << 32;

impl Harness {
    /// Submits a prompt to compute in the background. Does nothing without a prefix cache.
    pub(super) fn submit_background(&mut self, prompt: Vec<u32>) {
        let id = FIRST_ID + self.background.len() as u64;
        let request = SequenceRequest::new(prompt, 1);
        let Ok((sequence, events)) = self.context.submit_background(id, request, self.now) else {
            return;
        };
        self.scheduler.submit_background(sequence);
        self.background.push(events);
        self.advance();
    }

    /// A step that computes such a prompt computes nothing else, is short, and is planned only
    /// while there is no request.
    pub(super) fn check_background(&self, plan: &StepPlan) {
        let ids = self.scheduler.ids_in_flight();
        if ids.iter().any(|id| *id >= FIRST_ID) {
            let numbers = self.context.gauges.request_counts.read();
            assert_eq!((ids.len(), numbers.running, numbers.waiting), (1, 0, 0));
            assert!(plan.batch.tokens.len() <= 16, "{}", plan.batch.tokens.len());
        }
    }

    fn ended(&mut self, index: usize) -> Option<bool> {
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(received) = self.background[index].poll(&mut context) {
            match received.event {
                Some(Ok(Event::Started { .. })) => {}
                Some(Ok(Event::Finished(_))) => return Some(true),
                Some(Ok(other)) => panic!("not expected: {other:?}"),
                Some(Err(_)) | None => return Some(false),
            }
        }
        None
    }

    fn background_stats(&self) -> [u64; 3] {
        let stats = self.context.stats();
        [stats.background_finished, stats.background_dropped, stats.background_tokens]
    }
}

fn harness(block_count: usize, checkpoint_blocks: Option<usize>) -> Harness {
    let config = EngineConfig { max_batched_tokens: 64, ..EngineConfig::default() };
    Harness::with_states(4, block_count, checkpoint_blocks, config)
}

/// Goal: a prompt is computed in short steps and cached up to its last full block, also with a
/// recurrent state, and it counts as no request. The next request computes only what comes after.
#[test]
fn a_prompt_is_cached_before_its_request_comes() {
    for checkpoint_blocks in [None, Some(3)] {
        let mut harness = harness(100, checkpoint_blocks);
        harness.submit_background(prompt(1, 41));
        let mut steps = 0;
        while harness.step(false) {
            steps += 1;
        }
        assert_eq!((steps, harness.ended(0)), (3, Some(true)));
        assert_eq!(harness.background_stats(), [1, 0, 41]);
        let stats = harness.context.stats();
        assert_eq!((stats.requests, stats.prompt_tokens, stats.computed_tokens), (0, 0, 0));
        assert_eq!(harness.context.gauges.histograms().end_to_end.total(), 0);

        harness.submit(prompt(1, 45), 3, None);
        harness.finish();
        assert_eq!(harness.callers[0].cached, Some(40));
        assert_eq!(harness.context.stats().computed_tokens, 5 + 2);
        // It is cached already, so it computes its last token.
        harness.submit_background(prompt(1, 41));
        harness.finish();
        assert_eq!(harness.background_stats(), [2, 0, 42]);
    }
}

/// Goal: a request that arrives waits for the step in flight and for no other. What was computed
/// before is cached, and the prompt that had to end is not continued. One that waits is.
#[test]
fn a_request_waits_for_one_short_step() {
    let mut harness = harness(100, None);
    harness.submit_background(prompt(1, 60));
    harness.submit_background(prompt(2, 30));
    harness.step(false);
    harness.submit(prompt(3, 20), 5, None);
    assert_eq!(harness.scheduler.ids_in_flight(), [FIRST_ID]);
    harness.step(false);
    assert_eq!(harness.scheduler.ids_in_flight(), [0]);
    assert_eq!(harness.ended(0), Some(false));
    assert_eq!(harness.background_stats(), [0, 1, 32]);
    harness.finish();
    assert_eq!((harness.ended(1), harness.background_stats()), (Some(true), [1, 1, 62]));
    harness.submit(prompt(1, 60), 1, None);
    harness.finish();
    assert_eq!(harness.callers[1].cached, Some(32));
}

/// Goal: with one slot, which the prompt has, a request gets it after the step in flight.
#[test]
fn the_only_slot_is_returned() {
    let config = EngineConfig { max_running: 1, ..EngineConfig::default() };
    let mut harness = Harness::with_states(4, 100, Some(3), config);
    harness.submit_background(prompt(1, 60));
    harness.submit(prompt(3, 20), 2, None);
    harness.step(false);
    assert_eq!(harness.scheduler.ids_in_flight(), [0]);
    harness.finish();
    assert_eq!(harness.background_stats(), [0, 1, 16]);
}

/// Goal: without blocks that can be evicted, the prompt ends, and no session loses what it holds.
#[test]
fn sessions_keep_their_blocks() {
    let mut harness = harness(12, None);
    let (id, namespace) = (SessionId::new("a".to_owned()), Namespace::default());
    let new = NewSession { id: id.clone(), namespace, ttl: None };
    harness.context.sessions.open(new, harness.now).expect("it is new");
    let turn = harness.context.sessions.begin_turn(&id, &namespace, harness.now).expect("idle");
    harness.submit_request(prompt(1, 23), 2, |request| request.turn = Some(turn));
    while harness.step(false) {
        harness.read(true);
    }
    let held = harness.context.stats().blocks_in_sessions;
    assert_eq!(held, 6);
    harness.submit_background(prompt(2, 25));
    assert_eq!((harness.ended(0), harness.background_stats()), (Some(false), [0, 1, 0]));
    harness.submit_background(prompt(2, 24));
    while harness.step(false) {}
    assert_eq!((harness.ended(1), harness.background_stats()), (Some(true), [1, 1, 24]));
    assert_eq!(harness.context.stats().blocks_in_sessions, held);
    harness.finish();
}

/// Goal: the number of prompts that wait is bounded: the one that has waited longest ends. A prompt
/// whose caller has gone away is not computed, and none is accepted without a prefix cache.
#[test]
fn waiting_prompts_are_bounded() {
    let mut harness = harness(100, None);
    harness.submit(prompt(3, 8), 20, None);
    for seed in 0..18 {
        harness.submit_background(vec![seed % 16; 9]);
    }
    assert_eq!((harness.ended(0), harness.ended(1)), (Some(false), Some(false)));
    assert_eq!((harness.ended(2), harness.background_stats()), (None, [0, 2, 0]));
    harness.scheduler.cancel(FIRST_ID + 2);
    harness.finish();
    assert_eq!(harness.background_stats()[..2], [15, 3]);

    let config = EngineConfig { prefix_caching: false, ..EngineConfig::default() };
    let harness = Harness::new(4, 100, config);
    let request = SequenceRequest::new(vec![1; 9], 1);
    let refused = harness.context.submit_background(0, request, harness.now);
    assert!(refused.is_err_and(|error| error.to_string().contains("prefix cache")));
}
