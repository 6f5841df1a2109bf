//! The positions of patches: the vectors that are added to their features, and the rotations of
//! their queries and keys.

use stolon_checkpoint::config::{PatchPositions, Rope, RopeScaling, TowerConfig};

/// The learned positions of a tower.
#[derive(Debug)]
pub(super) struct Positions {
    kind: PatchPositions,
    /// Number of learned positions along each edge.
    side: usize,
    /// Width of a row.
    width: usize,
    head_dim: usize,
    /// The learned positions, `[side^2, width]`.
    table: Vec<f32>,
}

/// The cosines and sines by which the heads of patches are rotated.
#[derive(Debug, Default)]
pub(super) struct Rotations {
    /// Number of rotated pairs of a head; 0 if heads are not rotated.
    pairs: usize,
    /// Cosines, `[patches, pairs]`. `sin` has the same shape.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Two neighbors among the learned positions along an edge, and their weights.
type Neighbors = [(usize, f32); 2];

impl Positions {
    /// Wraps the learned positions in `table`, `[side^2, hidden_size]`.
    pub(super) fn new(config: &TowerConfig, table: Vec<f32>) -> Self {
        let (side, width, head_dim) = (config.grid(), config.hidden_size, config.head_dim());
        Self { kind: config.positions, side, width, head_dim, table }
    }

    /// The position vectors of the patches of an image of `columns` x `rows` patches, row by row:
    /// `[patches, hidden_size]`.
    pub(super) fn learned(&self, [columns, rows]: [usize; 2]) -> Vec<f32> {
        let mut all = vec![0.0; columns * rows * self.width];
        for (index, out) in all.chunks_exact_mut(self.width).enumerate() {
            let (row, column) = (index / columns, index % columns);
            match self.kind {
                PatchPositions::Nearest => {
                    let at = self.nearest(row, rows) * self.side + self.nearest(column, columns);
                    out.copy_from_slice(&self.table[at * self.width..][..self.width]);
                }
                PatchPositions::Rotary { .. } => {
                    self.blend(self.between(row, rows), self.between(column, columns), out);
                }
            }
        }
        all
    }

    /// The learned position of patch `index` of `count` patches along an edge. It is the one at the
    /// same fraction of the edge, so that the learned positions span the whole of an image that is
    /// smaller than the training images. (transformers computes the fraction in f32, and selects a
    /// neighbor instead in some grids that no published model has.)
    fn nearest(&self, index: usize, count: usize) -> usize {
        index * self.side / count
    }

    /// The two learned positions next to patch `index` of `count` patches along an edge, with their
    /// weights. The first and the last patch are at the first and the last learned position. This
    /// is computed in f32 with the same operations as in transformers.
    fn between(&self, index: usize, count: usize) -> Neighbors {
        let last = self.side - 1;
        let place = index as f32 * last as f32 / (count - 1).max(1) as f32;
        let share = place - place.floor();
        let first = (place as usize).min(last);
        [(first, 1.0 - share), ((first + 1).min(last), share)]
    }

    /// Adds the mean of four learned positions, weighted along both edges, to `out`.
    fn blend(&self, rows: Neighbors, columns: Neighbors, out: &mut [f32]) {
        for (row, height) in rows {
            for (column, width) in columns {
                let at = (row * self.side + column) * self.width;
                let share = height * width;
                let values = out.iter_mut().zip(&self.table[at..at + self.width]);
                values.for_each(|(out, value)| *out += share * value);
            }
        }
    }

    /// The rotations of the patches of an image of `columns` x `rows` patches.
    pub(super) fn rotations(&self, [columns, rows]: [usize; 2]) -> Rotations {
        let PatchPositions::Rotary { theta } = self.kind else { return Rotations::default() };
        let rope = Rope { theta, scaling: RopeScaling::None, sections: None };
        let axis = self.head_dim / 2;
        let (cos, sin) = rope.rotations(axis, 0..columns.max(rows));
        let patches = || (0..rows).flat_map(|row| (0..columns).map(move |column| [row, column]));
        let gather = |table: &[f32]| -> Vec<f32> {
            let parts = patches().flatten();
            parts.flat_map(|at| &table[at * axis / 2..(at + 1) * axis / 2]).copied().collect()
        };
        Rotations { pairs: axis, cos: gather(&cos), sin: gather(&sin) }
    }
}

impl Rotations {
    /// The cosines and sines of a patch; empty if heads are not rotated.
    pub(super) fn at(&self, patch: usize) -> (&[f32], &[f32]) {
        let range = patch * self.pairs..(patch + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
