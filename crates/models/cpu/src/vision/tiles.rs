//! The projector of Moondream, which combines the features of the whole picture and of its tiles
//! into embeddings.
//!
//! The tiles overlap. Together, their features are the features of the picture at a higher
//! resolution. They are pooled to the resolution of the picture: each position gets the mean of its
//! part.

use std::ops::Range;

use stolon_checkpoint::config::{LinearWeights, TowerConfig};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Operands, Path, RowSums, Sink};

use crate::decoder::linear::{Linear, Loader, multiply, project};
use crate::workers::Workers;

/// The MLP, and the overlap of tiles.
#[derive(Debug)]
pub(super) struct Tiles {
    /// Number of patches along the edge of the picture and of each tile.
    grid: usize,
    /// Margin of a tile in patches.
    margin: usize,
    /// Width of the features of a patch.
    width: usize,
    up: Linear,
    down: Linear,
}

impl Tiles {
    pub(super) fn load(
        tower: &TowerConfig,
        margin: usize,
        [up, down]: &[LinearWeights; 2],
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let (up, down) = (loader.linear(up)?, loader.linear(down)?);
        Ok(Self { grid: tower.grid(), margin, width: tower.hidden_size, up, down })
    }

    /// Size in bytes of the packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.up.bytes() + self.down.bytes()
    }

    /// The embeddings of an image, `[grid^2, output_size]`. `features` has the features of the
    /// picture, followed by the features of its tiles, each `[grid^2, hidden_size]`. `tiles` is the
    /// number of columns and of rows of tiles.
    pub(super) fn project(
        &self,
        features: &[Vec<f32>],
        tiles: [usize; 2],
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        let (rows, width) = (self.grid * self.grid, self.width);
        let mut packed = Operands::default();
        packed.reset(rows, &[&self.up.matrix]);
        packed.fill(workers.for_pass(rows, 2 * width), |_, first, block| {
            for (index, row) in block.chunks_exact_mut(2 * width).enumerate() {
                let position = first + index;
                let (own, pooled) = row.split_at_mut(width);
                own.copy_from_slice(&features[0][position * width..][..width]);
                let at = [position % self.grid, position / self.grid];
                self.pool(&features[1..], tiles, at, pooled, path);
            }
        });
        let mut inner = Operands::default();
        inner.reset(rows, &[&self.down.matrix]);
        let gelu = |sums: RowSums<'_>| {
            self.up.add_bias(path, sums.feature, sums.first);
            kernels::gelu_tanh_in_place(path, sums.first);
        };
        multiply(&self.up, &packed, &gelu, Sink::Operands(inner.only()), (path, workers));
        let mut values = vec![0.0; rows * self.down.matrix.out_features()];
        project(&self.down, &inner, Sink::Rows(&mut values), path, workers);
        values
    }

    /// Writes the mean of the tiles' features at a position of the picture to `out`. `at` is its
    /// column and row.
    fn pool(
        &self,
        features: &[Vec<f32>],
        tiles: [usize; 2],
        at: [usize; 2],
        out: &mut [f32],
        path: Path,
    ) {
        let [columns, rows] = [0, 1].map(|axis| self.part(at[axis], tiles[axis]));
        let count = columns.len() * rows.len();
        out.fill(0.0);
        for y in rows {
            let (row, y) = self.place(y, tiles[1]);
            for x in columns.clone() {
                let (column, x) = self.place(x, tiles[0]);
                let tile = &features[row * tiles[0] + column];
                let patch = &tile[(y * self.grid + x) * self.width..][..self.width];
                kernels::add(path, out, patch);
            }
        }
        kernels::scale(path, out, 1.0 / count as f32);
    }

    /// The range of patches, along an edge of `tiles` tiles, that belong to position `index` of the
    /// picture.
    fn part(&self, index: usize, tiles: usize) -> Range<usize> {
        let length = (self.grid - 2 * self.margin) * tiles + 2 * self.margin;
        index * length / self.grid..((index + 1) * length).div_ceil(self.grid)
    }

    /// The tile that patch `index` along an edge of `tiles` tiles is taken from, and its index in
    /// that tile. Where the margins of two tiles overlap, a patch is taken from the tile in whose
    /// margin it is not.
    fn place(&self, index: usize, tiles: usize) -> (usize, usize) {
        let step = self.grid - 2 * self.margin;
        let tile = (index.saturating_sub(self.margin) / step).min(tiles - 1);
        (tile, index - tile * step)
    }
}
