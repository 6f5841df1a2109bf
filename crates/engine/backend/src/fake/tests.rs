use stolon_kvcache::BlockId;

use super::*;
use crate::{Adapter, LogitRows, SliceImage};

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
        ..SequenceSlice::default()
    }
}

fn run(backend: &mut FakeBackend, tokens: &[u32], slice: SequenceSlice) -> Vec<f32> {
    try_run(backend, tokens, slice).expect("a valid batch")
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

/// Goal: the logits equal the directly computed ones for every chunk size, block size and order
/// of blocks.
#[test]
fn logits_depend_on_the_prefix_only() {
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

/// Goal: hidden states equal the directly computed ones, next to logits of another slice, and a
/// backend without them refuses the batch.
#[test]
fn hidden_states_depend_on_the_prefix_only() {
    let tokens = prompt(9);
    let mut batch = StepBatch { tokens: [&tokens[..], &tokens[..5]].concat(), sequences: vec![] };
    batch.sequences.push(slice(0, 9, &[5, 2, 7]));
    batch.sequences[0].logit_rows = LogitRows::AllHidden;
    batch.sequences.push(slice(0, 5, &[1, 3]));
    let output = FakeBackend::new(options(4)).step(&batch).expect("a valid batch");
    assert_eq!(output.logits, expected_logits(&tokens[..5], 50));
    let each: Vec<f32> = (1..=9).flat_map(|len| expected_hidden(&tokens[..len], 16)).collect();
    assert_eq!(output.hidden, each);
    batch.sequences[0].logit_rows = LogitRows::LastHidden;
    let output = FakeBackend::new(options(4)).step(&batch).expect("a valid batch");
    assert_eq!(output.hidden, expected_hidden(&tokens, 16));
    let mut without = FakeBackend::new(FakeOptions { hidden_size: None, ..options(4) });
    let refused = without.step(&batch).expect_err("no hidden states").to_string();
    assert!(refused.contains("slice 0: expected rows of logits, got LastHidden"), "{refused}");
}

/// Goal: if the whole prompt is cached, the step reads the last position from the shared block and
/// does not write to the block.
#[test]
fn a_full_cache_hit_writes_nothing() {
    let tokens = prompt(8);
    let mut backend = FakeBackend::new(options(4));
    let cold = run(&mut backend, &tokens, slice(0, 8, &[2, 3]));
    let before = backend.slots.clone();
    let mut hit = slice(7, 1, &[2, 3]);
    hit.write_from = 8;
    assert_eq!(run(&mut backend, &tokens[7..], hit.clone()), cold);
    assert_eq!(backend.slots, before);
    assert!(try_run(&mut backend, &[48], hit).is_err(), "the slot holds a different token");
}

/// Goal: reading a block that was overwritten changes the logits, or is an error in strict mode.
#[test]
fn an_overwritten_block_is_detected() {
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

/// Goal: with the block table of a different prompt, which is consistent in itself, the logits
/// follow from that prompt.
#[test]
fn the_block_table_of_another_prompt_changes_the_logits() {
    let mut backend = FakeBackend::new(options(4));
    run(&mut backend, &[1, 2, 3, 4], slice(0, 4, &[0]));
    let logits = run(&mut backend, &[6], slice(4, 1, &[0, 1]));
    assert_eq!(logits, expected_logits(&[1, 2, 3, 4, 6], 50));
    assert_ne!(logits, expected_logits(&[1, 2, 3, 5, 6], 50));
}

/// Goal: reading a position that was never written is an error.
#[test]
fn reading_an_unwritten_position_is_an_error() {
    let mut backend = FakeBackend::new(options(4));
    let error = try_run(&mut backend, &[1], slice(2, 1, &[0])).expect_err("nothing was written");
    assert!(error.to_string().contains("never written"), "{error}");
}

/// Goal: a fault hits the step it was injected for and clears the positions that this step should
/// have written, but no others.
#[test]
fn faults_hit_the_given_step_and_clear_its_positions() {
    let mut backend = FakeBackend::new(options(4));
    let handle = backend.handle();
    handle.inject(2, FakeFault::Fail);
    run(&mut backend, &[1, 2, 3, 4], slice(0, 4, &[0]));
    let second = slice(4, 1, &[0, 1]);
    assert!(matches!(try_run(&mut backend, &[5], second.clone()), Err(BackendError::Failed(_))));
    let after = slice(5, 1, &[0, 1]);
    assert!(try_run(&mut backend, &[6], after).is_err(), "position 4 was cleared");
    assert_eq!(run(&mut backend, &[5], second), expected_logits(&[1, 2, 3, 4, 5], 50));
    handle.inject_next(FakeFault::Panic);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(&mut backend, &[1], slice(0, 1, &[7]))
    }));
    assert!(caught.is_err());
    assert_eq!(handle.step_count(), 5);
    assert_eq!(handle.token_count(), 4 + 1 + 1 + 1 + 1);
}

/// Goal: a hold blocks a step at its start, and the batch is recorded.
#[test]
fn a_hold_blocks_steps_and_batches_are_recorded() {
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

/// Goal: blocks that were copied out and into other blocks, also of another store, have the same
/// content, and a copy of wrong size or of a block that does not exist is refused.
#[test]
fn blocks_survive_a_copy_out_and_in() {
    let tokens = prompt(9);
    let mut backend = FakeBackend::new(options(4));
    run(&mut backend, &tokens[..8], slice(0, 8, &[5, 2]));
    let mut bytes = vec![0xff; 2 * backend.spec().block_bytes];
    backend.read_blocks(&[BlockId(5), BlockId(2)], &mut bytes).expect("two blocks");
    let mut other = FakeBackend::new(options(4));
    other
        .write_blocks(&[BlockId(31), BlockId(0)], &[&bytes[..96], &bytes[96..]])
        .expect("two blocks");
    let logits = run(&mut other, &tokens[8..], slice(8, 1, &[31, 0, 7]));
    assert_eq!(logits, expected_logits(&tokens, 50));
    let fingerprint =
        |of: &dyn Backend| of.kv_format().expect("a format").fingerprint().expect("a hash");
    assert_eq!(fingerprint(&backend), fingerprint(&other));
    assert_ne!(fingerprint(&backend), fingerprint(&FakeBackend::new(options(8))));
    for (blocks, len) in [(vec![BlockId(32)], 96), (vec![BlockId(1)], 95), (vec![], 1)] {
        let refused = other.read_blocks(&blocks, &mut vec![0; len]);
        assert!(matches!(refused, Err(BackendError::MalformedBatch(_))), "{refused:?}");
        let refused = other.write_blocks(&blocks, &[&vec![0; len]]);
        assert!(matches!(refused, Err(BackendError::MalformedBatch(_))), "{refused:?}");
    }
    backend.handle().fail_copies(1);
    assert!(backend.read_blocks(&[BlockId(5), BlockId(2)], &mut bytes).is_err());
    assert!(backend.read_blocks(&[BlockId(5), BlockId(2)], &mut bytes).is_ok());
}

/// Goal: an image takes the number of calls that it should, also if another one comes in between,
/// and its positions count like tokens that follow from its hash.
#[test]
fn positions_of_images_depend_on_their_content() {
    let mut backend = FakeBackend::new(FakeOptions { encode_calls: 2, ..options(4) });
    let image = |content_hash| {
        let size = [1, 1];
        let pixels = vec![0; 3];
        Arc::new(ImageInput {
            content_hash,
            kv_len: 3,
            full_attention: true,
            columns: 0,
            size,
            tiles: [0, 0],
            pixels,
        })
    };
    let (one, other) = (image(1), image(1 << 100));
    let mut encode = |image| backend.encode(image, Duration::ZERO).expect("an encoder");
    for (image, is_complete) in
        [(&one, false), (&other, false), (&one, false), (&one, true), (&other, false)]
    {
        assert_eq!(encode(image).is_some(), is_complete);
    }
    let embeddings = encode(&other).expect("the second call in a row");
    let slice = SequenceSlice {
        images: vec![SliceImage { start: 1, len: 3, full_attention: true, columns: 0, embeddings }],
        ..slice(0, 5, &[2, 3])
    };
    let logits = run(&mut backend, &[7, 0, 0, 0, 8], slice);
    let rows = [0, 1, 2].map(|row| image_token(1 << 100, row));
    assert_eq!(logits, expected_logits(&[7, rows[0], rows[1], rows[2], 8], 50));
    assert_ne!(image_token(1, 0), image_token(2, 0));
    assert_eq!(backend.handle().encoding_count(), 6);
}

/// Goal: with an adapter a sequence has other tokens, and positions that another adapter or the
/// model itself has computed are detected.
#[test]
fn positions_belong_to_an_adapter() {
    let tokens = prompt(8);
    let [first, second] = [b"first", b"other"].map(|contents| fake_adapter(contents));
    let with = |adapter: Option<&Adapter>, start, count| SequenceSlice {
        adapter: adapter.cloned(),
        ..slice(start, count, &[0, 1])
    };
    let expected: Vec<u32> = [None, Some(&first), Some(&second)]
        .map(|adapter| expected_next_with(adapter, &tokens, 50))
        .into();
    assert_eq!(expected[0], expected_next(&tokens, 50));
    assert!(expected[0] != expected[1] && expected[1] != expected[2], "{expected:?}");
    let mut backend = FakeBackend::new(options(4));
    run(&mut backend, &tokens[..5], with(Some(&first), 0, 5));
    for other in [None, Some(&second)] {
        let error = try_run(&mut backend, &tokens[5..], with(other, 5, 3)).expect_err("other KV");
        assert!(error.to_string().contains("does not continue"), "{error}");
    }
    let logits = run(&mut backend, &tokens[5..], with(Some(&first), 5, 3));
    assert_eq!(logits.iter().position(|&logit| logit == 8.0), Some(expected[1] as usize));
}
