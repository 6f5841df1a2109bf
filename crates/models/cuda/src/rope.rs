//! Tables of the cosines and sines of a rotary embedding on the device.

use candle_core::{Device, Result, Tensor};
use stolon_checkpoint::Rope;

/// Minimum number of positions of a table that is computed.
const POSITIONS_MIN: usize = 256;

/// The table of one rotary embedding. It grows with the largest position in use.
#[derive(Debug)]
pub(crate) struct RopeTable {
    rope: Rope,
    rotary_dim: usize,
    max_positions: usize,
    /// `None` before the first use.
    rotations: Option<Rotations>,
}

/// The cosines and sines of the positions `0, 1, ..`, or of the rows of a step, `[rows, rotary_dim
/// / 2]` each in f32. Clones share the tensors.
#[derive(Clone, Debug)]
pub(crate) struct Rotations {
    cos: Tensor,
    sin: Tensor,
}

impl RopeTable {
    pub(crate) fn new(rope: &Rope, rotary_dim: usize, max_positions: usize) -> Self {
        Self { rope: rope.clone(), rotary_dim, max_positions, rotations: None }
    }

    /// Returns the table with at least `count` positions, and grows it if necessary.
    pub(crate) fn rotations(&mut self, count: usize, device: &Device) -> Result<Rotations> {
        if let Some(rotations) = &self.rotations
            && count <= rotations.cos.dim(0)?
        {
            return Ok(rotations.clone());
        }
        let most = self.max_positions.max(count);
        let positions = count.next_power_of_two().max(POSITIONS_MIN).min(most);
        let (cos, sin) = self.rope.rotations(self.rotary_dim, 0..positions);
        let table = |values| Tensor::from_vec(values, (positions, self.rotary_dim / 2), device);
        let rotations = Rotations { cos: table(cos)?, sin: table(sin)? };
        Ok(self.rotations.insert(rotations).clone())
    }
}

impl Rotations {
    /// The rotations at `positions`, `[rows]`, which the table must contain.
    pub(crate) fn at(&self, positions: &Tensor) -> Result<Self> {
        let rows = |table: &Tensor| table.index_select(positions, 0);
        Ok(Self { cos: rows(&self.cos)?, sin: rows(&self.sin)? })
    }

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
