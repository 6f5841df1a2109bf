//! The recurrences against a slow one in f64, and the independence of their bits from how the
//! tokens are divided.

use super::*;
use crate::reference::{random, worst};

/// Inputs of `tokens` tokens of one head, in rows that have other values next to them.
struct Inputs {
    rule: Rule,
    tokens: usize,
    key_dim: usize,
    value_dim: usize,
    /// `[tokens, key_dim + key_dim + value_dim + 3]`.
    rows: Vec<f32>,
    /// `[tokens, decays + 1]`: decays and strength.
    gates: Vec<f32>,
}

impl Inputs {
    fn new(rule: Rule, tokens: usize, key_dim: usize, value_dim: usize) -> Self {
        let scale = (key_dim as f32).sqrt().recip();
        let rows = random(7, tokens * (2 * key_dim + value_dim + 3));
        let rows = rows.iter().map(|value| value * scale).collect();
        let gates = random(8, (rule.decays(key_dim) + 1) * tokens);
        let gates = gates.iter().map(|value| 0.55 + 0.45 * value).collect();
        Self { rule, tokens, key_dim, value_dim, rows, gates }
    }

    fn stride(&self) -> usize {
        2 * self.key_dim + self.value_dim + 3
    }

    fn decays(&self) -> usize {
        self.rule.decays(self.key_dim)
    }

    /// The tokens from `first` on.
    fn args(&self, path: Path, first: usize, tokens: usize) -> Recurrence<'_> {
        let rows = |offset| StridedRows {
            values: &self.rows[first * self.stride() + offset..],
            stride: self.stride(),
        };
        let stride = self.decays() + 1;
        let gates = |offset| StridedRows { values: &self.gates[stride * first + offset..], stride };
        Recurrence {
            path,
            rule: self.rule,
            tokens,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            queries: rows(0),
            keys: rows(self.key_dim),
            values: rows(2 * self.key_dim),
            decays: gates(0),
            strengths: gates(self.decays()),
        }
    }

    fn zero(&self) -> Vec<f32> {
        vec![0.0; Recurrence::state_len(self.key_dim, self.value_dim)]
    }

    /// The state and the outputs of all tokens, computed in parts of `chunk` tokens.
    fn run(&self, path: Path, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut state, mut out) = (self.zero(), vec![f32::NAN; self.tokens * self.value_dim]);
        for first in (0..self.tokens).step_by(chunk) {
            let tokens = chunk.min(self.tokens - first);
            let out = &mut out[first * self.value_dim..][..tokens * self.value_dim];
            self.args(path, first, tokens).run(&mut state, out);
        }
        (state, out)
    }

    /// The outputs and the state `[key_dim, value_dim]` in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (keys, width) = (self.key_dim, self.value_dim);
        let mut state = vec![0.0; keys * width];
        let mut out = Vec::new();
        let gates = self.gates.chunks_exact(self.decays() + 1);
        for (row, gates) in self.rows.chunks_exact(self.stride()).zip(gates) {
            let at = |index: usize| f64::from(row[index]);
            let (decays, strength) = gates.split_at(self.decays());
            let strength = f64::from(strength[0]);
            let decay = |i: usize| f64::from(decays[i % decays.len()]);
            for column in 0..width {
                let cells = |state: &[f64], from: usize| -> f64 {
                    (0..keys).map(|i| at(from + i) * state[i * width + column]).sum()
                };
                (0..keys).for_each(|i| state[i * width + column] *= decay(i));
                let memory = match self.rule {
                    Rule::Delta | Rule::DeltaByKey => cells(&state, keys),
                    Rule::Additive => 0.0,
                };
                let update = strength * (at(2 * keys + column) - memory);
                (0..keys).for_each(|i| state[i * width + column] += at(keys + i) * update);
                out.push(cells(&state, 0));
            }
        }
        (out, state)
    }
}

const SIZES: [(usize, usize, usize); 5] =
    [(1, 1, 1), (9, 5, 7), (23, 16, 16), (40, 33, 50), (70, 128, 128)];

/// Goal: on every instruction set, outputs and states are those of the definition, and the unused
/// columns of the last slab stay zero.
#[test]
fn a_recurrence_equals_its_definition() {
    for rule in [Rule::Delta, Rule::DeltaByKey, Rule::Additive] {
        for (tokens, key_dim, value_dim) in SIZES {
            let inputs = Inputs::new(rule, tokens, key_dim, value_dim);
            let (expected, expected_state) = inputs.reference();
            for path in Path::supported() {
                let (state, out) = inputs.run(path, tokens);
                let case = format!("{path} {rule:?} {tokens} {key_dim} {value_dim}");
                assert!(worst(&out, &expected).0 < 1e-5, "{case}: {:?}", worst(&out, &expected));
                for (slab, state) in state.chunks_exact(key_dim * LANES).enumerate() {
                    for (i, row) in state.chunks_exact(LANES).enumerate() {
                        for (lane, got) in row.iter().enumerate() {
                            let column = slab * LANES + lane;
                            let want = if column < value_dim {
                                expected_state[i * value_dim + column]
                            } else {
                                0.0
                            };
                            assert!((f64::from(*got) - want).abs() < 1e-5, "{case} {i} {column}");
                        }
                    }
                }
            }
        }
    }
}

/// Goal: the bits of outputs and state do not depend on how the tokens are divided into calls.
#[test]
fn bits_do_not_depend_on_the_division_into_calls() {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for rule in [Rule::Delta, Rule::DeltaByKey, Rule::Additive] {
        for (tokens, key_dim, value_dim) in SIZES {
            let inputs = Inputs::new(rule, tokens, key_dim, value_dim);
            for path in Path::supported() {
                let (state, out) = inputs.run(path, tokens);
                for chunk in [1, 2, 7, 32] {
                    let (chunked_state, chunked_out) = inputs.run(path, chunk);
                    assert_eq!(bits(&chunked_state), bits(&state), "{path} {rule:?} {chunk}");
                    assert_eq!(bits(&chunked_out), bits(&out), "{path} {rule:?} {chunk}");
                }
            }
        }
    }
}

/// Goal: inputs of too few tokens panic instead of reading other memory.
#[test]
#[should_panic(expected = "the inputs of 4 tokens")]
fn missing_inputs_panic() {
    let inputs = Inputs::new(Rule::Delta, 3, 4, 4);
    let mut out = vec![0.0; 16];
    inputs.args(Path::PORTABLE, 0, 4).run(&mut inputs.zero(), &mut out);
}

/// Goal: a state of another size panics instead of being written beyond its end.
#[test]
#[should_panic(expected = "the state has another size")]
fn a_state_of_another_size_panics() {
    let inputs = Inputs::new(Rule::Delta, 3, 4, 20);
    let mut out = vec![0.0; 60];
    inputs.args(Path::PORTABLE, 0, 3).run(&mut [0.0; 64], &mut out);
}
