//! Tests recurrent states: a sequence that resumes from a checkpoint has the bits of one that is
//! computed from its start, and a checkpoint has the same bits however it came about.

use stolon_backend::{Backend, SliceState, StateCheckpoint};
use stolon_kvcache::BlockId;

use super::super::run::{self, Part};
use super::Subject;

/// Number of blocks of a checkpoint.
fn checkpoint_blocks(backend: &dyn Backend) -> usize {
    backend.spec().checkpoint_blocks()
}

/// The last blocks of the KV store, for checkpoint `index`.
fn blocks_of(backend: &dyn Backend, index: usize) -> Vec<BlockId> {
    let count = checkpoint_blocks(backend);
    let end = backend.spec().block_count - index * count;
    (end - count..end).map(|block| BlockId(block as u32)).collect()
}

/// The part of a sequence in `slot` that writes checkpoints at the positions `lens`.
fn writing(backend: &dyn Backend, slot: u32, mut part: Part, lens: &[usize]) -> Part {
    let checkpoints = lens.iter().enumerate();
    let checkpoints = checkpoints
        .map(|(index, &len)| StateCheckpoint { len, blocks: blocks_of(backend, index) })
        .collect();
    part.slice.state = Some(SliceState { checkpoints, ..SliceState::in_slot(slot) });
    part
}

/// The part of a sequence in `slot` that resumes from checkpoint `index`.
fn resuming(backend: &dyn Backend, slot: u32, mut part: Part, index: usize) -> Part {
    let resume = Some(blocks_of(backend, index));
    part.slice.state = Some(SliceState { resume, ..SliceState::in_slot(slot) });
    part
}

/// Fills the whole KV store with bytes that are NaN in every float type.
fn poison(backend: &mut dyn Backend) {
    let spec = backend.spec().clone();
    let bytes = vec![0xff; spec.block_bytes];
    let blocks: Vec<BlockId> = (0..spec.block_count as u32).map(BlockId).collect();
    backend.write_blocks(&blocks, &vec![&bytes[..]; blocks.len()]).expect("copies of blocks");
}

/// The bytes of the state in checkpoint `index`.
fn state_bytes(backend: &mut dyn Backend, index: usize) -> Vec<u8> {
    let blocks = blocks_of(backend, index);
    let mut bytes = vec![0; blocks.len() * backend.spec().block_bytes];
    backend.read_blocks(&blocks, &mut bytes).expect("copies of blocks");
    let state = backend.spec().state.expect("a model with states");
    assert!(bytes[state.bytes..].iter().all(|byte| *byte == 0), "the end of the last block");
    bytes.truncate(state.bytes);
    bytes
}

impl Subject<'_> {
    /// Checks everything about states. `expected` and `others` are the logits of both sequences.
    pub(super) fn check_states(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        self.check_boundaries(expected);
        self.check_several_checkpoints(expected, others);
        self.check_cached_positions(expected);
        self.check_checkpoint_bytes();
        self.check_reused_slots(expected, others);
        if self.backend(4, 1).spec().proposals {
            self.check_rejected_tokens(expected, others);
            self.check_gaps_are_refused();
        }
    }

    /// A checkpoint at every boundary of blocks of 16 positions, and at some of blocks of 4, and one
    /// position before and after it. What other sequences have left in the KV store and in the slot
    /// makes no difference.
    fn check_boundaries(&self, expected: &[Vec<f32>]) {
        let count = self.tokens.len();
        for block_size in [4, 16] {
            let mut backend = self.backend(block_size, self.threads[self.threads.len() - 1]);
            poison(&mut *backend);
            let table = run::table(0, count, block_size);
            let is_tried = |len: &usize| {
                let (boundary, after) = ((len + 1) / block_size, (len + 1) % block_size);
                after < 3 && (block_size == 16 || boundary % 4 == 1)
            };
            let lens = (1..count).filter(is_tried);
            for len in lens {
                let whole = run::part(&self.tokens, 0, count, &table);
                let whole = writing(&*backend, 3, whole, &[len]);
                let rows = run::step(&mut *backend, &[whole]).remove(0);
                self.assert_same(&format!("checkpoint at {len}"), &rows, expected);
                // A prefix that ends inside of a block is copied, as its position is written.
                let rest = run::part(&self.tokens, len, count, &table);
                let rest = resuming(&*backend, 4, rest, 0);
                let rows = run::step(&mut *backend, &[rest]).remove(0);
                let what = format!("resumed at {len}, blocks of {block_size}");
                self.assert_same(&what, &rows, &expected[len..]);
            }
        }
    }

    /// Several checkpoints in one slice, next to the slice of another sequence, from which several
    /// sequences resume in one batch, with chunks of different lengths.
    fn check_several_checkpoints(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let count = self.tokens.len();
        let lens = [5, 32, 60];
        for &threads in self.threads {
            let mut backend = self.backend(4, threads);
            let table = run::table(0, count, 4);
            let other_table = run::table(50, self.other.len(), 4);
            let first = run::part(&self.tokens, 0, 3, &table);
            let first = writing(&*backend, 0, first, &[]);
            run::step(&mut *backend, &[first]);
            let slice = run::part(&self.tokens, 3, 60, &table);
            let other = run::part(&self.other, 0, 20, &other_table);
            let parts = [other, writing(&*backend, 0, slice, &lens)];
            let rows = run::step(&mut *backend, &parts);
            self.assert_same("next to checkpoints", &rows[0], &others[..20]);
            self.assert_same("with checkpoints", &rows[1], &expected[3..60]);
            for chunk in [1_usize, 9] {
                // Positions from 60 on are written by the last sequence only.
                let ends = [5 + chunk, 32 + chunk, 60 + chunk];
                let parts: Vec<Part> = lens
                    .iter()
                    .zip(ends)
                    .enumerate()
                    .map(|(index, (&len, end))| {
                        let end = if index == 2 { end } else { end.min(60) };
                        let table = &table[..end.div_ceil(4)];
                        let mut part = run::part(&self.tokens, len, end, table);
                        part.slice.write_from = if index == 2 { len } else { end };
                        resuming(&*backend, 5 + index as u32, part, index)
                    })
                    .collect();
                let rows = run::step(&mut *backend, &parts);
                for ((rows, len), part) in rows.iter().zip(lens).zip(&parts) {
                    let end = len + part.tokens.len();
                    self.assert_same("resumed in one batch", rows, &expected[len..end]);
                }
            }
        }
    }

    /// Cached positions after a checkpoint are computed again, and not written.
    fn check_cached_positions(&self, expected: &[Vec<f32>]) {
        let count = self.tokens.len();
        let mut backend = self.backend(4, 1);
        let table = run::table(0, count, 4);
        let whole = run::part(&self.tokens, 0, count, &table);
        let whole = writing(&*backend, 0, whole, &[20]);
        run::step(&mut *backend, &[whole]);
        // Other tokens after the checkpoint must leave the cached positions as they are.
        let mut foreign = run::part(&[7; 60], 20, 60, &table);
        foreign.slice.write_from = 60;
        let foreign = resuming(&*backend, 1, foreign, 0);
        run::step(&mut *backend, &[foreign]);
        for write_from in [20, 37, 40, 60] {
            let mut cached = run::part(&self.tokens, 20, 60, &table);
            cached.slice.write_from = write_from;
            let cached = resuming(&*backend, 2, cached, 0);
            let rows = run::step(&mut *backend, &[cached]).remove(0);
            self.assert_same("cached positions", &rows, &expected[20..60]);
            let rest = run::part(&self.tokens, 60, count, &table);
            let rest = run::in_slot(&*backend, 2, rest);
            let rows = run::step(&mut *backend, &[rest]).remove(0);
            self.assert_same("after cached positions", &rows, &expected[60..]);
        }
    }

    /// The bytes of a checkpoint do not depend on chunks, threads, or whether the sequence itself
    /// has resumed from one; nor on the block size, unless they are blocks of a window.
    fn check_checkpoint_bytes(&self) {
        const LEN: usize = 48;
        let has_windows = (self.model)().config.recurrent_layers() == 0;
        let mut expected: Option<Vec<u8>> = None;
        for block_size in [16, 4] {
            expected = expected.filter(|_| !has_windows);
            let mut check = |what: String, bytes: Vec<u8>| match &expected {
                Some(expected) => assert!(bytes == *expected, "{}: {what}", self.name),
                None => expected = Some(bytes),
            };
            for &threads in self.threads {
                let mut backend = self.backend(block_size, threads);
                let table = run::table(0, self.tokens.len(), block_size);
                for chunk in [self.tokens.len(), LEN, 7, 1] {
                    let mut start = 0;
                    while start < LEN {
                        let end = self.tokens.len().min(start + chunk);
                        let part = run::part(&self.tokens, start, end, &table);
                        let lens = if end >= LEN { &[LEN][..] } else { &[] };
                        let part = writing(&*backend, 9, part, lens);
                        run::step(&mut *backend, &[part]);
                        start = end;
                    }
                    let what = format!("blocks of {block_size}, chunks of {chunk}, {threads}");
                    check(what, state_bytes(&mut *backend, 0));
                }
                let part = run::part(&self.tokens, 0, 30, &table);
                let part = writing(&*backend, 9, part, &[11, 28]);
                run::step(&mut *backend, &[part]);
                let part = run::part(&self.tokens, 28, 50, &table);
                let mut part = resuming(&*backend, 2, part, 1);
                let blocks = blocks_of(&*backend, 0);
                let state = part.slice.state.as_mut().expect("a state");
                state.checkpoints.push(StateCheckpoint { len: LEN, blocks });
                run::step(&mut *backend, &[part]);
                check("resumed".to_owned(), state_bytes(&mut *backend, 0));
            }
        }
    }

    /// A slot that another sequence has used, and a step without outputs.
    fn check_reused_slots(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(16, 1);
        let table = run::table(0, 160, 16);
        for (tokens, expected) in [(&self.tokens, expected), (&self.other, others)] {
            let mut silent = run::part(tokens, 0, 50, &table);
            silent.slice.logit_rows = stolon_backend::LogitRows::None;
            let silent = run::in_slot(&*backend, 1, silent);
            assert!(run::step(&mut *backend, &[silent]).remove(0).is_empty());
            let rest = run::part(tokens, 50, tokens.len(), &table);
            let rest = run::in_slot(&*backend, 1, rest);
            let rows = run::step(&mut *backend, &[rest]).remove(0);
            self.assert_same("a slot that was used", &rows, &expected[50..]);
        }
    }

    /// Two sequences to each of which some right and some wrong tokens are proposed, as many as
    /// differ from step to step. Neither rows nor the state after them depend on that.
    fn check_rejected_tokens(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        const LEN: usize = 48;
        let sequences = [(&self.tokens, expected), (&self.other, others)];
        for &threads in self.threads {
            let tables = [0, 100].map(|first| run::table(first, LEN + 16, 4));
            let mut plain = self.backend(4, threads);
            let whole = run::part(&self.tokens, 0, LEN, &tables[0]);
            let whole = writing(&*plain, 0, whole, &[LEN]);
            run::step(&mut *plain, &[whole]);
            let mut backend = self.backend(4, threads);
            let start = |index: usize| run::part(sequences[index].0, 0, 20, &tables[index]);
            let parts = [0, 1].map(|index| run::in_slot(&*backend, index as u32, start(index)));
            run::step(&mut *backend, &parts);
            let mut at = [20; 2];
            for round in 0.. {
                let rights = [0, 1].map(|index| {
                    let certain = 1 + (round + index) % 2;
                    (certain, (at[index] + certain + (3 * round + index) % 5).min(LEN - 2))
                });
                let parts = [0, 1].map(|index| {
                    let (certain, right) = rights[index];
                    let mut path = sequences[index].0[..right].to_vec();
                    path.extend((0..(round + index) as u32 % 3).map(|token| 5 * token + 2));
                    let part = run::part(&path, at[index], path.len(), &tables[index]);
                    let proposed = path.len() - at[index] - certain;
                    run::proposing(&*backend, index as u32, part, proposed)
                });
                let rows = run::step(&mut *backend, &parts);
                for (index, (_, right)) in rights.into_iter().enumerate() {
                    let count = right - at[index];
                    let expected = &sequences[index].1[at[index]..right];
                    self.assert_same("with rejected tokens", &rows[index][..count], expected);
                    at[index] = right;
                }
                if at.iter().any(|at| *at > LEN - 6) {
                    break;
                }
            }
            // The first slice ends with tokens that are certain, and writes a checkpoint after
            // them.
            let mut path = self.tokens[..LEN].to_vec();
            path.extend([1, 2, 3]);
            let part = run::part(&path, at[0], LEN + 3, &tables[0]);
            let mut part = writing(&*backend, 0, part, &[LEN]);
            part.slice.state.as_mut().expect("a state").proposed = 3;
            let other = run::part(&self.other, at[1], at[1] + 1, &tables[1]);
            let other = run::in_slot(&*backend, 1, other);
            let rows = run::step(&mut *backend, &[part, other]);
            self.assert_same(
                "after rejected tokens",
                &rows[0][..LEN - at[0]],
                &expected[at[0]..LEN],
            );
            self.assert_same("after rejected tokens", &rows[1], &others[at[1]..at[1] + 1]);
            let bytes = state_bytes(&mut *backend, 0);
            assert!(bytes == state_bytes(&mut *plain, 0), "{}: rejected tokens", self.name);
        }
    }

    /// A slice that does not continue where the recurrent state in its slot ends is refused.
    fn check_gaps_are_refused(&self) {
        if (self.model)().config.recurrent_layers() == 0 {
            return;
        }
        let mut backend = self.backend(16, 1);
        let table = run::table(0, 160, 16);
        let part = run::part(&self.tokens, 0, 30, &table);
        let part = run::proposing(&*backend, 0, part, 3);
        run::step(&mut *backend, &[part]);
        for start in [26, 31] {
            let part = run::in_slot(&*backend, 0, run::part(&self.tokens, start, 40, &table));
            let error = backend.step(&run::batch(&*backend, &[part])).expect_err("a gap");
            let message = error.to_string();
            assert!(message.contains("begins in 27..=30") && message.contains("got"), "{message}");
        }
    }
}
