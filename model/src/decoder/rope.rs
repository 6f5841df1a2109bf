//! Tables of the cosines and sines of a rotary embedding, computed once per position.

use crate::config::Rope;

/// Minimum number of positions of a table, so that a short conversation does not grow it twice.
const POSITIONS_MIN: usize = 256;

/// The table of one rotary embedding. It grows with the positions in use, so that its size depends
/// on the actual context lengths and not on the model's maximum.
#[derive(Debug)]
pub(super) struct RopeTable {
    rope: Rope,
    rotary_dim: usize,
    max_positions: usize,
    /// `[positions, rotary_dim / 2]`.
    cos: Vec<f32>,
    /// `[positions, rotary_dim / 2]`.
    sin: Vec<f32>,
}

impl RopeTable {
    pub(super) fn new(rope: &Rope, rotary_dim: usize, max_positions: usize) -> Self {
        let rope = rope.clone();
        Self { rope, rotary_dim, max_positions, cos: Vec::new(), sin: Vec::new() }
    }

    /// Grows the table to at least the positions `0..count`.
    pub(super) fn grow(&mut self, count: usize) {
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

    /// The cosines and sines of a position, `[rotary_dim / 2]` each.
    pub(super) fn at(&self, position: u32) -> (&[f32], &[f32]) {
        let half = self.rotary_dim / 2;
        let range = position as usize * half..(position as usize + 1) * half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RopeScaling;

    /// Goal: a table that grows in steps equals one that grows at once, and does not grow beyond
    /// the maximum.
    #[test]
    fn growing_in_steps_leads_to_the_same_table() {
        let rope = Rope { theta: 10000.0, scaling: RopeScaling::None };
        let mut grown = RopeTable::new(&rope, 6, 1000);
        for count in [1, 3, 300, 299, 1000] {
            grown.grow(count);
        }
        let mut whole = RopeTable::new(&rope, 6, 1000);
        whole.grow(1000);
        assert_eq!((&grown.cos, &grown.sin), (&whole.cos, &whole.sin));
        assert_eq!(whole.cos.len(), 1000 * 3);
        let (cos, sin) = whole.at(7);
        assert_eq!(cos[0], 7f32.cos());
        assert_eq!(sin[0], 7f32.sin());
    }
}
