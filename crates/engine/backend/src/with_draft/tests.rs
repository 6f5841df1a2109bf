use super::*;
use crate::fake::{FakeBackend, FakeOptions, expected_next};

const VOCAB_SIZE: usize = 32;
const BLOCK_SIZE: usize = 4;

fn options() -> FakeOptions {
    FakeOptions {
        vocab_size: VOCAB_SIZE,
        block_size: BLOCK_SIZE,
        block_count: 16,
        max_positions: 48,
        ..FakeOptions::default()
    }
}

/// Two fake models with the same weights. The draft model refuses to read what was not written.
fn pair() -> WithDraft {
    let [model, draft] = [(), ()].map(|()| Box::new(FakeBackend::new(options())));
    WithDraft::new(model, draft).expect("equal stores")
}

fn task(tokens: &[u32], blocks: Range<u32>, count: usize) -> DraftTask {
    let tokens = Arc::new(tokens.to_vec());
    let block_table = blocks.map(BlockId).collect();
    DraftTask { tokens, block_table, count, missing_max: usize::MAX }
}

/// The greedy guesses of some tasks, and the number of tokens of the first pass.
fn draft(backend: &mut WithDraft, tasks: &[DraftTask], budget: usize) -> (Vec<Vec<u32>>, usize) {
    let mut greedy = |_, row: &mut [f32]| {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]))?;
        Some(best as u32)
    };
    let output = backend.draft(tasks, budget, &mut greedy).expect("a valid draft");
    (output.tokens, output.first_tokens)
}

/// The tokens that follow, greedily.
fn follow(tokens: &[u32], count: usize) -> Vec<u32> {
    let mut all = tokens.to_vec();
    (0..count).for_each(|_| all.push(expected_next(&all, VOCAB_SIZE)));
    all.split_off(tokens.len())
}

/// Goal: the guesses are the tokens of the draft model, whose keys and values are computed once,
/// also after some of the guesses were rejected.
#[test]
fn only_what_is_missing_is_computed() {
    let mut backend = pair();
    let mut tokens: Vec<u32> = (0..9).collect();
    let (guesses, computed) = draft(&mut backend, &[task(&tokens, 0..4, 3)], 100);
    assert_eq!((&guesses[0], computed), (&follow(&tokens, 3), 9));
    // All were right, and another token followed: the last guess was not computed.
    tokens.extend(&guesses[0]);
    tokens.push(7);
    let (guesses, computed) = draft(&mut backend, &[task(&tokens, 0..6, 5)], 100);
    assert_eq!((&guesses[0], computed), (&follow(&tokens, 5), 2));
    // The second one was wrong, and the third and fourth follow nevertheless.
    let wrong = (guesses[0][1] + 1) % VOCAB_SIZE as u32;
    tokens.extend([guesses[0][0], wrong, guesses[0][2], guesses[0][3]]);
    let (guesses, computed) = draft(&mut backend, &[task(&tokens, 0..6, 4)], 100);
    assert_eq!((&guesses[0], computed), (&follow(&tokens, 4), 3));
    // Without anything new, the last token is computed again.
    let (again, computed) = draft(&mut backend, &[task(&tokens, 0..6, 4)], 100);
    assert_eq!((&again, computed), (&guesses, 1));
}

/// Goal: positions after a rejected guess are computed again, also where the token that was guessed
/// there comes after another one.
#[test]
fn what_follows_a_rejected_guess_is_not_used() {
    let mut backend = pair();
    let mut tokens: Vec<u32> = (0..9).collect();
    let (guesses, _) = draft(&mut backend, &[task(&tokens, 0..6, 6)], 100);
    tokens.push((guesses[0][0] + 1) % VOCAB_SIZE as u32);
    draft(&mut backend, &[task(&tokens, 0..6, 1)], 100);
    tokens.extend(&guesses[0][1..4]);
    let (guesses, computed) = draft(&mut backend, &[task(&tokens, 0..6, 4)], 100);
    assert_eq!((&guesses[0], computed), (&follow(&tokens, 4), 3));
}

/// Goal: a long prompt is computed in parts, or not at all if too many tokens are missing, and then
/// nothing is guessed.
#[test]
fn a_budget_divides_the_work() {
    let mut backend = pair();
    let tokens: Vec<u32> = (0..20).collect();
    let few = DraftTask { missing_max: 19, ..task(&tokens, 0..6, 2) };
    assert_eq!(draft(&mut backend, &[few], 100), (vec![vec![]], 0));
    for expected in [8, 8] {
        assert_eq!(draft(&mut backend, &[task(&tokens, 0..6, 2)], 8), (vec![vec![]], expected));
    }
    let few = DraftTask { missing_max: 4, ..task(&tokens, 0..6, 2) };
    assert_eq!(draft(&mut backend, &[few], 8), (vec![follow(&tokens, 2)], 4));
}

/// Goal: sequences that share a prefix compute it once, and a block that was given to another
/// sequence has nothing of the one before.
#[test]
fn blocks_are_shared_and_reused() {
    let mut backend = pair();
    let prefix: Vec<u32> = (0..8).collect();
    let [a, b] = [[&prefix[..], &[9]].concat(), [&prefix[..], &[10, 11]].concat()];
    let tasks = [
        task(&a, 0..4, 3),
        DraftTask { block_table: [0, 1, 5, 6].map(BlockId).into(), ..task(&b, 0..0, 3) },
    ];
    let (guesses, computed) = draft(&mut backend, &tasks, 100);
    assert_eq!((guesses, computed), (vec![follow(&a, 3), vec![]], 9));
    let (guesses, computed) = draft(&mut backend, &tasks, 100);
    assert_eq!((guesses, computed), (vec![follow(&a, 3), follow(&b, 3)], 3));
    backend.discard_blocks(&[BlockId(1)]);
    let (guesses, computed) = draft(&mut backend, &tasks[..1], 100);
    assert_eq!((guesses, computed), (vec![follow(&a, 3)], 5));
}

/// Goal: a block that is copied out and in has the part of the draft model if that was complete, and
/// nothing of another prefix if it was not.
#[test]
fn copies_have_both_parts() {
    let mut backend = pair();
    let tokens: Vec<u32> = (0..10).collect();
    let step = |backend: &mut WithDraft| {
        let sequences = vec![SequenceSlice {
            token_count: 10,
            block_table: (0..3).map(BlockId).collect(),
            ..SequenceSlice::default()
        }];
        backend.step(&StepBatch { tokens: tokens.clone(), sequences }).expect("a valid step");
    };
    step(&mut backend);
    draft(&mut backend, &[task(&tokens, 0..4, 1)], 7);
    let size = backend.spec().block_bytes;
    let mut bytes = vec![1; 2 * size];
    backend.read_blocks(&[BlockId(0), BlockId(1)], &mut bytes).expect("two blocks");
    let mut other = pair();
    let blocks: Vec<&[u8]> = bytes.chunks(size).collect();
    other.write_blocks(&[BlockId(7), BlockId(8)], &blocks).expect("two blocks");
    let loaded = DraftTask { block_table: [7, 8, 9].map(BlockId).into(), ..task(&tokens, 0..0, 2) };
    assert_eq!(draft(&mut other, &[loaded], 100), (vec![follow(&tokens, 2)], 6));
    let incomplete = &blocks[1][backend.model_bytes()..backend.both_bytes()];
    assert!(incomplete.iter().all(|byte| *byte == 0), "the second block is not complete");
    // The part of the model is that of the model alone.
    let mut alone = FakeBackend::new(options());
    let table = (0..3).map(BlockId).collect();
    let slice = SequenceSlice { token_count: 10, block_table: table, ..SequenceSlice::default() };
    alone.step(&StepBatch { tokens, sequences: vec![slice] }).expect("a valid step");
    let mut own = vec![0; alone.spec().block_bytes];
    alone.read_blocks(&[BlockId(0)], &mut own).expect("a block");
    assert_eq!(blocks[0][..own.len()], own);
    let fingerprint =
        |of: &dyn Backend| of.kv_format().expect("a format").fingerprint().expect("a hash");
    assert_ne!(fingerprint(&backend), fingerprint(&alone));
}

/// Goal: tokens and positions that the draft model does not have end the guesses.
#[test]
fn the_sizes_of_the_draft_model_are_limits() {
    let model = Box::new(FakeBackend::new(FakeOptions { vocab_size: 40, ..options() }));
    let narrow = FakeBackend::new(FakeOptions { max_positions: 12, ..options() });
    let mut backend = WithDraft::new(model, Box::new(narrow)).expect("equal stores");
    let tokens: Vec<u32> = (0..10).collect();
    let (guesses, _) = draft(&mut backend, &[task(&tokens, 0..6, 8)], 100);
    assert_eq!(guesses[0], follow(&tokens, 3));
    let long: Vec<u32> = (0..13).collect();
    assert_eq!(draft(&mut backend, &[task(&long, 0..6, 8)], 100), (vec![vec![]], 0));
    assert_eq!(draft(&mut backend, &[task(&[1, 35], 7..9, 8)], 100), (vec![vec![]], 0));
}

/// Goal: models that do not fit together and malformed tasks are refused.
#[test]
fn pairs_that_do_not_fit_are_refused() {
    let fake = |options| Box::new(FakeBackend::new(options));
    let refused = |draft: FakeOptions| {
        WithDraft::new(fake(options()), fake(draft)).expect_err("it does not fit")
    };
    let state = refused(FakeOptions { state: Some((1, 2)), ..options() });
    assert!(matches!(state, DraftError::State { .. }), "{state}");
    let blocks = refused(FakeOptions { block_count: 9, ..options() });
    assert_eq!(blocks, DraftError::Blocks { expected: (16, 4), got: (9, 4) });
    assert!(blocks.to_string().contains("16 KV blocks of 4 positions, got 9 of 4"), "{blocks}");
    let mut backend = pair();
    for wrong in [task(&[], 0..2, 1), task(&[1; 9], 0..2, 1), task(&[1; 9], 14..17, 1)] {
        let error = backend.draft(&[wrong], 10, &mut |_, _| None).expect_err("malformed");
        assert!(matches!(error, BackendError::MalformedBatch(_)), "{error}");
    }
}

/// Goal: the checkpoint of a state takes as many blocks as it does without a draft model.
#[test]
fn checkpoints_take_as_many_blocks() {
    let with_state = FakeOptions { state: Some((3, 2)), ..options() };
    let model = Box::new(FakeBackend::new(with_state));
    let pair = WithDraft::new(model, Box::new(FakeBackend::new(options()))).expect("it fits");
    assert_eq!(pair.spec().checkpoint_blocks(), 3);
}
