//! Repeated look-ups: KV that a waiting request has lost from the cache is read instead of
//! computed, and waiting for it breaks no other guarantee.

use std::time::Duration;

use stolon_kvcache::TokenSpan;

use super::{Harness, group_prompt, prompt, with_cached};
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::lookup::WAIT_MAX;
use crate::transfer::{KvSource, Prefetch, PromptLookup};

/// Stands for a source. The harness gives its answers, because the scheduler calls no source.
#[derive(Debug)]
pub(super) struct NoSource;

impl KvSource for NoSource {
    fn prefetch(&self, _: &PromptLookup) -> Prefetch {
        panic!("the scheduler does no I/O")
    }
}

impl Harness {
    /// Answers a look-up with stored KV of its prompt from a block on; with nothing if there is no
    /// block, or for a prompt with images.
    pub(super) fn answer(&mut self, index: usize, first_block: Option<usize>) {
        let lookup = self.lookups.remove(index);
        let tokens = &lookup.prompt.tokens;
        let is_text = !tokens.iter().any(|&token| TokenSpan::is_image(token));
        let kv = first_block.filter(|_| is_text).and_then(|first| self.stored(tokens, first));
        self.scheduler.stored_read(lookup.id, kv);
        self.advance();
    }

    /// Submits a request that occupies this number of blocks of 4 positions in the end, but few in
    /// the beginning.
    fn occupy(&mut self, blocks: usize) {
        self.submit(group_prompt(2, 8), 4 * blocks + 1 - 8, None);
    }

    /// Executes steps until a waiting request asks again.
    fn step_until_lookup(&mut self) {
        while self.lookups.is_empty() {
            assert!(self.step(false), "it asks again before everything has ended");
            self.read(false);
        }
    }
}

/// Settings with one running request at a time.
fn one_at_a_time() -> EngineConfig {
    EngineConfig { max_running: 1, max_batched_tokens: 64, ..EngineConfig::default() }
}

/// A harness in which a prompt of 40 tokens was cached when its request, the last caller, was
/// submitted, and was evicted while it waited. It asks again.
fn evicted_while_waiting(config: EngineConfig) -> (Harness, Vec<u32>) {
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(16, config, std::slice::from_ref(&prompt));
    harness.occupy(16);
    harness.submit(prompt.clone(), 2, None);
    harness.step_until_lookup();
    assert_eq!(harness.scheduler.waiting().len(), 1);
    (harness, prompt)
}

/// Goal: a prefix that was evicted while its request waited is loaded, not computed. Without
/// stored KV, it is computed.
#[test]
fn a_prefix_that_is_evicted_while_its_request_waits_is_read() {
    for (first_block, loaded) in [(Some(0), 40), (None, 0)] {
        let (mut harness, prompt) = evicted_while_waiting(one_at_a_time());
        let lookup = &harness.lookups[0].prompt;
        assert_eq!((&*lookup.tokens, lookup.cached, lookup.is_repeated), (&prompt, 0, true));
        let before = harness.context.gauges.computed_tokens.get();
        harness.answer(0, first_block);
        harness.finish();
        assert_eq!(harness.callers[2].cached, Some(loaded));
        assert_eq!(harness.context.gauges.loaded_tokens.get(), loaded as u64);
        let computed = harness.context.gauges.computed_tokens.get() - before;
        assert_eq!(computed, if loaded > 0 { 1 + 1 } else { 40 + 1 });
    }
}

/// Goal: only what was lost is read. Stored KV that was read before the request was submitted, and
/// does not continue what is cached any longer, is replaced.
#[test]
fn a_gap_before_stored_kv_is_read() {
    let prompt = group_prompt(1, 40);
    // The last blocks of the prefix are evicted first.
    for (blocks, cached) in [(12, 4 * 4), (16, 0)] {
        let mut harness = with_cached(16, one_at_a_time(), &[prompt[..24].to_vec()]);
        harness.occupy(blocks);
        let stored = harness.stored(&prompt, 6).expect("it has so many blocks");
        harness.submit_stored(prompt.clone(), 2, stored);
        harness.step_until_lookup();
        assert_eq!(harness.lookups[0].prompt.cached, cached);
        harness.answer(0, Some(cached / 4));
        harness.finish();
        assert_eq!(harness.context.gauges.loaded_tokens.get(), 40 - cached as u64);
    }
}

/// Goal: while a request waits for a read, others are admitted before it, but not more than its
/// bound on overtaking permits.
#[test]
fn others_pass_a_request_that_waits_for_stored_kv_within_its_bound() {
    let config = EngineConfig { max_overtake_tokens: 20, ..one_at_a_time() };
    let (mut harness, _) = evicted_while_waiting(config);
    // Its bound is 20 tokens, plus those that waited when it arrived: none.
    harness.submit(group_prompt(3, 15), 1, None);
    harness.submit(group_prompt(4, 15), 1, None);
    while harness.step(false) {}
    harness.read(true);
    assert!(harness.callers[3].is_done() && !harness.callers[4].is_done());
    assert_eq!(harness.scheduler.waiting().len(), 2);
    harness.answer(0, Some(0));
    harness.finish();
    assert_eq!(harness.context.gauges.loaded_tokens.get(), 40);
    assert!(harness.context.gauges.most_overtaken_tokens.get() <= 20);
}

/// Goal: a read that does not end holds nobody for longer than the limit.
#[test]
fn an_answer_that_does_not_come_is_not_waited_for_long() {
    let config = EngineConfig { max_overtake_tokens: 0, ..one_at_a_time() };
    let (mut harness, _) = evicted_while_waiting(config);
    harness.submit(group_prompt(3, 15), 1, None);
    assert!(harness.in_flight.is_none(), "it may not overtake");
    let deadline = harness.scheduler.next_deadline().expect("the end of the waiting");
    assert_eq!(deadline, harness.now + WAIT_MAX);
    harness.now = deadline;
    harness.advance();
    assert!(harness.in_flight.is_some());
    // An answer that is late is of no use.
    harness.answer(0, Some(0));
    harness.finish();
    assert_eq!(harness.context.gauges.loaded_tokens.get(), 0);
}

/// Goal: a request that waits for stored KV can be canceled and times out as any other.
#[test]
fn a_request_that_waits_for_stored_kv_ends_as_any_other() {
    let (mut harness, _) = evicted_while_waiting(one_at_a_time());
    harness.cancel(2);
    assert!(harness.scheduler.waiting().is_empty());
    harness.answer(0, Some(0));
    harness.finish();
    let prompt = group_prompt(1, 40);
    let mut harness = with_cached(16, one_at_a_time(), std::slice::from_ref(&prompt));
    harness.occupy(16);
    let second = Duration::from_secs(1);
    harness.submit(prompt, 2, Some(second));
    harness.step_until_lookup();
    harness.now += second;
    harness.advance();
    harness.read(true);
    assert!(matches!(harness.callers[2].end, Some(Err(EngineError::Timeout { .. }))));
    harness.finish();
}

/// Goal: blocks that a request has committed, and that were evicted after it was preempted, are
/// read, too, as far as they are part of the prompt.
#[test]
fn a_preempted_request_reads_what_it_has_lost() {
    let config = EngineConfig { event_capacity: 16, ..one_at_a_time() };
    let mut harness = Harness::new(4, 16, config);
    let prompt = group_prompt(1, 40);
    harness.submit(prompt.clone(), 24, None);
    harness.callers[0].slow = true;
    while harness.step(false) {}
    assert_eq!(harness.context.stats().running, 1, "it is stalled");
    harness.submit(group_prompt(2, 61), 4, None);
    while harness.step(false) {}
    assert_eq!(harness.context.gauges.preemptions_stalled.get(), 1);
    harness.read(true);
    harness.step_until_lookup();
    assert_eq!((harness.lookups[0].id, &*harness.lookups[0].prompt.tokens), (0, &prompt));
    harness.answer(0, Some(0));
    harness.finish();
    assert_eq!(harness.context.gauges.loaded_tokens.get(), 40);
}

/// Goal: a model with a recurrent state reads its checkpoint again with the KV before it.
#[test]
fn a_checkpoint_that_is_evicted_while_its_request_waits_is_read() {
    let mut harness = Harness::with_states(4, 24, Some(3), one_at_a_time());
    let prompt = group_prompt(1, 43);
    harness.submit(prompt.clone(), 1, None);
    while harness.step(false) {}
    harness.occupy(22);
    harness.submit(prompt, 2, None);
    harness.step_until_lookup();
    let before = harness.context.gauges.computed_tokens.get();
    let cached = harness.lookups[0].prompt.cached;
    harness.answer(0, Some(cached / 4));
    harness.finish();
    assert_eq!(harness.callers[2].cached, Some(40));
    assert_eq!(harness.context.gauges.computed_tokens.get() - before, 3 + 1);
}

/// Goal: a request that computes its whole prompt in any case, and one whose prompt was never
/// cached, ask for nothing.
#[test]
fn only_what_was_found_before_is_asked_for() {
    let cached = prompt(1, 40);
    let mut harness = with_cached(16, one_at_a_time(), std::slice::from_ref(&cached));
    harness.occupy(16);
    harness.submit_request(cached, 2, |request| request.options.skip_reading_prefix_cache = true);
    harness.submit(group_prompt(3, 40), 2, None);
    while harness.step(false) {
        harness.read(true);
        assert!(harness.lookups.is_empty());
    }
    harness.finish();
}
