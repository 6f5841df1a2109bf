//! Tests batch invariance: a row of logits depends, bit for bit, only on the tokens of its
//! sequence.

use stolon_backend::{Backend, Draw, LogitRows, StepBatch};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType};
use stolon_model::KvType;

use super::fixture;
use crate::run;

/// A model and two sequences.
struct Subject {
    name: &'static str,
    /// Options without a block size.
    options: CandleOptions,
    tokens: Vec<u32>,
    /// A sequence with the same first 34 tokens.
    other: Vec<u32>,
}

impl Subject {
    fn new(name: &'static str, options: CandleOptions) -> Self {
        let expected = fixture::expected(name);
        let mut tokens = expected.prompt;
        tokens.extend(&expected.greedy[..30]);
        let mut other = tokens.clone();
        other[34..].rotate_left(9);
        other.truncate(61);
        Self { name, options, tokens, other }
    }

    fn backend(&self, block_size: usize) -> CandleBackend {
        let CandleOptions { block_size, kv_budget, .. } = fixture::options(block_size);
        let options = CandleOptions { block_size, kv_budget, ..self.options };
        fixture::backend(fixture::model(self.name), options)
    }

    /// The logits that all others must equal: the whole sequence in one step, alone in the batch.
    fn reference(&self, tokens: &[u32]) -> Vec<Vec<f32>> {
        let table = run::table(0, tokens.len(), 16);
        let rows = run::rows(&mut self.backend(16), tokens, 0, tokens.len(), &table);
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

    fn check_chunks(&self, expected: &[Vec<f32>]) {
        for block_size in [1, 4, 32] {
            let mut backend = self.backend(block_size);
            for chunk in [1, 7, 64] {
                let table = run::table(2, self.tokens.len(), block_size);
                let rows = run::rows(&mut backend, &self.tokens, 0, chunk, &table);
                self.assert_same(&format!("{block_size}, {chunk}"), &rows, expected);
            }
        }
    }

    /// Two sequences in one batch, in changing order and with chunks of different sizes.
    fn check_ragged_batches(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(4);
        let tables = [run::table(0, self.tokens.len(), 4), run::table(40, self.other.len(), 4)];
        let sequences = [&self.tokens, &self.other];
        let (mut got, mut at) = ([Vec::new(), Vec::new()], [0, 0]);
        for round in 0.. {
            let (mut parts, mut owners) = (Vec::new(), Vec::new());
            for index in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                let chunk = [[7, 1, 19], [30, 1, 2]][index][round % 3];
                let to = sequences[index].len().min(at[index] + chunk);
                if at[index] < to && (index == 0 || round >= 2) {
                    parts.push(run::part(sequences[index], at[index], to, &tables[index]));
                    owners.push(index);
                    at[index] = to;
                }
            }
            if parts.is_empty() {
                break;
            }
            for (index, rows) in owners.into_iter().zip(run::step(&mut backend, &parts)) {
                got[index].extend(rows);
            }
        }
        self.assert_same("ragged batch, first", &got[0], expected);
        self.assert_same("ragged batch, second", &got[1], others);
    }

    /// A sequence that reads blocks of another one, and cache hits of the whole prompt, which
    /// compute their last position again without writing it.
    fn check_shared_blocks(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(4);
        let table = run::table(0, self.tokens.len(), 4);
        run::rows(&mut backend, &self.tokens, 0, 33, &table);
        let mut mixed = table[..8].to_vec();
        mixed.extend(run::table(50, self.other.len() - 32, 4));
        let rows = run::rows(&mut backend, &self.other, 32, 64, &mixed);
        self.assert_same("shared blocks", &rows, &others[32..]);
        run::rows(&mut backend, &self.tokens, 33, 64, &table);
        for end in [4, 32, 60] {
            let mut hit = run::part(&self.tokens, end - 1, end, &table[..end / 4]);
            hit.slice.write_from = end;
            let rows = run::step(&mut backend, &[hit]).remove(0);
            self.assert_same("full cache hit", &rows, &expected[end - 1..end]);
        }
        // A slice of other tokens that must not be written, and one of which only the end is.
        let mut foreign = run::part(&[7; 60], 57, 60, &table[..15]);
        foreign.slice.write_from = 60;
        run::step(&mut backend, &[foreign]);
        let mut half = run::part(&self.tokens, 57, 63, &table);
        half.slice.write_from = 60;
        let rows = run::step(&mut backend, &[half]).remove(0);
        self.assert_same("partial cache hit", &rows, &expected[57..63]);
        let rest = run::rows(&mut backend, &self.tokens, 63, 5, &table);
        self.assert_same("after a partial cache hit", &rest, &expected[63..]);
    }

    /// Rows that are not requested do not change those that are.
    fn check_output_rows(&self, expected: &[Vec<f32>], others: &[Vec<f32>]) {
        let mut backend = self.backend(16);
        let tables = [run::table(0, 90, 16), run::table(6, 90, 16)];
        let mut first = run::part(&self.tokens, 0, 50, &tables[0]);
        first.slice.logit_rows = LogitRows::None;
        let mut second = run::part(&self.other, 0, 40, &tables[1]);
        second.slice.logit_rows = LogitRows::Last;
        let rows = run::step(&mut backend, &[first.clone(), second]);
        assert!(rows[0].is_empty());
        self.assert_same("last row", &rows[1], &others[39..40]);
        assert_eq!(run::step(&mut backend, &[first]), [Vec::<Vec<f32>>::new()]);
        let mut hidden = run::part(&self.other, 40, 50, &tables[1]);
        hidden.slice.logit_rows = LogitRows::LastHidden;
        let logits = run::part(&self.tokens, 50, 52, &tables[0]);
        let rows = run::step(&mut backend, &[hidden.clone(), logits.clone()]).remove(1);
        self.assert_same("next to a hidden state", &rows, &expected[50..52]);
        let together = run::hidden(&mut backend, &[logits, hidden.clone()]).remove(1);
        self.assert_same("hidden state", &together, &run::hidden(&mut backend, &[hidden])[0]);
    }

    fn check(&self) {
        let (expected, others) = (self.reference(&self.tokens), self.reference(&self.other));
        self.assert_same("a common prefix", &others[..34], &expected[..34]);
        assert_ne!(others[40], expected[40], "{}: the sequences must differ", self.name);
        self.check_chunks(&expected);
        self.check_ragged_batches(&expected, &others);
        self.check_shared_blocks(&expected, &others);
        self.check_output_rows(&expected, &others);
    }
}

/// Goal: logits and hidden states of every architecture are the same, bit for bit, for all chunks,
/// block sizes, batches and cached prefixes.
#[test]
fn every_architecture_is_batch_invariant() {
    for name in fixture::NAMES {
        Subject::new(name, CandleOptions::default()).check();
    }
}

/// Goal: the same in half precision.
#[test]
fn half_precision_is_batch_invariant() {
    let options = CandleOptions::default();
    for options in [
        CandleOptions { kv_type: Some(KvType::Bf16), ..options },
        CandleOptions { compute_type: Some(ComputeType::F16), ..options },
    ] {
        for name in ["llama", "gemma3", "qwen2_moe", "gpt_oss"] {
            Subject::new(name, options).check();
        }
    }
}

/// Goal: without batch invariance, a warm cache gives the same logits within 0.001 standard
/// deviations.
#[test]
fn without_batch_invariance_warm_is_near_cold() {
    let options = CandleOptions { batch_invariant: false, ..CandleOptions::default() };
    for name in fixture::NAMES {
        let subject = Subject::new(name, options);
        let expected = subject.reference(&subject.tokens);
        let table = run::table(2, subject.tokens.len(), 4);
        let mut backend = subject.backend(4);
        for chunk in [1, 7, 64] {
            let rows = run::rows(&mut backend, &subject.tokens, 0, chunk, &table);
            for (row, expected) in rows.iter().zip(&expected) {
                let difference = fixture::difference(row, expected);
                assert!(difference < 1e-3, "{name}, chunks of {chunk}: {difference}");
            }
        }
    }
}

/// Goal: an empty batch is not an error and has no logits.
#[test]
fn an_empty_batch_has_no_logits() {
    let mut backend = fixture::backend(fixture::model("llama"), fixture::options(16));
    let output = backend.step(&StepBatch::default()).expect("nothing to do");
    assert!(output.logits.is_empty() && output.hidden.is_empty());
}

/// Goal: tokens are drawn from the right rows, also in a batch with other kinds of rows.
#[test]
fn tokens_are_drawn_from_their_rows() {
    let subject = Subject::new("llama", CandleOptions::default());
    let with_rows = |rows: LogitRows, tokens: &[u32], first: u32| {
        let mut part = run::part(tokens, 0, tokens.len(), &run::table(first, tokens.len(), 16));
        part.slice.logit_rows = rows;
        part
    };
    let random = Draw { temperature: 3.0, uniform: 0.6, ..Draw::GREEDY };
    let parts = [
        with_rows(LogitRows::Drawn(Draw::GREEDY), &subject.tokens, 0),
        with_rows(LogitRows::Last, &subject.other, 10),
        with_rows(LogitRows::Drawn(random), &subject.other[..7], 20),
    ];
    let batch = StepBatch {
        tokens: parts.iter().flat_map(|part| part.tokens.clone()).collect(),
        sequences: parts.iter().map(|part| part.slice.clone()).collect(),
    };
    let output = subject.backend(16).step(&batch).expect("a good batch");
    let rows = [(&subject.tokens[..], Draw::GREEDY), (&subject.other[..7], random)];
    let expected = rows.map(|(tokens, draw)| draw.of(&subject.reference(tokens)[tokens.len() - 1]));
    assert_eq!(output.drawn, expected);
    let last = &subject.reference(&subject.other)[subject.other.len() - 1];
    assert_eq!(&output.logits, last);
}
