//! Proposed tokens: whatever is guessed, the answers are those of plain decoding.

use proptest::prelude::*;
use stolon_backend::fake::expected_next;
use stolon_backend::{LogitsProcessor, SamplingError, SharedProcessor};

use super::*;
use crate::speculation::{DraftContext, DraftSource, DraftSources, Speculation};

/// How the tests guess tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Guess {
    /// Not at all.
    Nothing,
    /// With the engine's own sources, where it pays.
    Own,
    /// With the engine's own sources, always.
    OwnAlways,
    /// Wrong tokens, or end-of-sequence ids.
    Wrong,
    /// The tokens that follow.
    Right,
    /// The tokens that follow, up to a wrong one.
    Mixed,
    /// With a draft model that is the model itself, always.
    Model,
    /// With a draft model that is never right, always.
    WrongModel,
    /// With a draft model that is sometimes wrong, and the engine's own sources, where they pay.
    MixedModel,
}

pub(super) fn guess() -> impl Strategy<Value = Guess> {
    use Guess::*;
    prop::sample::select(vec![Nothing, Own, OwnAlways, Wrong, Right, Mixed, Model, MixedModel])
}

impl Guess {
    pub(super) fn speculation(self) -> Speculation {
        let always = Speculation { adaptive: false, ..Speculation::default() };
        match self {
            Guess::Nothing => Speculation::off(),
            Guess::Own | Guess::MixedModel => Speculation::default(),
            Guess::Model | Guess::WrongModel => {
                Speculation { sources: Some(DraftSources::new(Vec::new)), ..always }
            }
            Guess::OwnAlways => always,
            Guess::Wrong | Guess::Right | Guess::Mixed => {
                let make = move || -> Vec<Box<dyn DraftSource>> { vec![Box::new(Guesser(self))] };
                Speculation { sources: Some(DraftSources::new(make)), ..always }
            }
        }
    }
}

#[derive(Debug)]
struct Guesser(Guess);

impl DraftSource for Guesser {
    fn draft(&mut self, context: &DraftContext<'_>, limit: usize) -> Vec<u32> {
        let wrong = |tokens: &[u32]| (expected_next(tokens, VOCAB_SIZE) + 1) % VOCAB_SIZE as u32;
        let mut tokens = context.tokens.to_vec();
        // As many as a hash of the sequence says, so that all numbers occur.
        let seed = tokens.iter().fold(0_usize, |seed, &t| seed.wrapping_mul(31) + t as usize);
        let first_wrong = match self.0 {
            Guess::Wrong => 0,
            Guess::Right => limit,
            _ => seed % 5,
        };
        for index in 0..limit.min(1 + seed % 9) {
            let is_right = index < first_wrong;
            let next = if is_right { expected_next(&tokens, VOCAB_SIZE) } else { wrong(&tokens) };
            tokens.push(next);
        }
        tokens.split_off(context.tokens.len())
    }
}

pub(super) fn config(guess: Guess) -> EngineConfig {
    EngineConfig { speculation: guess.speculation(), ..EngineConfig::default() }
}

/// Goal: right guesses save steps, wrong ones need as many as plain decoding, and both give its
/// tokens; the statistics say how many were right.
#[test]
fn right_guesses_save_steps() {
    let run = |guess| {
        let mut harness = Harness::new(16, 64, config(guess));
        harness.submit(prompt(1, 20), 40, None);
        harness.submit(prompt(2, 31), 35, None);
        harness.finish();
        harness.context.stats()
    };
    let [plain, wrong, right] = [Guess::Nothing, Guess::Wrong, Guess::Right].map(run);
    assert_eq!((plain.drafts, plain.drafted_tokens, plain.accepted_tokens), (0, 0, 0));
    assert_eq!(wrong.steps, plain.steps);
    assert!(wrong.drafts > 40 && wrong.drafted_tokens > 100 && wrong.accepted_tokens == 0);
    assert!(right.steps * 2 < plain.steps, "{} of {} steps", right.steps, plain.steps);
    assert_eq!(right.accepted_tokens, right.drafted_tokens);
    assert_eq!(right.computed_tokens, plain.computed_tokens);
    assert_eq!(right.completion_tokens, plain.completion_tokens);
}

/// Goal: if many blocks are free, proposals do not end with a block, and the blocks that they need
/// are reserved for them; if the cache fills the pool, they do, and evict nothing.
#[test]
fn proposals_may_begin_a_block() {
    let run = |is_full, guess| {
        let mut harness = Harness::new(4, 120, config(guess));
        if is_full {
            harness.submit(prompt(2, 460), 1, None);
            harness.finish();
        }
        let before = harness.context.stats();
        harness.submit(prompt(1, 20), 100, None);
        harness.finish();
        let after = harness.context.stats();
        (after.steps - before.steps, after.evictions)
    };
    let [free, full] = [false, true].map(|is_full| run(is_full, Guess::Right));
    assert!(4 * free.0 < 3 * full.0, "{} and {} steps", free.0, full.0);
    assert_eq!(free.1, 0);
    assert_eq!(full.1, run(true, Guess::Nothing).1, "blocks that were evicted");
}

/// Goal: proposals begin although no block of the sequence has room for one, as in blocks of one
/// position.
#[test]
fn blocks_of_one_position_have_proposals() {
    for guess in [Guess::Right, Guess::Model] {
        let mut harness = Harness::guessing(1, 400, None, guess, config(guess));
        harness.submit(prompt(1, 20), 60, None);
        harness.finish();
        let stats = harness.context.stats();
        assert!(stats.accepted_tokens > 30, "{guess:?}: {} accepted", stats.accepted_tokens);
    }
}

/// Goal: proposals evict, preempt and delay nothing, and reserve no block that others may need:
/// with a pool and a step that are just large enough, everything happens as in plain decoding.
#[test]
fn proposals_take_only_what_is_left() {
    let run = |guess| {
        let config = EngineConfig { max_batched_tokens: 6, ..config(guess) };
        let mut harness = Harness::guessing(4, 25, None, guess, config);
        for seed in 0..4 {
            harness.submit(prompt(seed, 17), 12, None);
        }
        let mut reserved = Vec::new();
        while harness.step(false) {
            harness.read(true);
            let plan = harness.in_flight.as_ref();
            assert!(plan.is_none_or(|plan| plan.batch.tokens.len() <= 6));
            if let Some(plan) = plan {
                let slices = &plan.batch.sequences;
                let has_prompt = plan
                    .tasks
                    .iter()
                    .zip(slices)
                    .any(|(task, slice)| slice.token_count > 1 + task.proposals.len());
                let has_proposals = plan.tasks.iter().any(|task| !task.proposals.is_empty())
                    || !plan.draft.slices.is_empty();
                let asked = plan.draft.slices.iter().map(|slice| slice.task.count);
                assert!(plan.batch.tokens.len() + asked.sum::<usize>() <= 6);
                assert!(!has_prompt || !has_proposals, "a prompt waits for proposals");
            }
            reserved.push(ready(harness.scheduler.audit()).expect("consistent").blocks_reserved);
        }
        harness.finish();
        (harness.context.stats(), reserved)
    };
    let (plain, before) = run(Guess::Nothing);
    for guess in [Guess::Wrong, Guess::WrongModel] {
        let (wrong, after) = run(guess);
        assert!(wrong.drafts > 0 && wrong.accepted_tokens == 0);
        assert_eq!(before, after, "reserved blocks after each step");
        assert_eq!((plain.steps, plain.evictions), (wrong.steps, wrong.evictions));
        assert_eq!(plain.preemptions, wrong.preemptions);
    }
}

/// Goal: an answer ends at its first stop id, wherever the proposals lie around it.
#[test]
fn an_answer_ends_at_its_stop_id() {
    for seed in 0..8 {
        let mut tokens = prompt(seed, 20);
        (0..30).for_each(|_| tokens.push(expected_next(&tokens, VOCAB_SIZE)));
        let answer = &tokens[20..];
        for stop in 0..VOCAB_SIZE as u32 {
            let Some(end) = answer.iter().position(|&token| token == stop) else { continue };
            let mut harness = Harness::new(16, 64, config(Guess::Right));
            harness.submit_request(prompt(seed, 20), 30, |request| {
                request.options.stop_ids = [stop].into_iter().collect();
            });
            for _ in 0..100 {
                harness.step(false);
                harness.read(true);
            }
            assert_eq!(harness.callers[0].tokens, answer[..=end], "stop at {stop}");
            assert_eq!(harness.callers[0].end, Some(Ok(())));
        }
    }
}

/// A processor that forbids a token and is sometimes not ready.
struct Odd;

impl LogitsProcessor for Odd {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), SamplingError> {
        logits[output.len() % VOCAB_SIZE] = f32::NEG_INFINITY;
        Ok(())
    }

    fn is_ready(&self, output: &[u32]) -> bool {
        output.len() % 3 != 1
    }
}

/// Goal: rows of a processor that is not ready are sampled later, together with the proposals behind
/// them, and give the same tokens.
#[test]
fn late_rows_are_sampled_with_their_proposals() {
    let run = |guess| {
        let mut harness = Harness::new(16, 64, config(guess));
        for seed in 0..3 {
            harness.submit_request(prompt(seed, 20), 50, |request| {
                request.options.sampling.processor = Some(SharedProcessor::new(Odd));
            });
        }
        for _ in 0..100_000 {
            harness.step(false);
            harness.read(true);
            harness.advance();
            if harness.callers.iter().all(Caller::is_done) {
                break;
            }
            std::thread::yield_now();
        }
        let tokens = harness.callers.iter().map(|caller| caller.tokens.clone()).collect::<Vec<_>>();
        (tokens, harness.context.stats().accepted_tokens)
    };
    let (plain, _) = run(Guess::Nothing);
    assert!(plain.iter().all(|tokens| tokens.len() == 50));
    let (mixed, accepted) = run(Guess::Right);
    assert_eq!(mixed, plain);
    assert!(accepted > 20, "{accepted} were accepted");
    assert_eq!(run(Guess::Wrong).0, plain);
}

/// Goal: the engine's own sources find what another request of the namespace went on with, and
/// nothing of another namespace.
#[test]
fn a_second_attempt_is_proposed_from_the_tree() {
    let accepted = |salt: &str| {
        let mut harness = Harness::new(4, 64, config(Guess::OwnAlways));
        let mut before = 0;
        for salt in ["a", salt] {
            before = harness.context.stats().accepted_tokens;
            harness.submit_request(prompt(3, 21), 40, |request| {
                request.namespace = Namespace::builder().salt(salt.as_bytes()).build();
            });
            harness.finish();
        }
        harness.context.stats().accepted_tokens - before
    };
    let (same, other) = (accepted("a"), accepted("b"));
    assert!(same > 20 && same > 2 * other, "{same} accepted, {other} with another salt");
}
