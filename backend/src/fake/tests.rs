use stolon_kvcache::BlockId;

use super::*;

fn options(block_size: usize) -> FakeOptions {
    FakeOptions { vocab_size: 50, block_size, block_count: 32, ..FakeOptions::default() }
}

fn slice(start: usize, token_count: usize, table: &[u32]) -> SequenceSlice {
    SequenceSlice {
        token_count,
        start,
        write_from: start,
        block_table: table.iter().map(|&id| BlockId(id)).collect(),
        logit_rows: LogitRows::Last,
    }
}

fn run(backend: &mut FakeBackend, tokens: &[u32], slice: SequenceSlice) -> Vec<f32> {
    try_run(backend, tokens, slice).expect("a good batch")
}

fn try_run(
    backend: &mut FakeBackend,
    tokens: &[u32],
    slice: SequenceSlice,
) -> Result<Vec<f32>, BackendError> {
    backend
        .step(&StepBatch { tokens: tokens.to_vec(), sequences: vec![slice] })
        .map(|output| output.logits)
}

fn prompt(count: u32) -> Vec<u32> {
    (0..count).map(|i| i * 7 % 50).collect()
}

/// Goal: however a prompt is cut and wherever its blocks lie, the logits are the reference's.
#[test]
fn logits_follow_from_the_prefix_alone() {
    let tokens = prompt(24);
    for block_size in [1, 4, 16] {
        let blocks: Vec<u32> = (0..24u32.div_ceil(block_size)).map(|i| 31 - i).collect();
        for chunk in [1, 5, 24] {
            let mut backend = FakeBackend::new(options(block_size as usize));
            let mut start = 0;
            for part in tokens.chunks(chunk) {
                let logits = run(&mut backend, part, slice(start, part.len(), &blocks));
                start += part.len();
                assert_eq!(logits, expected_logits(&tokens[..start], 50));
                let best = logits.iter().position(|&logit| logit == 8.0);
                assert_eq!(best, Some(expected_next(&tokens[..start], 50) as usize));
            }
        }
    }
}

/// Goal: a full hit reads the last position from the shared block and leaves the block alone.
#[test]
fn a_full_hit_writes_nothing() {
    let tokens = prompt(8);
    let mut backend = FakeBackend::new(options(4));
    let cold = run(&mut backend, &tokens, slice(0, 8, &[2, 3]));
    let before = backend.slots.clone();
    let mut hit = slice(7, 1, &[2, 3]);
    hit.write_from = 8;
    assert_eq!(run(&mut backend, &tokens[7..], hit.clone()), cold);
    assert_eq!(backend.slots, before);
    assert!(try_run(&mut backend, &[48], hit).is_err(), "another token than the cached one");
}

/// Goal: a block that somebody overwrote changes the tokens, and strictly is an error.
#[test]
fn an_overwritten_block_shows() {
    for strict in [false, true] {
        let mut backend = FakeBackend::new(FakeOptions { strict, ..options(4) });
        let tokens = prompt(9);
        run(&mut backend, &tokens[..8], slice(0, 8, &[0, 1]));
        run(&mut backend, &[9, 9, 9, 9], slice(0, 4, &[0]));
        match try_run(&mut backend, &tokens[8..], slice(8, 1, &[0, 1, 2])) {
            Ok(logits) => {
                assert!(!strict);
                assert_ne!(logits, expected_logits(&tokens, 50));
            }
            Err(error) => assert!(strict, "{error}"),
        }
    }
}

/// Goal: a whole table of another prompt, which no check can refuse, gives other tokens.
#[test]
fn another_prompts_blocks_show() {
    let mut backend = FakeBackend::new(options(4));
    run(&mut backend, &[1, 2, 3, 4], slice(0, 4, &[0]));
    let logits = run(&mut backend, &[6], slice(4, 1, &[0, 1]));
    assert_eq!(logits, expected_logits(&[1, 2, 3, 4, 6], 50));
    assert_ne!(logits, expected_logits(&[1, 2, 3, 5, 6], 50));
}

/// Goal: positions that were never written cannot be read.
#[test]
fn unwritten_positions_are_refused() {
    let mut backend = FakeBackend::new(options(4));
    let error = try_run(&mut backend, &[1], slice(2, 1, &[0])).expect_err("nothing is there");
    assert!(error.to_string().contains("never written"), "{error}");
}

/// Goal: faults come at the step asked for, spoil what the step was to write, and only that.
#[test]
fn faults_are_injected() {
    let mut backend = FakeBackend::new(options(4));
    let handle = backend.handle();
    handle.inject(2, FakeFault::Fail);
    run(&mut backend, &[1, 2, 3, 4], slice(0, 4, &[0]));
    let second = slice(4, 1, &[0, 1]);
    assert!(matches!(try_run(&mut backend, &[5], second.clone()), Err(BackendError::Failed(_))));
    let after = slice(5, 1, &[0, 1]);
    assert!(try_run(&mut backend, &[6], after).is_err(), "position 4 is spoiled");
    assert_eq!(run(&mut backend, &[5], second), expected_logits(&[1, 2, 3, 4, 5], 50));
    handle.inject_next(FakeFault::Panic);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(&mut backend, &[1], slice(0, 1, &[7]))
    }));
    assert!(caught.is_err());
    assert_eq!(handle.step_count(), 5);
    assert_eq!(handle.token_count(), 4 + 1 + 1 + 1 + 1);
}

/// Goal: a hold stops a step at its start, and recording keeps its batch.
#[test]
fn a_hold_stops_steps() {
    let mut backend = FakeBackend::new(FakeOptions { record: true, ..options(4) });
    let handle = backend.handle();
    let hold = handle.hold();
    let thread = std::thread::spawn(move || run(&mut backend, &[1], slice(0, 1, &[0])));
    assert!(handle.wait_for_steps(1, Duration::from_secs(20)));
    assert!(!thread.is_finished());
    drop(hold);
    assert_eq!(thread.join().expect("no panic"), expected_logits(&[1], 50));
    assert_eq!(handle.take_batches().len(), 1);
    assert!(!handle.wait_for_steps(2, Duration::ZERO));
}
