//! The kernel of recurrent layers.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::host::Program;

/// The sizes of a launch.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    key_heads: usize,
    key_dim: usize,
    value_dim: usize,
    grouped: bool,
    /// Whether each element of a key has a decay of its own.
    by_key: bool,
    delta: bool,
}

impl Sizes {
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    fn decays(&self) -> usize {
        if self.by_key { self.key_dim } else { 1 }
    }

    fn width(&self) -> usize {
        self.channels() + self.heads * (self.decays() + 1)
    }
}

/// The outputs of the rows and the states after the segments of a slice, in f64. `rows` are the
/// slice's rows, and `segments` the numbers of rows of its segments.
fn slice(sizes: Sizes, states: &[f32], rows: &[f32], segments: &[usize]) -> (Vec<f64>, Vec<f64>) {
    let Sizes { heads, key_heads, key_dim, value_dim, grouped, delta, .. } = sizes;
    let number = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let mut states = number(states);
    let (mut outputs, mut after) = (Vec::new(), Vec::new());
    let mut rows = rows.chunks_exact(sizes.width());
    for &count in segments {
        for row in rows.by_ref().take(count).map(number) {
            let (channels, factors) = row.split_at(sizes.channels());
            let (queries, rest) = channels.split_at(key_heads * key_dim);
            let (keys, values) = rest.split_at(key_heads * key_dim);
            let (decays, strengths) = factors.split_at(heads * sizes.decays());
            for head in 0..heads {
                let at = if grouped { head * key_heads / heads } else { head % key_heads };
                let part = |all: &[f64]| all[at * key_dim..][..key_dim].to_vec();
                let (query, key) = (part(queries), part(keys));
                let state = &mut states[head * key_dim * value_dim..][..key_dim * value_dim];
                for (i, row) in state.chunks_exact_mut(value_dim).enumerate() {
                    let decay = decays[head * sizes.decays() + i * (sizes.decays() - 1).min(1)];
                    row.iter_mut().for_each(|value| *value *= decay);
                }
                for column in 0..value_dim {
                    let read = |by: &[f64], state: &[f64]| -> f64 {
                        by.iter()
                            .enumerate()
                            .map(|(i, by)| by * state[i * value_dim + column])
                            .sum()
                    };
                    let memory = if delta { read(&key, state) } else { 0.0 };
                    let update = strengths[head] * (values[head * value_dim + column] - memory);
                    for (i, key) in key.iter().enumerate() {
                        state[i * value_dim + column] += key * update;
                    }
                    outputs.push(read(&query, state));
                }
            }
        }
        after.extend_from_slice(&states);
    }
    (outputs, after)
}

/// Goal: for the delta rule with one decay and with one for each element of the keys, and for the
/// additive rule, outputs and the states after each segment are as the definition says, whatever the
/// launch, and nothing else is written.
#[test]
fn recurrences_are_as_their_definition_says() {
    let program = Program::compile("recurrence.cpp");
    let mut random = SmallRng::seed_from_u64(3);
    let sizes = Sizes {
        heads: 6,
        key_heads: 2,
        key_dim: 5,
        value_dim: 7,
        grouped: true,
        by_key: false,
        delta: true,
    };
    for (sizes, threads, parts) in [
        (sizes, 64, 1),
        (Sizes { grouped: false, ..sizes }, 2, 2),
        (Sizes { by_key: true, value_dim: 16, ..sizes }, 3, 4),
        (Sizes { delta: false, key_heads: 1, key_dim: 1, ..sizes }, 1, 1),
        (Sizes { delta: false, value_dim: 1, ..sizes }, 8, 3),
    ] {
        // The first slice has three segments.
        let segments: [&[usize]; 3] = [&[2, 1, 4], &[1], &[3]];
        let mut numbers = |count: usize, range: std::ops::Range<f32>| -> Vec<f32> {
            (0..count).map(|_| random.random_range(range.clone())).collect()
        };
        let state_len = sizes.heads * sizes.key_dim * sizes.value_dim;
        let row_count: usize = segments.iter().copied().flatten().sum();
        let states = numbers(3 * state_len, -1.0..1.0);
        let mut rows = Vec::new();
        for _ in 0..row_count {
            rows.extend(numbers(sizes.channels(), -1.0..1.0));
            rows.extend(numbers(sizes.width() - sizes.channels(), 0.1..1.0));
        }
        let (mut starts, mut first_rows) = (vec![0_u32], vec![0_u32]);
        for slice in segments {
            starts.push(starts[starts.len() - 1] + slice.len() as u32);
            for count in slice {
                first_rows.push(first_rows[first_rows.len() - 1] + *count as u32);
            }
        }
        let (mut outputs, mut after) = (Vec::new(), Vec::new());
        let mut first = 0;
        for (index, segments) in segments.into_iter().enumerate() {
            let count: usize = segments.iter().sum();
            let own = &rows[first * sizes.width()..][..count * sizes.width()];
            let state = &states[index * state_len..][..state_len];
            let (own, states) = slice(sizes, state, own, segments);
            outputs.extend(own);
            after.extend(states);
            first += count;
        }
        let keys = sizes.key_heads * sizes.key_dim;
        let arguments = [
            threads,
            row_count,
            3,
            sizes.heads,
            sizes.key_dim,
            sizes.value_dim,
            sizes.channels(),
            sizes.width(),
            0,
            keys,
            2 * keys,
            sizes.key_heads,
            usize::from(sizes.grouped),
            sizes.decays(),
            usize::from(sizes.delta),
            parts,
            5,
        ];
        let arguments = arguments.map(|number| number.to_string());
        let mut input: Vec<u8> =
            states.iter().chain(&rows).flat_map(|value| value.to_ne_bytes()).collect();
        input.extend(starts.iter().chain(&first_rows).flat_map(|n| n.to_ne_bytes()));
        let got = program.run(&arguments, &input);
        let got: Vec<f32> = got.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
        let expected = [outputs, after, vec![0.0]].concat();
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            let error = 1e-5 * expected.abs().max(1.0);
            assert!((f64::from(*got) - expected).abs() <= error, "{sizes:?}: {got}, {expected}");
        }
    }
}
