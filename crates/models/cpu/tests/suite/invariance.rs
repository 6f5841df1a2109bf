//! Tests batch invariance: a row of logits or a hidden state depends, bit for bit, only on the
//! tokens of its sequence.

mod states;

use stolon_backend::{Backend, LogitRows};
use stolon_checkpoint::LoadedModel;
use stolon_kvcache::BlockId;

use super::run::{self, Part};
use super::{Open, Sizes, fixture};

/// A model, two sequences and a way to open backends.
pub(crate) struct Subject<'a> {
    name: String,
    model: Box<dyn Fn() -> LoadedModel + 'a>,
    open: Open<'a>,
    /// Numbers of threads to compare.
    threads: &'static [usize],
    /// A sequence.
    pub(crate) tokens: Vec<u32>,
    /// A different sequence with the same first 34 tokens.
    pub(crate) other: Vec<u32>,
}

impl<'a> Subject<'a> {
    /// The fixture `name`. `label` describes the backends in messages.
    pub(crate) fn fixture(
        name: &str,
        label: &str,
        open: Open<'a>,
        threads: &'static [usize],
    ) -> Self {
        let expected = fixture::expected(name);
        let mut tokens = expected.prompt;
        tokens.extend(&expected.greedy[..30]);
        let label = format!("{name}, {label}");
        let name = name.to_owned();
        Self::new(label, Box::new(move || fixture::model(&name)), open, threads, tokens)
    }

    /// The model that `model` returns, and a sequence.
    pub(crate) fn new(
        name: String,
        model: Box<dyn Fn() -> LoadedModel + 'a>,
        open: Open<'a>,
        threads: &'static [usize],
        tokens: Vec<u32>,
    ) -> Self {
        let mut other = tokens.clone();
        other[34..].rotate_left(9);
        other.truncate(61);
        Self { name, model, open, threads, tokens, other }
    }

    /// Opens a backend.
    pub(crate) fn backend(&self, block_size: usize, threads: usize) -> Box<dyn Backend> {
        (self.open)((self.model)(), Sizes { block_size, threads }).expect("a valid model")
    }

    /// The logits that all others must equal: the whole sequence in one step, alone in the batch.
    pub(crate) fn reference(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let table = run::table(0, tokens.len(), 16);
        let rows = run::rows(&mut *self.backend(16, 1), tokens, 0, tokens.len(), &table);
        assert!(rows.iter().flatten().all(|logit| logit.is_finite()), "{}", self.name);
        rows
    }

    #[track_caller]
    fn assert_same(&self, what: &str, rows: &[Vec<f32>], expected: &[Vec<f32>]) {
        assert_eq!(rows.len(), expected.len(), "{}: {what}", self.name);
        for (index, (row, expected)) in rows.iter().zip(expected).enumerate() {
            let same = row.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{}: {what}: row {index} differs", self.name);
        }
    }

    /// Checks sizes of blocks and of chunks, and thread counts. Each backend computes with two of the
    /// four sizes of chunks, in turn.
    fn check_chunking(&self, expected: &[Vec<f32>]) {
        let chunks = [1, 7, 64, self.tokens.len()];
        for (row, block_size) in [1, 4, 16, 32].into_iter().enumerate() {
            for (number, &threads) in self.threads.iter().enumerate() {
                let mut backend = self.backend(block_size, threads);
                for chunk in chunks.into_iter().skip((row + number) % 2).step_by(2) {
                    let table = run::table(2, self.tokens.len(), block_size);
                    let rows = run::rows(&mut *backend, &self.tokens, 0, chunk, &table);
                    let what =
                        format!("blocks of {block_size}, chunks of {chunk}, {threads} threads");
                    self.assert_same(&what, &rows, expected);
                }
            }
        }
    }

    /// Checks that rows are the same if wrong tokens follow, and after their positions are written
    /// again.
    fn check_proposals(&self, expected: &[Vec<f32>]) {
        for &threads in self.threads {
            let mut backend = self.backend(16, threads);
            if !backend.spec().proposals {
                return;
            }
            let (len, mut at) = (self.tokens.len(), 20);
            let table = run::table(2, len + 16, 16);
            run::step(&mut *backend, &[run::part(&self.tokens, 0, at, &table)]);
            while at < len {
                let right = (at + 1 + at % 5).min(len);
                let mut path = self.tokens[..right].to_vec();
                path.extend(self.tokens[..at % 7 + 1].iter().rev());
                let part = run::part(&path, at, path.len(), &table);
                let part = run::proposing(&*backend, 2, part, path.len() - at - 1);
                let rows = run::step(&mut *backend, &[part]).remove(0);
                self.assert_same("proposals", &rows[..right - at], &expected[at..right]);
                at = right;
            }
        }
    }

    /// Checks two sequences in one batch with different chunk sizes, the second starting later.
    fn check_mixed_batch(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        for &threads in self.threads {
            let mut backend = self.backend(4, threads);
            let tables = [run::table(0, self.tokens.len(), 4), run::table(40, self.other.len(), 4)];
            let mut got = [Vec::new(), Vec::new()];
            let mut at = [0, 0];
            for round in 0.. {
                let mut parts: Vec<Part> = Vec::new();
                let mut owners = Vec::new();
                for (index, tokens) in [&self.tokens, &self.other].into_iter().enumerate() {
                    let chunk = [[7, 1, 19], [30, 1, 2]][index][round % 3];
                    let to = tokens.len().min(at[index] + chunk);
                    if at[index] < to && (index == 0 || round >= 2) {
                        parts.push(run::part(tokens, at[index], to, &tables[index]));
                        owners.push(index);
                        at[index] = to;
                    }
                }
                if parts.is_empty() {
                    break;
                }
                if round % 2 == 1 {
                    parts.reverse();
                    owners.reverse();
                }
                for (index, rows) in owners.into_iter().zip(run::step(&mut *backend, &parts)) {
                    got[index].extend(rows);
                }
            }
            self.assert_same("mixed batch, first", &got[0], expected);
            self.assert_same("mixed batch, second", &got[1], others);
        }
    }

    /// Whether the model has recurrent states.
    fn has_states(&self) -> bool {
        self.backend(16, 1).spec().state.is_some()
    }

    /// Checks a sequence that reads blocks of another one, and full cache hits, which read their
    /// last position from the cache.
    fn check_shared_blocks(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(4, 1);
        let table = run::table(0, self.tokens.len(), 4);
        run::rows(&mut *backend, &self.tokens, 0, 33, &table);
        let shared = 32;
        let mut mixed = table[..shared / 4].to_vec();
        mixed.extend(run::table(50, self.other.len() - shared, 4));
        let rows = run::rows(&mut *backend, &self.other, shared, 64, &mixed);
        self.assert_same("shared blocks", &rows, &others[shared..]);
        for end in [4, 32, 60] {
            let mut hit = run::part(&self.tokens, end - 1, end, &table[..end / 4]);
            hit.slice.write_from = end;
            let rows = run::step(&mut *backend, &[hit]).remove(0);
            self.assert_same("full cache hit", &rows, &expected[end - 1..end]);
        }
        // First a slice of different tokens that must not be written, then one of which only the
        // end is written.
        let mut foreign = run::part(&[7; 60], 57, 60, &table[..15]);
        foreign.slice.write_from = 60;
        run::step(&mut *backend, &[foreign]);
        let rest = run::rows(&mut *backend, &self.tokens, 60, 5, &table);
        self.assert_same("after full cache hits", &rest, &expected[60..]);
        let mut half = run::part(&self.tokens, 57, 63, &table);
        half.slice.write_from = 60;
        let rows = run::step(&mut *backend, &[half]).remove(0);
        self.assert_same("partial cache hit", &rows, &expected[57..63]);
        let rest = run::rows(&mut *backend, &self.tokens, 63, 5, &table);
        self.assert_same("after a partial cache hit", &rest, &expected[63..]);
    }

    /// Checks that requesting fewer rows does not change the requested ones.
    fn check_logit_rows(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(16, self.threads[self.threads.len() - 1]);
        let tables = [run::table(0, 90, 16), run::table(6, 90, 16)];
        let mut first = run::part(&self.tokens, 0, 50, &tables[0]);
        first.slice.logit_rows = LogitRows::None;
        let mut second = run::part(&self.other, 0, 40, &tables[1]);
        second.slice.logit_rows = LogitRows::Last;
        let rows = run::step(&mut *backend, &[first.clone(), second.clone()]);
        assert!(rows[0].is_empty());
        self.assert_same("last row", &rows[1], &others[39..40]);
        let rows = run::step(&mut *backend, &[second, first.clone()]);
        self.assert_same("last row, first in the batch", &rows[0], &others[39..40]);
        assert_eq!(run::step(&mut *backend, &[first]), [Vec::<Vec<f32>>::new()]);
        let rows = run::step(
            &mut *backend,
            &[
                run::part(&self.other, 40, 61, &tables[1]),
                run::part(&self.tokens, 50, 51, &tables[0]),
            ],
        );
        self.assert_same("all rows", &rows[0], &others[40..]);
        self.assert_same("after a chunk without logits", &rows[1], &expected[50..51]);
        self.check_last_rows(expected, others);
    }

    /// Checks the last rows of slices, among which is that of a sequence that has begun before and
    /// goes on by one token next to the prompt of another one.
    fn check_last_rows(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let last = |tokens: &[u32], start, end, table: &[BlockId]| {
            let mut part = run::part(tokens, start, end, table);
            part.slice.logit_rows = LogitRows::Last;
            part
        };
        for decode_first in [true, false] {
            let mut backend = self.backend(16, self.threads[self.threads.len() - 1]);
            let tables = [run::table(0, 90, 16), run::table(6, 90, 16)];
            for end in [1, 2, 40] {
                let rows = run::step(&mut *backend, &[last(&self.other, 0, end, &tables[1])]);
                self.assert_same("the last row of a prompt", &rows[0], &others[end - 1..end]);
            }
            let prompt = last(&self.tokens, 0, 50, &tables[0]);
            let decode = last(&self.other, 40, 41, &tables[1]);
            let parts = if decode_first { [decode, prompt] } else { [prompt, decode] };
            let mut rows = run::step(&mut *backend, &parts);
            if !decode_first {
                rows.reverse();
            }
            self.assert_same("a decode next to a prompt", &rows[0], &others[40..41]);
            self.assert_same("a prompt next to a decode", &rows[1], &expected[49..50]);
        }
    }

    /// Checks that hidden states do not depend on chunks, threads, what is cached and what else is
    /// in the batch, and that logits do not depend on the hidden states of other sequences.
    fn check_hidden(&self, others: &[Vec<f32>]) {
        let kind = |mut part: Part, rows| {
            part.slice.logit_rows = rows;
            part
        };
        let all = |part| kind(part, LogitRows::AllHidden);
        let count = self.tokens.len();
        let table = run::table(0, count, 16);
        let whole = all(run::part(&self.tokens, 0, count, &table));
        let expected = run::hidden(&mut *self.backend(16, 1), &[whole]).remove(0);
        assert!(expected.iter().flatten().all(|value| value.is_finite()), "{}", self.name);
        let tables = [run::table(0, count, 4), run::table(40, self.other.len(), 4)];
        for &threads in self.threads {
            let mut backend = self.backend(4, threads);
            let mut states = Vec::new();
            for start in (0..60).step_by(20) {
                let part = all(run::part(&self.tokens, start, start + 20, &tables[0]));
                let other = run::part(&self.other, start, start + 20, &tables[1]);
                // Each way of computing a sequence has a recurrent state of its own.
                let in_slot = |slot, part: &Part| run::in_slot(&*backend, slot, part.clone());
                if start < 40 {
                    let parts = [in_slot(10, &other), in_slot(11, &part)];
                    let again = [in_slot(12, &other), in_slot(13, &part)];
                    states.extend(run::hidden(&mut *backend, &parts).remove(1));
                    let logits = run::step(&mut *backend, &again).remove(0);
                    let rows = start..start + 20;
                    self.assert_same("logits next to hidden states", &logits, &others[rows]);
                } else {
                    let part = in_slot(11, &part);
                    states.extend(run::hidden(&mut *backend, &[part]).remove(0));
                }
            }
            self.assert_same("hidden states in chunks", &states, &expected[..60]);
            if self.has_states() {
                // A full hit resumes from a checkpoint; see `states.rs`.
                continue;
            }
            let mut hit = run::part(&self.tokens, 59, 60, &tables[0][..15]);
            hit.slice.write_from = 60;
            let last = kind(hit, LogitRows::LastHidden);
            let other = kind(run::part(&self.other, 40, 50, &tables[1]), LogitRows::Last);
            let states = run::hidden(&mut *backend, &[last, other.clone()]).remove(0);
            self.assert_same("hidden state of a full hit", &states, &expected[59..60]);
            let silent = kind(run::part(&self.tokens, 60, 61, &tables[0]), LogitRows::None);
            let logits = run::step(&mut *backend, &[silent, other]).remove(1);
            self.assert_same("logits after hidden states", &logits, &others[49..50]);
        }
    }

    /// Checks what depends on which rows of a step have an output.
    pub(crate) fn check_outputs(&self) {
        let expected = self.reference(&self.tokens);
        let others = self.reference(&self.other);
        assert_ne!(others[40], expected[40], "{}: the sequences must differ", self.name);
        self.check_logit_rows(&expected, &others);
        self.check_hidden(&others);
    }

    /// Checks everything.
    pub(crate) fn check(&self) {
        let expected = self.reference(&self.tokens);
        let others = self.reference(&self.other);
        self.assert_same("a common prefix", &others[..34], &expected[..34]);
        self.check_chunking(&expected);
        self.check_mixed_batch(&expected, &others);
        self.check_proposals(&expected);
        match self.has_states() {
            true => self.check_states(&expected, &others),
            false => self.check_shared_blocks(&expected, &others),
        }
        self.check_outputs();
    }
}
