//! Models with recurrent states: where requests resume, and what they compute again.

use stolon_backend::Backend;
use stolon_kvcache::{EvictionPolicy, Namespace};

use super::speculation::Guess;
use super::*;
use crate::session::{NewSession, SessionId};

/// A harness with blocks of 4 positions, checkpoints of 3 blocks, and enough memory.
fn harness(max_batched_tokens: usize) -> Harness {
    let config = EngineConfig { max_batched_tokens, ..EngineConfig::default() };
    Harness::with_states(4, 400, Some(3), config)
}

fn run(harness: &mut Harness, prompt: Vec<u32>, max_tokens: usize) -> usize {
    harness.submit(prompt, max_tokens, None);
    harness.finish();
    harness.callers.last().and_then(|caller| caller.cached).expect("it has run")
}

/// Runs all requests to their ends.
fn run_all(harness: &mut Harness) {
    while harness.step(false) {
        harness.read(true);
    }
    harness.read(true);
    assert!(harness.callers.iter().all(Caller::is_done));
}

/// The next turn of a conversation: the last prompt, its answer and some more tokens.
fn next_turn(harness: &Harness, more: u32) -> Vec<u32> {
    let last = harness.callers.last().expect("a turn before");
    [&last.prompt[..], &last.tokens, &[more; 9]].concat()
}

/// Goal: a repeated prompt computes at most a block again, and gets its first token from cached
/// logits.
#[test]
fn a_repeated_prompt_resumes_before_its_last_position() {
    for len in 96..101 {
        let mut harness = harness(64);
        assert_eq!(run(&mut harness, group_prompt(1, len), 3), 0);
        let computed = harness.context.gauges.computed_tokens.get();
        let expected = (len - 1) / 4 * 4;
        assert_eq!(run(&mut harness, group_prompt(1, len), 3), expected);
        let again = harness.context.gauges.computed_tokens.get() - computed;
        assert_eq!(again as usize, len - expected + 2);
        assert_eq!(harness.context.gauges.first_tokens_from_cache.get(), 1);
    }
}

/// Goal: each turn of a conversation computes only its new tokens, up to the distance of the
/// checkpoints of an answer. It does not depend on the tokens that were proposed.
#[test]
fn a_turn_resumes_at_the_end_of_the_answer_before() {
    for guess in [Guess::Nothing, Guess::Right, Guess::Mixed, Guess::Wrong] {
        let speculation = guess.speculation();
        let config =
            EngineConfig { max_batched_tokens: 64, speculation, ..EngineConfig::default() };
        let mut harness = Harness::with_states(4, 400, Some(3), config);
        run(&mut harness, group_prompt(1, 50), 40);
        for more in 1..8 {
            let prompt = next_turn(&harness, more);
            let before = prompt.len() - 9 - 1;
            let cached = run(&mut harness, prompt, 40);
            assert_eq!(cached, before / 16 * 16, "{guess:?}: the last checkpoint of the answer");
        }
        let again = harness.context.gauges.recomputed_tokens.get();
        assert!(again < 7 * 16, "{again} tokens whose KV was cached were computed again");
        let drafted = harness.context.stats().drafted_tokens;
        assert_eq!(drafted > 100, guess != Guess::Nothing, "{guess:?}: {drafted} drafted");
    }
}

/// Goal: the second prompt that diverges from another one computes the shared part again once, and
/// takes a checkpoint where they diverge; the third resumes there. KV is never stored twice.
#[test]
fn the_third_prompt_resumes_where_prompts_part() {
    let mut harness = harness(64);
    let of = |own: u32| [group_prompt(1, 80), vec![own; 17]].concat();
    assert_eq!(run(&mut harness, of(1), 1), 0);
    let before = harness.context.stats().checkpoints;
    assert_eq!(run(&mut harness, of(2), 1), 0, "there is no checkpoint at 80");
    assert_eq!(harness.context.stats().recomputed_tokens, 80);
    assert_eq!(harness.context.stats().checkpoints - before, 2);
    for own in 3..6 {
        assert_eq!(run(&mut harness, of(own), 1), 80);
    }
    let audit = ready(harness.scheduler.audit()).expect("a consistent accounting");
    // 20 shared blocks and 4 more of each prompt; checkpoints at 80 and before each prompt's end.
    assert_eq!(audit.blocks_committed, 20 + 5 * 4 + 3 * (1 + 5));
}

/// Goal: the second conversation with the same instructions resumes after them, although no other
/// one has parted there, and takes no second checkpoint a few positions later.
#[test]
fn the_second_conversation_resumes_after_the_first_message() {
    let mut harness = harness(64);
    let end = 15;
    let of = |own: u32| {
        let instructions = (0..149).map(|n| n * n / 7 % 15);
        [instructions.collect(), vec![end, 1, 2, 3], vec![own; 17]].concat()
    };
    for (own, cached) in [(4, 0), (5, 148), (6, 148)] {
        harness.submit_request(of(own), 1, |request| request.eos_ids = [end].into_iter().collect());
        run_all(&mut harness);
        assert_eq!(harness.callers.last().and_then(|caller| caller.cached), Some(cached));
    }
    // After the instructions, and before the end of each prompt.
    assert_eq!(harness.context.stats().checkpoints, 1 + 3);
}

/// Goal: prompts that come together are computed once up to where they part.
#[test]
fn followers_resume_where_they_part_from_their_leader() {
    let mut harness = harness(16);
    let of = |own: u32| [group_prompt(1, 80), vec![own; 10]].concat();
    for own in 1..6 {
        harness.submit(of(own), 1, None);
    }
    harness.submit(of(1), 1, None);
    harness.finish();
    let cached: Vec<_> = harness.callers.iter().map(|caller| caller.cached).collect();
    assert_eq!(cached, [0, 80, 80, 80, 80, 88].map(Some));
    let computed = harness.context.gauges.computed_tokens.get();
    assert_eq!(computed, 90 + 4 * 10, "the last one has cached logits");
}

/// Goal: a request that shares a part of a long prompt resumes at a regular checkpoint of it, if
/// nothing is closer.
#[test]
fn long_prompts_have_checkpoints_in_between() {
    let config = EngineConfig { max_batched_tokens: 100, ..EngineConfig::default() };
    let mut harness = Harness::with_states(4, 4000, Some(3), config);
    run(&mut harness, (0..2100).map(|n| n * n / 7 % 16).collect(), 1);
    let shared: Vec<u32> = (0..1500).map(|n| n * n / 7 % 16).collect();
    assert_eq!(run(&mut harness, shared, 1), 1024);
}

/// Opens a session.
fn open_session(harness: &Harness) -> SessionId {
    let id = SessionId::new("conversation");
    let new = NewSession { id: id.clone(), namespace: Namespace::default(), ttl: None };
    harness.context.sessions.open(new, harness.now).expect("there is room");
    id
}

/// Runs a turn of a session, and returns how many of its tokens it did not compute.
fn run_turn(harness: &mut Harness, id: &SessionId, prompt: &[u32], max_tokens: usize) -> usize {
    let turn = harness.context.sessions.begin_turn(id, &Namespace::default(), harness.now);
    let turn = turn.expect("it is idle");
    harness.submit_request(prompt.to_vec(), max_tokens, |request| request.turn = Some(turn));
    run_all(harness);
    let caller = harness.callers.last().expect("a turn");
    assert_eq!(caller.end, Some(Ok(())));
    caller.cached.expect("it has run")
}

/// Goal: a session keeps the checkpoint at the end of its last answer, so that its next turn resumes
/// there although everything else was evicted; also if a turn adds too little for a checkpoint of
/// its own, and if its answer comes from cached logits.
#[test]
fn a_session_keeps_its_checkpoint() {
    let mut harness = Harness::with_states(16, 25, Some(1), EngineConfig::default());
    let id = open_session(&harness);
    let mut prompt = group_prompt(1, 50);
    let turns = [(20, 0, 5), (1, 64, 0), (1, 64, 0), (30, 64, 5), (1, 96, 5)];
    for (max_tokens, expected, more) in turns {
        let cached = run_turn(&mut harness, &id, &prompt, max_tokens);
        assert_eq!(cached, expected, "{} tokens", prompt.len());
        if more > 0 {
            prompt.extend(&harness.callers.last().expect("a turn").tokens);
        }
        prompt.extend(vec![7; more]);
        // Fills the pool, so that everything else is evicted.
        for group in 2..6 {
            harness.submit(group_prompt(group, 180), 1, None);
            run_all(&mut harness);
        }
    }
}

/// Goal: a request that is all the engine has room for runs although the checkpoint that it could
/// resume from has no room next to it: it computes the positions before it. It waits for no lock
/// that was taken for another request, and not for a session.
#[test]
fn a_request_that_fills_the_pool_runs_without_its_checkpoint() {
    let mut harness = Harness::with_states(4, 100, Some(20), EngineConfig::default());
    assert_eq!(run(&mut harness, group_prompt(1, 200), 1), 0);
    assert_eq!(run(&mut harness, group_prompt(1, 240), 1), 196);
    let id = open_session(&harness);
    for (len, cached) in [(320, 236), (360, 0), (400, 0)] {
        assert_eq!(run_turn(&mut harness, &id, &group_prompt(1, len), 1), cached);
        assert_eq!(harness.callers.last().map(|caller| caller.tokens.len()), Some(1));
    }
    harness.finish();
}

/// Goal: the checkpoint that a session will keep in the end takes no blocks from its turn while the
/// turn runs, and so preempts no request.
#[test]
fn a_turn_does_not_hold_its_own_checkpoint() {
    let mut harness = Harness::with_states(4, 200, Some(103), EngineConfig::default());
    let id = open_session(&harness);
    assert_eq!(run_turn(&mut harness, &id, &group_prompt(1, 200), 400), 0);
    assert_eq!(harness.context.gauges.preemptions_for_blocks.get(), 0);
    harness.finish();
}

/// Goal: without blocks for checkpoints, requests run as they would without a cache of states.
#[test]
fn requests_run_without_blocks_for_checkpoints() {
    let config = EngineConfig { max_batched_tokens: 64, ..EngineConfig::default() };
    let mut harness = Harness::with_states(4, 16, Some(14), config);
    for _ in 0..2 {
        assert_eq!(run(&mut harness, group_prompt(1, 40), 20), 0);
    }
    assert_eq!(harness.context.stats().checkpoints, 0);
}

/// Goal: no more requests run than the backend has slots for states.
#[test]
fn each_running_request_has_a_slot() {
    let options = FakeOptions { state: Some((1, 2)), ..FakeOptions::default() };
    let spec = FakeBackend::new(options).spec().clone();
    let context = EngineContext::new(EngineConfig::default(), spec).expect("valid settings");
    assert_eq!(context.config.max_running, 2);
    assert_eq!(context.eviction_policy(), Some(EvictionPolicy::CostAware));
}

/// Goal: a preempted request resumes from its last checkpoint.
#[test]
fn a_preempted_request_resumes_from_its_last_checkpoint() {
    let config = EngineConfig { max_batched_tokens: 64, max_running: 2, ..EngineConfig::default() };
    let mut harness = Harness::with_states(4, 400, Some(3), config);
    let tenant = |name: &'static str| {
        move |request: &mut SequenceRequest| {
            request.options.tenant = Some(name.into());
        }
    };
    harness.submit_request(group_prompt(1, 60), 60, tenant("a"));
    harness.submit_request(group_prompt(2, 60), 60, tenant("a"));
    for _ in 0..40 {
        harness.step(false);
        harness.read(true);
    }
    let computed = harness.context.gauges.computed_tokens.get();
    harness.submit_request(group_prompt(3, 60), 1, tenant("b"));
    harness.finish();
    assert_eq!(harness.context.gauges.preemptions_for_share.get(), 1);
    let again = harness.context.gauges.computed_tokens.get() - computed - 60;
    assert!(again < 2 * 60 - 2 * 39 + 20, "{again} tokens were computed afterwards");
}
