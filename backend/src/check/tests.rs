use stolon_kvcache::BlockId;

use super::*;

fn spec() -> BackendSpec {
    BackendSpec {
        vocab_size: 100,
        max_positions: 16,
        block_size: 4,
        block_count: 8,
        block_bytes: 0,
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
    }
}

fn batch(sequences: Vec<SequenceSlice>) -> StepBatch {
    let count = sequences.iter().map(|s| s.token_count).sum();
    StepBatch { tokens: vec![1; count], sequences }
}

/// Expects a refusal whose message holds `part`, and that a good batch passes afterwards.
fn refused(bad: &StepBatch, part: &str) {
    let mut checker = BatchChecker::new(8);
    let message = match checker.check(bad, &spec()) {
        Err(BackendError::MalformedBatch(message)) => message,
        other => panic!("expected a refusal about {part:?}, got {other:?}"),
    };
    assert!(message.contains(part), "expected {part:?} in {message:?}");
    let good = batch(vec![slice(0, 16, &[0, 1, 2, 3]), slice(0, 16, &[4, 5, 6, 7])]);
    checker.check(&good, &spec()).expect("no mark may be left behind");
}

/// Goal: good batches pass, with their rows counted, shared read-only blocks included.
#[test]
fn good_batches_pass() {
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

/// Goal: every clause of the contract is checked.
#[test]
fn bad_batches_are_refused() {
    refused(&batch(vec![slice(0, 0, &[0])]), "expected 1 to 0 tokens");
    let mut long = batch(vec![slice(0, 2, &[0])]);
    long.tokens.push(1);
    refused(&long, "got 1 tokens more");
    let mut short = batch(vec![slice(0, 2, &[0])]);
    short.tokens.pop();
    refused(&short, "expected 1 to 1 tokens (what the batch has left), got 2");
    let mut foreign = batch(vec![slice(0, 2, &[0])]);
    foreign.tokens[1] = 100;
    refused(&foreign, "expected token ids below 100, got 100");
    refused(&batch(vec![slice(14, 3, &[0, 1, 2, 3, 4])]), "expected at most 16 positions, got 17");
    refused(&batch(vec![slice(usize::MAX, 1, &[0])]), "expected at most 16 positions");
    refused(&batch(vec![slice(4, 1, &[0])]), "expected at least 2 blocks for 5 positions, got 1");
    refused(&batch(vec![slice(0, 1, &[8])]), "expected block ids below 8, got 8");
    let mut early = batch(vec![slice(2, 1, &[0])]);
    early.sequences[0].write_from = 1;
    refused(&early, "expected write_from in 2..=3, got 1");
    early.sequences[0].write_from = 4;
    refused(&early, "expected write_from in 2..=3, got 4");
}

/// Goal: nobody else may hold a block that is written, not even the same table at another place.
#[test]
fn written_blocks_are_private() {
    refused(&batch(vec![slice(0, 1, &[3]), slice(0, 1, &[3])]), "slice 0 writes too");
    refused(&batch(vec![slice(0, 1, &[3]), slice(4, 1, &[3, 4])]), "place 0 of its table");
    refused(&batch(vec![slice(4, 1, &[3, 3])]), "place 0 of its table");
    refused(&batch(vec![slice(0, 8, &[3, 3])]), "slice 0 writes too");
    refused(&batch(vec![slice(0, 1, &[3, 5]), slice(0, 4, &[5])]), "place 1 of its table");
}
