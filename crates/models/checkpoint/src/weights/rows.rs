//! Matrices whose rows are interleaved with the rows of other matrices in one matrix of a file.
//!
//! | matrix of a file | contents |
//! |---|---|
//! | `self_attn.q_proj`, with gates (Qwen3-Next) | each head's query, then its gate |
//! | `linear_attn.in_proj_qkvz` (Qwen3-Next) | each key head's query, key, values and gates |
//! | `linear_attn.in_proj_ba` (Qwen3-Next) | each key head's strengths, then its time steps |

use super::{Stored, Weights};
use crate::config::{
    AttentionWeights, DecoderConfig, DeltaNetConfig, DeltaNetWeights, LatentWeights, MixerWeights,
    TensorSpec,
};
use crate::error::ModelError;

/// Runs of successive rows at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// The first row.
    first: usize,
    /// Number of rows of each run.
    len: usize,
    /// Distance from the start of a run to the start of the next one.
    step: usize,
    /// Number of runs.
    count: usize,
}

/// The rows of the file's matrix that belong to a matrix, in the order in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowRuns {
    runs: Vec<Run>,
    /// Number of rows of the file's matrix.
    all_rows: usize,
}

impl RowRuns {
    /// Number of rows of the matrix.
    fn rows(&self) -> usize {
        self.runs.iter().map(|run| run.len * run.count).sum()
    }

    /// Whether the first row of the file's matrix belongs to the matrix. This is true for exactly
    /// one of the matrices that it contains.
    pub(super) fn has_first(&self) -> bool {
        self.runs.iter().any(|run| run.first == 0)
    }

    /// Size of the matrix in bytes, if all rows of the file's matrix have `all` bytes.
    pub(super) fn byte_len(&self, all: usize) -> usize {
        all / self.all_rows.max(1) * self.rows()
    }

    /// Selects the rows of the matrix from the bytes of all rows.
    pub(super) fn select(&self, all: &[u8]) -> Vec<u8> {
        let row_bytes = all.len() / self.all_rows.max(1);
        let mut bytes = Vec::with_capacity(self.byte_len(all.len()));
        for run in &self.runs {
            for index in 0..run.count {
                let start = (run.first + index * run.step) * row_bytes;
                bytes.extend_from_slice(&all[start..start + run.len * row_bytes]);
            }
        }
        bytes
    }
}

/// A tensor of a file, and the tensors whose rows it contains.
struct Division {
    name: String,
    rows: usize,
    parts: Vec<(TensorSpec, Vec<Run>)>,
}

impl DecoderConfig {
    /// The matrices in which files interleave the rows of several matrices: the name and the shape
    /// of each.
    pub(super) fn mixed_matrices(&self) -> Vec<(String, Vec<TensorSpec>)> {
        let matrices = self.divisions().into_iter().filter_map(|Division { name, rows, parts }| {
            let (first, _) = parts.into_iter().next()?;
            let shape = vec![rows, *first.shape.get(1)?];
            Some((name.clone(), vec![TensorSpec { name, shape, role: first.role }]))
        });
        matrices.collect()
    }

    /// The matrices that files may have instead of several: the name of each, its number of rows,
    /// and the matrices whose rows it contains.
    pub(crate) fn combined(&self) -> Vec<(String, usize, Vec<TensorSpec>)> {
        let stacked = self.stacked().into_iter().map(|(name, parts)| {
            let rows = parts.iter().map(|part| part.shape[0]).sum();
            (name, rows, parts)
        });
        let mixed = self.divisions().into_iter();
        let mixed = mixed.filter(|division| division.parts[0].0.shape.len() == 2);
        let mixed = mixed.map(|Division { name, rows, parts }| {
            (name, rows, parts.into_iter().map(|(part, _)| part).collect())
        });
        let latent = self.weights().layers.into_iter().flat_map(|layer| layer.mixers);
        let latent = latent.filter_map(|mixer| match mixer {
            MixerWeights::Latent(LatentWeights { name, keys, values, .. }) => {
                let of_key = keys.iter().map(|key| key.shape[1]);
                let rows = of_key.chain(values.iter().map(|value| value.shape[0])).sum();
                Some((name, rows, keys.into_iter().chain(values).collect()))
            }
            _ => None,
        });
        stacked.chain(mixed).chain(latent).collect()
    }

    /// The tensors in which files interleave the rows of several tensors.
    fn divisions(&self) -> Vec<Division> {
        let mut list = Vec::new();
        let own_gate_matrix = self.architecture.description().own_gate_matrix;
        for mixer in self.weights().layers.into_iter().flat_map(|layer| layer.mixers) {
            match mixer {
                MixerWeights::Attention(attention) if !own_gate_matrix => {
                    add_gated(attention, &mut list);
                }
                MixerWeights::DeltaNet(delta_net) if delta_net.config.grouped => {
                    list.extend(of_delta_net(delta_net).into_iter().flatten());
                }
                _ => {}
            }
        }
        list
    }
}

/// Adds the combined matrix and bias of queries and gates, if there are gates.
fn add_gated(attention: AttentionWeights, list: &mut Vec<Division>) {
    let q = attention.qkv.query;
    let Some(gate) = attention.gate else { return };
    let (len, count) = (attention.config.head_dim, attention.config.heads);
    let run = |first| vec![Run { first, len, step: 2 * len, count }];
    let biases = q.bias.into_iter().zip(gate.bias);
    for (q, gate) in [(q.weight, gate.weight)].into_iter().chain(biases) {
        let (name, rows) = (q.name.clone(), 2 * len * count);
        list.push(Division { name, rows, parts: vec![(q, run(0)), (gate, run(len))] });
    }
}

/// The combined matrices of Qwen3-Next's Gated DeltaNet. `None` if queries, keys and values have
/// separate matrices, as in files of Kimi Linear.
fn of_delta_net(weights: DeltaNetWeights) -> Option<[Division; 2]> {
    let config = weights.config;
    let [qkv] = <[_; 1]>::try_from(weights.qkv).ok()?;
    let DeltaNetConfig { key_heads: count, key_dim, .. } = config;
    let heads = config.value_heads / count;
    let values = heads * config.value_dim;
    let step = 2 * key_dim + 2 * values;
    let run = |first, len| Run { first, len, step, count };
    let (query, key) = (run(0, key_dim), run(key_dim, key_dim));
    let (value, gates) = (run(2 * key_dim, values), run(2 * key_dim + values, values));
    let of_heads = |first| vec![Run { first, len: heads, step: 2 * heads, count }];
    let named = |spec: &TensorSpec, own: &str, name: &str| spec.name.replace(own, name);
    let (qkv, strength) = (qkv.weight, weights.strength.weight);
    let (gate, time_step) = (weights.gate.up.weight, weights.step.up.weight);
    Some([
        Division {
            name: named(&qkv, "in_proj_qkv", "in_proj_qkvz"),
            rows: step * count,
            parts: vec![(qkv, vec![query, key, value]), (gate, vec![gates])],
        },
        Division {
            name: named(&strength, "in_proj_b", "in_proj_ba"),
            rows: 2 * heads * count,
            parts: vec![(strength, of_heads(0)), (time_step, of_heads(heads))],
        },
    ])
}

impl Weights {
    /// Divides tensors in which the rows of several of the configuration's tensors are interleaved.
    /// Rows are selected when a tensor is read.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] for another number of rows.
    pub(super) fn split_rows(&mut self, config: &DecoderConfig) -> Result<(), ModelError> {
        self.divide(config.divisions())
    }

    /// Divides the matrices `B` of an adapter whose model's tensors are divided by
    /// [`Weights::split_fused`], [`Weights::split_rows`] and [`Weights::split_latent`]. They have
    /// the same names and rows as the model's tensors, and any number of columns.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] for another number of rows.
    pub(crate) fn split_updates(&mut self, config: &DecoderConfig) -> Result<(), ModelError> {
        let mut stacked = config.stacked();
        for (name, parts) in &mut stacked {
            self.take_columns(name, parts.iter_mut());
        }
        self.split_stacked(stacked)?;
        let mut divisions = config.divisions();
        for Division { name, parts, .. } in &mut divisions {
            self.take_columns(name, parts.iter_mut().map(|(spec, _)| spec));
        }
        self.divide(divisions)?;
        self.split_latent(config, true)
    }

    /// Sets the number of columns of `parts` to the number of columns of the matrix `name`.
    fn take_columns<'a>(&self, name: &str, parts: impl Iterator<Item = &'a mut TensorSpec>) {
        let Some([_, columns]) = self.shape(name) else { return };
        parts.for_each(|part| part.shape[1] = *columns);
    }

    fn divide(&mut self, divisions: Vec<Division>) -> Result<(), ModelError> {
        for Division { name, rows, parts } in divisions {
            let columns = parts[0].0.shape[1..].to_vec();
            let shape: Vec<usize> = [rows].into_iter().chain(columns).collect();
            // `check` reports missing tensors.
            let Some(stored) = self.take_whole(&name, shape)? else { continue };
            for (TensorSpec { name, shape, role: _ }, runs) in parts {
                let runs = Some(RowRuns { runs, all_rows: rows });
                self.insert(name, Stored { shape, runs, ..stored.clone() })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the rows of a matrix are selected in the order of its runs.
    #[test]
    fn rows_are_selected_in_order() {
        let runs = vec![
            Run { first: 1, len: 2, step: 4, count: 2 },
            Run { first: 0, len: 1, step: 4, count: 2 },
        ];
        let runs = RowRuns { runs, all_rows: 8 };
        let all: Vec<u8> = (0..8).flat_map(|row| [row, row]).collect();
        assert_eq!(runs.select(&all), [1, 1, 2, 2, 5, 5, 6, 6, 0, 0, 4, 4]);
        assert_eq!((runs.rows(), runs.byte_len(16)), (6, 12));
        assert!(runs.has_first());
    }
}
