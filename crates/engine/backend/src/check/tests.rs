use stolon_kvcache::BlockId;

use super::*;
use crate::{Draw, LogitRows, SliceImage};

fn spec() -> BackendSpec {
    BackendSpec {
        vocab_size: 100,
        max_positions: 16,
        block_size: 4,
        block_count: 8,
        ..BackendSpec::default()
    }
}

/// A slice that writes all of its positions.
fn slice(start: usize, token_count: usize, table: &[u32]) -> SequenceSlice {
    SequenceSlice {
        token_count,
        start,
        write_from: start,
        block_table: table.iter().map(|&id| BlockId(id)).collect(),
        logit_rows: LogitRows::Last,
        ..SequenceSlice::default()
    }
}

fn batch(sequences: Vec<SequenceSlice>) -> StepBatch {
    let count = sequences.iter().map(|s| s.token_count).sum();
    StepBatch { tokens: vec![1; count], sequences }
}

/// Expects an error whose message contains `part`, and that a valid batch passes afterward.
fn expect_refused(bad: &StepBatch, part: &str) {
    let mut checker = BatchChecker::new(8);
    let message = match checker.check(bad, &spec()) {
        Err(BackendError::MalformedBatch(message)) => message,
        other => panic!("expected an error with {part:?}, got {other:?}"),
    };
    assert!(message.contains(part), "expected {part:?} in {message:?}");
    let good = batch(vec![slice(0, 16, &[0, 1, 2, 3]), slice(0, 16, &[4, 5, 6, 7])]);
    checker.check(&good, &spec()).expect("a failed check must clear its marks");
}

/// Goal: valid batches pass, also with blocks that several slices read, and the number of logit
/// rows is returned.
#[test]
fn valid_batches_pass_and_their_rows_are_counted() {
    let mut checker = BatchChecker::new(8);
    let mut all = slice(4, 3, &[0, 2]);
    all.logit_rows = LogitRows::All;
    let mut none = slice(4, 4, &[0, 3, 7]);
    none.logit_rows = LogitRows::None;
    let mut full_hit = slice(3, 1, &[0]);
    full_hit.write_from = 4;
    let good = batch(vec![all, none, full_hit, slice(5, 1, &[0, 4])]);
    assert_eq!(checker.check(&good, &spec()).expect("a good batch"), 3 + 1 + 1);
    assert_eq!(checker.check(&StepBatch::default(), &spec()).expect("an empty batch"), 0);
}

/// Goal: tokens may be requested of a backend that draws them, and hidden states of one that has
/// them.
#[test]
fn rows_that_the_backend_does_not_return_are_refused() {
    let with = |rows| batch(vec![SequenceSlice { logit_rows: rows, ..slice(0, 3, &[0]) }]);
    let mut checker = BatchChecker::new(8);
    let drawn = with(LogitRows::Drawn(Draw::GREEDY));
    let draws = BackendSpec { draws: true, ..spec() };
    assert_eq!(checker.check(&drawn, &draws).expect("good"), 0);
    expect_refused(&drawn, "expected whole rows, got Drawn");
    expect_refused(&with(LogitRows::AllHidden), "expected rows of logits, got AllHidden");
}

/// Goal: each rule of the contract for a single slice is checked.
#[test]
fn malformed_slices_are_refused() {
    expect_refused(&batch(vec![slice(0, 0, &[0])]), "expected 1 to 0 tokens");
    let mut long = batch(vec![slice(0, 2, &[0])]);
    long.tokens.push(1);
    expect_refused(&long, "expected the slices to cover all 3 tokens, got slices of 2 tokens");
    let mut short = batch(vec![slice(0, 2, &[0])]);
    short.tokens.pop();
    expect_refused(&short, "expected 1 to 1 tokens (the rest of the batch), got 2");
    let mut foreign = batch(vec![slice(0, 2, &[0])]);
    foreign.tokens[1] = 100;
    expect_refused(&foreign, "expected token ids below 100, got 100");
    expect_refused(
        &batch(vec![slice(14, 3, &[0, 1, 2, 3, 4])]),
        "expected at most 16 positions, got 17",
    );
    expect_refused(&batch(vec![slice(usize::MAX, 1, &[0])]), "expected at most 16 positions");
    expect_refused(
        &batch(vec![slice(4, 1, &[0])]),
        "expected at least 2 blocks for 5 positions, got 1",
    );
    expect_refused(&batch(vec![slice(0, 1, &[8])]), "expected block ids below 8, got 8");
    let mut early = batch(vec![slice(2, 1, &[0])]);
    early.sequences[0].write_from = 1;
    expect_refused(&early, "expected write_from in 2..=3, got 1");
    early.sequences[0].write_from = 4;
    expect_refused(&early, "expected write_from in 2..=3, got 4");
}

/// Goal: a block that is written occurs nowhere else in the batch, neither in another slice's
/// block table nor twice in its own.
#[test]
fn written_blocks_must_be_exclusive() {
    expect_refused(
        &batch(vec![slice(0, 1, &[3]), slice(0, 1, &[3])]),
        "block 3 is also written by slice 0",
    );
    expect_refused(
        &batch(vec![slice(0, 1, &[3]), slice(4, 1, &[3, 4])]),
        "block_table[0] is block 3, which slice 0 writes",
    );
    expect_refused(
        &batch(vec![slice(4, 1, &[3, 3])]),
        "block_table[0] is block 3, which slice 0 writes",
    );
    expect_refused(&batch(vec![slice(0, 8, &[3, 3])]), "block 3 is also written by slice 0");
    expect_refused(
        &batch(vec![slice(0, 1, &[3, 5]), slice(0, 4, &[5])]),
        "block_table[1] is block 5, which slice 1 writes",
    );
}

/// Goal: images have to be where they are said to be, with as many rows as positions, and only
/// their positions may have tokens that are not in the vocabulary.
#[test]
fn images_are_checked() {
    let spec = BackendSpec { image_width: Some(2), ..spec() };
    let image = |start, len, full_attention| SliceImage {
        start,
        len,
        full_attention,
        columns: 0,
        embeddings: crate::ImageEmbeddings { values: vec![0.0; 2 * len.min(16)].into() },
    };
    let tokens = vec![1, 1, u32::MAX, u32::MAX, 1, 1];
    let with = |images: Vec<SliceImage>| {
        let slice = SequenceSlice { images, ..slice(4, 6, &[0, 1, 2]) };
        let batch = StepBatch { tokens: tokens.clone(), sequences: vec![slice] };
        BatchChecker::new(8).check(&batch, &spec)
    };
    let mut wide = image(6, 2, false);
    wide.embeddings.values = vec![0.0; 5].into();
    for good in [
        vec![image(6, 2, true)],
        vec![image(2, 4, false), image(6, 2, true), image(8, 9, false)],
        vec![image(4, 1, false), image(6, 1, false), image(7, 1, true)],
    ] {
        with(good).expect("well-formed images");
    }
    for (bad, part) in [
        (vec![], "token ids below 100"),
        (vec![image(6, 1, true)], "token ids below 100"),
        (vec![image(3, 5, true)], "all of an image within 4..10, got 3..8"),
        (vec![image(6, 5, true)], "all of an image within 4..10, got 6..11"),
        (vec![image(1, 3, false)], "some of an image within 4..10, got 1..4"),
        (vec![image(10, 1, false)], "some of an image within 4..10, got 10..11"),
        (vec![image(6, 2, true), image(7, 1, false)], "within 8..10, got 7..8"),
        (vec![image(6, usize::MAX, false)], "positions, got 32"),
        (vec![wide], "expected 4 values for an image of 2 positions, got 5"),
    ] {
        let error = with(bad).expect_err(part).to_string();
        assert!(error.contains(part), "expected {part:?} in {error:?}");
    }
    let grid = |columns| vec![SliceImage { columns, ..image(6, 2, false) }];
    with(grid(2)).expect("one row");
    let error = with(grid(3)).expect_err("no row of 3").to_string();
    assert!(error.contains("an image in rows of 3, got 2 positions"), "{error}");
    let behind = |rotary_lag| {
        let images = vec![image(3, 3, false), image(6, 2, false)];
        let slice = SequenceSlice { images, rotary_lag, ..slice(4, 6, &[0, 1, 2]) };
        let batch = StepBatch { tokens: tokens.clone(), sequences: vec![slice] };
        BatchChecker::new(8).check(&batch, &spec)
    };
    behind(3).expect("all positions before were skipped");
    let error = behind(4).expect_err("more than there are").to_string();
    assert!(error.contains("a lag of at most 3, got 4"), "{error}");
    let spec = BackendSpec { image_width: None, ..spec };
    let slice = SequenceSlice { images: vec![image(6, 2, true)], ..slice(4, 6, &[0, 1, 2]) };
    let batch = StepBatch { tokens, sequences: vec![slice] };
    let error = BatchChecker::new(8).check(&batch, &spec).expect_err("no images");
    assert!(error.to_string().contains("not supported"), "{error}");
}

/// Goal: an adapter is accepted only by backends that support adapters.
#[test]
fn adapters_must_be_supported() {
    let adapter = Some(crate::Adapter::new([1; 32], 0, 1, ()));
    let adapted = batch(vec![slice(0, 3, &[0]), SequenceSlice { adapter, ..slice(0, 3, &[1]) }]);
    expect_refused(&adapted, "slice 1: this backend does not support adapters");
    BatchChecker::new(8).with_adapters().check(&adapted, &spec()).expect("a good batch");
}

/// Goal: proposed tokens follow a certain one, only for backends that can reject them, and no
/// checkpoint covers them.
#[test]
fn proposed_tokens_are_checked() {
    let state = Some(StateSpec { bytes: 1, slots: 1 });
    let spec = BackendSpec { proposals: true, state, block_bytes: 1, ..spec() };
    let check = |proposed, len, spec: &BackendSpec| {
        let checkpoint = crate::StateCheckpoint { len, blocks: vec![BlockId(7)] };
        let checkpoints = vec![checkpoint];
        let state = Some(SliceState { proposed, checkpoints, ..SliceState::in_slot(0) });
        let slice = SequenceSlice { state, ..slice(2, 4, &[0, 1]) };
        BatchChecker::new(8).check(&batch(vec![slice]), spec).map_err(|error| error.to_string())
    };
    for (proposed, len) in [(0, 6), (1, 5), (3, 3)] {
        check(proposed, len, &spec).expect("a good batch");
    }
    for (proposed, len, part) in [
        (4, 3, "expected at most 3 proposed tokens, got 4"),
        (1, 6, "expected a checkpoint in 3..=5, got 6"),
    ] {
        let error = check(proposed, len, &spec).expect_err(part);
        assert!(error.contains(part), "{error}");
    }
    let error = check(1, 3, &BackendSpec { proposals: false, ..spec }).expect_err("no proposals");
    assert!(error.contains("expected at most 0 proposed tokens, got 1"), "{error}");
}
