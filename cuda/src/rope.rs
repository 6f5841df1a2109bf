//! Tables of the cosines and sines of a rotary embedding on the device.

use candle_core::{Device, Result, Tensor};
use stolon_model::Rope;

/// Minimum number of positions of a table.
const POSITIONS_MIN: usize = 256;

/// The table of one rotary embedding. It grows with the positions in use.
#[derive(Debug)]
pub(crate) struct RopeTable {
    rope: Rope,
    rotary_dim: usize,
    max_positions: usize,
    /// Number of positions of the table.
    known: usize,
    /// Cosines and sines, `[positions, rotary_dim / 2]` each in f32; `None` before the first use.
    table: Option<(Tensor, Tensor)>,
}

/// The cosines and sines of the rows of a step, `[rows, rotary_dim / 2]` each.
#[derive(Debug)]
pub(crate) struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl RopeTable {
    pub(crate) fn new(rope: &Rope, rotary_dim: usize, max_positions: usize) -> Self {
        Self { rope: rope.clone(), rotary_dim, max_positions, known: 0, table: None }
    }

    /// The rotations of `positions`, a tensor of row positions below `count`.
    pub(crate) fn rotation(&mut self, positions: &Tensor, count: usize) -> Result<Rotation> {
        let (cos, sin) = match self.table.take() {
            Some(table) if count <= self.known => table,
            _ => self.make(count, positions.device())?,
        };
        let rotation =
            Rotation { cos: cos.index_select(positions, 0)?, sin: sin.index_select(positions, 0)? };
        self.table = Some((cos, sin));
        Ok(rotation)
    }

    fn make(&mut self, count: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let most = self.max_positions.max(count);
        self.known = count.next_power_of_two().max(POSITIONS_MIN).min(most);
        let (cos, sin) = self.rope.rotations(self.rotary_dim, 0..self.known);
        let shape = (self.known, self.rotary_dim / 2);
        Ok((Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?))
    }
}

impl Rotation {
    /// Rotates the leading elements of each head of `x`, `[rows, heads, head_dim]` in f32.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let (_, _, head_dim) = x.dims3()?;
        let rotated = 2 * self.cos.dim(1)?;
        let rotate = |x: &Tensor| {
            candle_nn::rotary_emb::rope_thd(&x.contiguous()?.unsqueeze(0)?, &self.cos, &self.sin)?
                .squeeze(0)
        };
        if rotated == head_dim {
            return rotate(x);
        }
        let rest = x.narrow(2, rotated, head_dim - rotated)?;
        Tensor::cat(&[rotate(&x.narrow(2, 0, rotated)?)?, rest], 2)
    }
}
