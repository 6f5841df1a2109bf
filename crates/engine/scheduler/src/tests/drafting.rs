//! Draft models: their keys and values belong to the sequence that they guess for, also after its
//! blocks were released, evicted or loaded.

use stolon_backend::{BackendError, DraftTask, StepBatch, StepOutput, WithDraft};
use stolon_kvcache::BlockId;

use super::speculation::config;
use super::*;
use crate::step_plan::{DraftPlan, DraftSlice};

/// A draft model. It panics if it reads a position that it has not written for the same prefix.
struct Draft {
    fake: FakeBackend,
    /// A row of logits is shifted, so that another token is guessed, if its hash is below this number
    /// of 8.
    wrong: u32,
}

impl Backend for Draft {
    fn spec(&self) -> &BackendSpec {
        self.fake.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let mut output = self.fake.step(batch).expect("the draft model reads what it has written");
        for row in output.logits.chunks_mut(VOCAB_SIZE) {
            if (row[0].to_bits() >> 9) % 8 < self.wrong {
                row.rotate_left(1);
            }
        }
        Ok(output)
    }

    fn discard_blocks(&mut self, blocks: &[BlockId]) {
        self.fake.discard_blocks(blocks);
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        self.fake.read_blocks(blocks, to)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        self.fake.write_blocks(blocks, from)
    }
}

impl Guess {
    /// The model with the draft model of this kind of guesses, if it has one.
    pub(super) fn with_draft_model(
        self,
        model: FakeBackend,
        options: FakeOptions,
    ) -> Box<dyn Backend> {
        let wrong = match self {
            Guess::Model => 0,
            Guess::MixedModel => 3,
            Guess::WrongModel => 8,
            _ => return Box::new(model),
        };
        let options = FakeOptions { state: None, draws: false, encode_calls: 0, ..options };
        let draft = Draft { fake: FakeBackend::new(options), wrong };
        Box::new(WithDraft::new(Box::new(model), Box::new(draft)).expect("equal stores"))
    }
}

/// The bytes of saved blocks without the parts of a draft model.
pub(super) fn model_part(bytes: &[u8], spec: &BackendSpec) -> Vec<u8> {
    let own =
        FakeBackend::new(FakeOptions { block_size: spec.block_size, ..FakeOptions::default() });
    let own = own.spec().block_bytes;
    bytes.chunks(spec.block_bytes).flat_map(|block| &block[..own]).copied().collect()
}

/// Runs two requests for a prompt and returns what the statistics have counted since.
fn ask(harness: &mut Harness, prompt: &[u32]) -> (u64, u64, u64) {
    let before = harness.context.stats();
    harness.submit(prompt.to_vec(), 40, None);
    harness.finish();
    let after = harness.context.stats();
    (
        after.model_computed_tokens - before.model_computed_tokens,
        after.model_drafted_tokens - before.model_drafted_tokens,
        after.model_accepted_tokens - before.model_accepted_tokens,
    )
}

/// Goal: a draft model that is the model itself is always right, so its keys and values are those of
/// the sequence, and it computes a prefix once: with a cold and a warm cache, in blocks that were
/// evicted, and in blocks that were copied out and in.
#[test]
fn the_model_itself_is_always_right() {
    for block_size in [4, 16] {
        let start = || {
            let config = config(Guess::Model);
            Harness::guessing(block_size, 400 / block_size, None, Guess::Model, config)
        };
        let mut harness = start();
        let (first, other) = (prompt(1, 100), prompt(2, 200));
        let (computed, drafted, accepted) = ask(&mut harness, &first);
        assert!(drafted > 20 && drafted == accepted, "{accepted} of {drafted}");
        assert!((100..112).contains(&computed), "{computed} tokens of the prompt and the answer");
        // The prompt is cached, for the draft model, too.
        let (computed, drafted, accepted) = ask(&mut harness, &first);
        assert!(drafted > 20 && drafted == accepted, "{accepted} of {drafted}");
        assert!(computed <= 12 + block_size as u64, "{computed} tokens");
        // Others take its blocks.
        for seed in 3..7 {
            let (_, drafted, accepted) = ask(&mut harness, &prompt(seed, 200));
            assert!(drafted > 20 && drafted == accepted, "{accepted} of {drafted}");
        }
        let (computed, drafted, accepted) = ask(&mut harness, &first);
        assert!(drafted == accepted && computed >= 100, "{accepted} of {drafted}, {computed}");
        // What is copied out of the cache has the part of the draft model.
        let (_, drafted, accepted) = ask(&mut harness, &other);
        assert_eq!(drafted, accepted);
        harness.save(other.clone(), 0);
        harness.finish();
        let bytes = harness.saves.lock().expect("no panic").pop().expect("a save").2;
        let blocks = bytes.chunks(harness.context.spec.block_bytes);
        let blocks = blocks.map(|block| block.to_vec().into()).collect();
        let mut harness = start();
        harness.submit_stored(other.clone(), 40, StoredKv::new(block_size, 0, blocks));
        harness.finish();
        let stats = harness.context.stats();
        assert_eq!(stats.loaded_tokens, 200 / block_size as u64 * block_size as u64);
        assert!(stats.model_drafted_tokens > 30, "{}", stats.model_drafted_tokens);
        assert_eq!(stats.model_drafted_tokens, stats.model_accepted_tokens);
        assert!(stats.model_computed_tokens <= 12 + block_size as u64);
    }
}

/// Goal: a right draft model saves steps as other sources do, for several sequences at the same time
/// and at any temperature.
#[test]
fn right_guesses_save_steps_at_any_temperature() {
    let run = |guess| {
        let mut harness = Harness::guessing(16, 64, None, guess, config(guess));
        for seed in 0..3 {
            harness.submit_request(prompt(seed, 20), 40, |request| {
                request.options.sampling.temperature = [0.0, 0.7, 1.5][seed as usize];
                request.options.sampling.repetition_penalty = 1.2;
                request.options.sampling.seed = Some(seed.into());
            });
        }
        for _ in 0..1000 {
            harness.step(false);
            harness.read(true);
        }
        let tokens: Vec<_> = harness.callers.iter().map(|caller| caller.tokens.clone()).collect();
        assert!(harness.callers.iter().all(|caller| caller.end == Some(Ok(()))));
        (tokens, harness.context.stats())
    };
    let (expected, plain) = run(Guess::Nothing);
    let (tokens, right) = run(Guess::Model);
    assert_eq!(tokens, expected);
    assert!(right.steps * 2 < plain.steps, "{} of {} steps", right.steps, plain.steps);
    assert_eq!(right.model_accepted_tokens, right.model_drafted_tokens);
    assert_eq!(right.accepted_tokens, right.model_accepted_tokens);
    assert_eq!(
        (right.drafts, right.drafted_tokens),
        (right.model_drafts, right.model_drafted_tokens)
    );
    assert_eq!(run(Guess::MixedModel).0, expected);
    let (tokens, wrong) = run(Guess::WrongModel);
    assert_eq!(tokens, expected);
    assert!(wrong.model_drafted_tokens > 100 && wrong.model_accepted_tokens < 20);
}

/// Goal: a draft model that fails delays nothing and changes nothing.
#[test]
fn a_draft_model_that_fails_is_not_needed() {
    struct Failing(BackendSpec);
    impl Backend for Failing {
        fn spec(&self) -> &BackendSpec {
            &self.0
        }
        fn step(&mut self, _: &StepBatch) -> Result<StepOutput, BackendError> {
            Err(BackendError::Failed("no memory".to_owned()))
        }
    }
    let mut harness = Harness::new(16, 64, config(Guess::Model));
    let model = Box::new(FakeBackend::new(FakeOptions {
        vocab_size: VOCAB_SIZE,
        block_count: 64,
        draws: true,
        ..FakeOptions::default()
    }));
    let failing = Failing(BackendSpec { draws: false, ..model.spec().clone() });
    let pair = WithDraft::new(model, Box::new(failing)).expect("equal stores");
    let task = DraftTask {
        tokens: Arc::new(vec![1, 2]),
        block_table: vec![BlockId(0)],
        count: 3,
        missing_max: 100,
    };
    harness.backend = Box::new(pair);
    let failed = harness.backend.draft(&[task], 100, &mut |_, _| None);
    assert!(matches!(failed, Err(BackendError::Failed(_))), "{failed:?}");
    harness.submit(prompt(1, 20), 30, None);
    // The scheduler plans as if there were none, so the tasks are added here.
    while let Some(plan) = &mut harness.in_flight {
        if plan.batch.tokens.len() == 1 {
            plan.draft = DraftPlan { slices: vec![drafted_slice(plan)], budget: 100 };
        }
        harness.step(false);
        harness.read(true);
    }
    harness.finish();
}

/// A slice for a draft model, in a step with one sequence.
fn drafted_slice(plan: &StepPlan) -> DraftSlice {
    let slice = &plan.batch.sequences[0];
    DraftSlice {
        index: 0,
        task: DraftTask {
            tokens: Arc::new(vec![1; slice.start + 1]),
            block_table: slice.block_table.clone(),
            count: 1,
            missing_max: 100,
        },
        ends: Default::default(),
    }
}
