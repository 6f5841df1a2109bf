//! Tables of the cosines and sines of a rotary embedding, computed once per position. Positions in
//! a grid image have three coordinates, and their rows are composed for each step.

use stolon_checkpoint::config::Rope;

/// Minimum number of positions of a table, so that a short conversation grows it only once.
const POSITIONS_MIN: usize = 256;

/// The rotation of a row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotation {
    /// By one position, as for text.
    Position(u32),
    /// By three coordinates: an index in the coordinates of the step ([`RopeTable::place`]).
    Grid(u32),
}

/// The table of one rotary embedding. It grows with the positions in use, so that its size depends
/// on the actual context lengths and not on the model's maximum.
#[derive(Debug)]
pub(crate) struct RopeTable {
    rope: Rope,
    rotary_dim: usize,
    max_positions: usize,
    /// Cosines of the positions, `[positions, rotary_dim / 2]`.
    cos: Vec<f32>,
    /// Sines of the positions, `[positions, rotary_dim / 2]`.
    sin: Vec<f32>,
    /// Cosines of the step's rows with three coordinates, `[rows, rotary_dim / 2]`.
    grid_cos: Vec<f32>,
    /// Sines of these rows, `[rows, rotary_dim / 2]`.
    grid_sin: Vec<f32>,
}

impl RopeTable {
    pub(crate) fn new(rope: &Rope, rotary_dim: usize, max_positions: usize) -> Self {
        let rope = rope.clone();
        let [cos, sin, grid_cos, grid_sin] = [const { Vec::new() }; 4];
        Self { rope, rotary_dim, max_positions, cos, sin, grid_cos, grid_sin }
    }

    /// Grows the table to at least the positions `0..count`.
    pub(crate) fn grow(&mut self, count: usize) {
        let known = self.cos.len() / (self.rotary_dim / 2);
        if count <= known {
            return;
        }
        let wanted =
            count.next_power_of_two().max(POSITIONS_MIN).min(self.max_positions.max(count));
        let (cos, sin) = self.rope.rotations(self.rotary_dim, known..wanted);
        self.cos.extend(cos);
        self.sin.extend(sin);
    }

    /// Composes the cosines and sines of the step's rows with three coordinates: temporal position,
    /// row and column. The table must already contain all of these positions.
    pub(super) fn place(&mut self, coordinates: &[[u32; 3]]) {
        let half = self.rotary_dim / 2;
        self.grid_cos.clear();
        self.grid_sin.clear();
        for coordinates in coordinates {
            let at = |pair| coordinates[self.rope.axis(pair)] as usize * half + pair;
            self.grid_cos.extend((0..half).map(|pair| self.cos[at(pair)]));
            self.grid_sin.extend((0..half).map(|pair| self.sin[at(pair)]));
        }
    }

    /// The cosines and sines of a row, `[rotary_dim / 2]` each.
    pub(crate) fn at(&self, rotation: Rotation) -> (&[f32], &[f32]) {
        let half = self.rotary_dim / 2;
        let (cos, sin, row) = match rotation {
            Rotation::Position(position) => (&self.cos, &self.sin, position as usize),
            Rotation::Grid(index) => (&self.grid_cos, &self.grid_sin, index as usize),
        };
        let range = row * half..(row + 1) * half;
        (&cos[range.clone()], &sin[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stolon_checkpoint::config::RopeScaling;

    /// Goal: a table that grows in steps equals one that grows at once, and does not grow beyond
    /// the maximum.
    #[test]
    fn growing_in_steps_leads_to_the_same_table() {
        let rope = Rope { theta: 10000.0, scaling: RopeScaling::None, sections: None };
        let mut grown = RopeTable::new(&rope, 6, 1000);
        for count in [1, 3, 300, 299, 1000] {
            grown.grow(count);
        }
        let mut whole = RopeTable::new(&rope, 6, 1000);
        whole.grow(1000);
        assert_eq!((&grown.cos, &grown.sin), (&whole.cos, &whole.sin));
        assert_eq!(whole.cos.len(), 1000 * 3);
        let (cos, sin) = whole.at(Rotation::Position(7));
        assert_eq!(cos[0], 7f32.cos());
        assert_eq!(sin[0], 7f32.sin());
    }

    /// Goal: a row with three coordinates takes each pair from the position of its coordinate, and
    /// has the bits of a single position if the three are equal.
    #[test]
    fn rows_of_grids_have_the_pairs_of_their_coordinates() {
        let sections = Some([4, 2, 2]);
        let rope = Rope { theta: 10000.0, scaling: RopeScaling::None, sections };
        let mut table = RopeTable::new(&rope, 16, 1000);
        table.grow(30);
        table.place(&[[5, 5, 5], [3, 17, 29]]);
        assert_eq!(table.at(Rotation::Grid(0)), table.at(Rotation::Position(5)));
        let (cos, sin) = table.at(Rotation::Grid(1));
        for (pair, position) in [3, 17, 29, 3, 17, 29, 3, 3].into_iter().enumerate() {
            let (cos_there, sin_there) = table.at(Rotation::Position(position));
            assert_eq!((cos[pair], sin[pair]), (cos_there[pair], sin_there[pair]), "{pair}");
        }
    }
}
