//! The projector: from features of patches to embeddings for the decoder.

use stolon_kernels::{self as kernels, Operands, Path, Sink};

use super::tiles::Tiles;
use crate::config::{ProjectorConfig, ProjectorWeights, VisionConfig};
use crate::decoder::linear::{Linear, Loader, project};
use crate::error::ModelError;
use crate::workers::Workers;

/// A projector with packed weights.
#[derive(Debug)]
pub(super) enum Projector {
    /// Each square of patches becomes one embedding.
    Squares(Squares),
    /// Patches of the picture and of its tiles become embeddings together.
    Tiles(Tiles),
}

impl Projector {
    pub(super) fn load(
        config: &VisionConfig,
        weights: &ProjectorWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        Ok(match (weights, &config.projector) {
            (ProjectorWeights::Tiles(mlp), ProjectorConfig::Tiles { margin, .. }) => {
                Self::Tiles(Tiles::load(&config.tower, *margin, mlp, loader)?)
            }
            _ => Self::Squares(Squares::load(config, weights, loader)?),
        })
    }

    /// Size in bytes of the packed matrices.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Squares(squares) => squares.linear.bytes(),
            Self::Tiles(tiles) => tiles.bytes(),
        }
    }
}

/// A projector of squares of patches.
#[derive(Debug)]
pub(super) struct Squares {
    /// Edge in patches of the square that becomes one embedding.
    factor: usize,
    /// Width of the features of a patch.
    width: usize,
    /// The norm of the pooled features; `None` if the features of a square are concatenated.
    pooled_norm: Option<PooledNorm>,
    linear: Linear,
}

/// The RMS norm of Gemma 3, to whose weight 1 is added.
#[derive(Debug)]
struct PooledNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl Squares {
    fn load(
        config: &VisionConfig,
        weights: &ProjectorWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let (linear, pooled_norm) = match weights {
            ProjectorWeights::PixelShuffle(matrix) => (loader.unbiased(matrix)?, None),
            ProjectorWeights::AveragePooling { norm, projection } => {
                let eps = config.tower.norm_eps;
                let norm = PooledNorm { weight: loader.vector(norm)?, eps };
                (loader.transposed(projection)?, Some(norm))
            }
            ProjectorWeights::Tiles(_) => unreachable!("`Tiles` has this projector"),
        };
        let factor = config.projector.factor();
        Ok(Self { factor, width: config.tower.hidden_size, pooled_norm, linear })
    }

    /// The embeddings of an image, `[rows, output_size]`. `features` is
    /// `[height, width, hidden_size]`, and `grid` is the width and the height in patches, which are
    /// multiples of the factor.
    pub(super) fn project(
        &self,
        features: Vec<f32>,
        grid: [usize; 2],
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        let squares = grid.map(|patches| patches / self.factor);
        let rows = squares[0] * squares[1];
        let mut packed = Operands::default();
        packed.reset(rows, &[&self.linear.matrix]);
        let in_features = self.linear.matrix.in_features();
        packed.fill(workers.for_pass(rows, in_features), |_, first, block| {
            for (index, row) in block.chunks_exact_mut(in_features).enumerate() {
                let square = first + index;
                let corner = [square % squares[0], square / squares[0]].map(|i| i * self.factor);
                match &self.pooled_norm {
                    Some(norm) => {
                        self.pool(&features, grid[0], corner, row, path);
                        kernels::rms_norm_in_place(path, row, &norm.weight, norm.eps, 1.0);
                    }
                    None => self.concatenate(&features, grid[0], corner, row),
                }
            }
        });
        drop(features);
        let mut values = vec![0.0; rows * self.linear.matrix.out_features()];
        project(&self.linear, &packed, Sink::Rows(&mut values), path, workers);
        values
    }

    /// The features of the patches of a square, row by row. `columns` is the width of the image in
    /// patches.
    fn square<'a>(
        &self,
        features: &'a [f32],
        columns: usize,
        [x, y]: [usize; 2],
    ) -> impl Iterator<Item = &'a [f32]> {
        let (factor, width) = (self.factor, self.width);
        (y..y + factor).map(move |y| &features[(y * columns + x) * width..][..factor * width])
    }

    /// Concatenates the features of a square.
    fn concatenate(&self, features: &[f32], columns: usize, corner: [usize; 2], out: &mut [f32]) {
        let rows = self.square(features, columns, corner);
        for (row, out) in rows.zip(out.chunks_exact_mut(self.factor * self.width)) {
            out.copy_from_slice(row);
        }
    }

    /// The mean of the features of a square.
    fn pool(
        &self,
        features: &[f32],
        columns: usize,
        corner: [usize; 2],
        out: &mut [f32],
        path: Path,
    ) {
        out.fill(0.0);
        for row in self.square(features, columns, corner) {
            row.chunks_exact(self.width).for_each(|patch| kernels::add(path, out, patch));
        }
        kernels::scale(path, out, 1.0 / (self.factor * self.factor) as f32);
    }
}
