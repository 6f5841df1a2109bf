//! The projector, which converts the features of patches to embeddings for the decoder.

use stolon_checkpoint::config::{ProjectorConfig, ProjectorWeights, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Operands, Path, Sink};

use super::merger::Mergers;
use super::tiles::Tiles;
use crate::decoder::linear::{Linear, Loader, project};
use crate::workers::Workers;

/// A projector with packed weights.
#[derive(Debug)]
pub(super) enum Projector {
    /// Each square of patches becomes one embedding.
    Squares(Squares),
    /// The patches of the picture and of its tiles are combined into embeddings.
    Tiles(Tiles),
    /// Each square of patches becomes one embedding, after the last layer and after some earlier
    /// ones.
    Mergers(Mergers),
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
            (
                ProjectorWeights::Merger { mlp, deepstack },
                ProjectorConfig::Merger { deepstack: layers, .. },
            ) => Self::Mergers(Mergers::load(config, (mlp, deepstack), layers, loader)?),
            _ => Self::Squares(Squares::load(config, weights, loader)?),
        })
    }

    /// Size in bytes of the packed matrices.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Squares(squares) => squares.linear.bytes(),
            Self::Tiles(tiles) => tiles.bytes(),
            Self::Mergers(mergers) => mergers.bytes(),
        }
    }
}

/// A projector of squares of patches.
#[derive(Debug)]
pub(super) struct Squares {
    square: Square,
    /// The norm of the pooled features; `None` if the features of a square are concatenated.
    pooled_norm: Option<PooledNorm>,
    linear: Linear,
}

/// The squares of patches that become one embedding each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Square {
    /// Edge of a square in patches.
    pub(super) factor: usize,
    /// Width of the features of a patch.
    pub(super) width: usize,
}

/// The RMS norm of Gemma 3.
#[derive(Debug)]
struct PooledNorm {
    weight: Vec<f32>,
    eps: f32,
    /// Offset that is added to the weights.
    offset: f32,
}

impl Squares {
    fn load(
        config: &VisionConfig,
        weights: &ProjectorWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let (linear, pooled_norm) = match (weights, &config.projector) {
            (ProjectorWeights::PixelShuffle(matrix), _) => (loader.unbiased(matrix)?, None),
            (
                ProjectorWeights::AveragePooling { norm, projection },
                ProjectorConfig::AveragePooling { norm_offset: offset, .. },
            ) => {
                let (weight, eps) = (loader.vector(norm)?, config.tower.norm_eps);
                let norm = PooledNorm { weight, eps, offset: *offset };
                (loader.transposed(projection)?, Some(norm))
            }
            _ => unreachable!("`Tiles` and `Mergers` have the other projectors"),
        };
        Ok(Self { square: Square::of(config), pooled_norm, linear })
    }

    /// The embeddings of an image, `[rows, output_size]`. `features` is `[height, width,
    /// hidden_size]`. `grid` is the width and the height in patches, which are multiples of the
    /// factor.
    pub(super) fn project(
        &self,
        features: Vec<f32>,
        grid: [usize; 2],
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        let rows = self.square.count(grid);
        let mut packed = Operands::default();
        packed.reset(rows, &[&self.linear.matrix]);
        let in_features = self.linear.matrix.in_features();
        packed.fill(workers.for_pass(rows, in_features), |_, first, block| {
            for (index, row) in block.chunks_exact_mut(in_features).enumerate() {
                let square = self.square.patches(&features, grid[0], first + index);
                match &self.pooled_norm {
                    Some(norm) => {
                        self.square.pool(square, row, path);
                        let PooledNorm { weight, eps, offset } = norm;
                        kernels::rms_norm_in_place(path, row, weight, *eps, *offset);
                    }
                    None => self.square.concatenate(square, row),
                }
            }
        });
        drop(features);
        let mut values = vec![0.0; rows * self.linear.matrix.out_features()];
        project(&self.linear, &packed, Sink::Rows(&mut values), path, workers);
        values
    }
}

impl Square {
    pub(super) fn of(config: &VisionConfig) -> Self {
        Self { factor: config.projector.factor(), width: config.tower.hidden_size }
    }

    /// Number of squares of an image of `grid` patches.
    pub(super) fn count(self, grid: [usize; 2]) -> usize {
        grid.map(|patches| patches / self.factor).iter().product()
    }

    /// The features of the patches of square `index`, row by row. `columns` is the width of the
    /// image in patches.
    pub(super) fn patches(
        self,
        features: &[f32],
        columns: usize,
        index: usize,
    ) -> impl Iterator<Item = &[f32]> {
        let Self { factor, width } = self;
        let squares = columns / factor;
        let [x, y] = [index % squares, index / squares].map(|square| square * factor);
        (y..y + factor).map(move |y| &features[(y * columns + x) * width..][..factor * width])
    }

    /// Concatenates the features of a square.
    pub(super) fn concatenate<'a>(self, rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.factor * self.width)) {
            out.copy_from_slice(row);
        }
    }

    /// The mean of the features of a square.
    fn pool<'a>(self, rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32], path: Path) {
        out.fill(0.0);
        for row in rows {
            row.chunks_exact(self.width).for_each(|patch| kernels::add(path, out, patch));
        }
        kernels::scale(path, out, 1.0 / (self.factor * self.factor) as f32);
    }
}
