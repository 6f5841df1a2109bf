//! The projectors of Qwen3-VL and Qwen3.5. They convert the features of squares of patches to
//! embeddings, after the last layer of the tower and, in Qwen3-VL, also after some earlier layers
//! (DeepStack).

use stolon_checkpoint::config::{LinearWeights, MergerWeights, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Operands, Path, RowSums, Sink};

use super::projector::Square;
use super::tower::Norm;
use crate::decoder::linear::{Linear, Loader, multiply, project};
use crate::workers::Workers;

/// The projectors of a tower.
#[derive(Debug)]
pub(super) struct Mergers {
    /// The projector after the last layer.
    last: Merger,
    /// The projectors after earlier layers, with the indices of these layers.
    deepstack: Vec<(usize, Merger)>,
}

/// The MLP that converts squares of patches to embeddings.
#[derive(Debug)]
struct Merger {
    square: Square,
    /// The norm of the concatenated features of a square; `None` if the features of patches have
    /// been normalized.
    norm: Option<Norm>,
    up: Linear,
    down: Linear,
}

impl Mergers {
    /// Packs the MLP of the last layer and the MLPs of the layers `layers`.
    pub(super) fn load(
        config: &VisionConfig,
        (mlp, deepstack): (&[LinearWeights; 2], &[MergerWeights]),
        layers: &[usize],
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let square = Square::of(config);
        let mut merger = |norm, [up, down]: &[LinearWeights; 2]| {
            let (up, down) = (loader.linear(up)?, loader.linear(down)?);
            let norm = match norm {
                Some(norm) => Some(Norm::load(norm, config.tower.norm_eps, loader)?),
                None => None,
            };
            Ok::<_, ModelError>(Merger { square, norm, up, down })
        };
        let last = merger(None, mlp)?;
        let deepstack = layers.iter().zip(deepstack).map(|(layer, MergerWeights { norm, mlp })| {
            merger(Some(norm), mlp).map(|merger| (*layer, merger))
        });
        Ok(Self { last, deepstack: deepstack.collect::<Result<_, _>>()? })
    }

    /// Size in bytes of the packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let deepstack = self.deepstack.iter().map(|(_, merger)| merger.bytes());
        self.last.bytes() + deepstack.sum::<usize>()
    }

    /// The embeddings of an image of `grid` patches, `[rows, output_size]`, from its normalized
    /// features, `[height, width, hidden_size]`.
    pub(super) fn project(
        &self,
        features: &[f32],
        grid: [usize; 2],
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        self.last.project(features, grid, path, workers)
    }

    /// The embeddings from the features after layer `layer`; empty if this layer has no projector.
    pub(super) fn after_layer(
        &self,
        layer: usize,
        features: &[f32],
        grid: [usize; 2],
        (path, workers): (Path, &Workers),
    ) -> Vec<f32> {
        let merger = self.deepstack.iter().find(|(own, _)| *own == layer);
        merger.map_or_else(Vec::new, |(_, merger)| merger.project(features, grid, path, workers))
    }
}

impl Merger {
    fn bytes(&self) -> usize {
        self.up.bytes() + self.down.bytes()
    }

    fn project(
        &self,
        features: &[f32],
        grid: [usize; 2],
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        let rows = self.square.count(grid);
        let width = self.up.matrix.in_features();
        let mut packed = Operands::default();
        packed.reset(rows, &[&self.up.matrix]);
        packed.fill(workers.for_pass(rows, width), |_, first, block| {
            let mut joined = vec![0.0; if self.norm.is_some() { width } else { 0 }];
            for (index, row) in block.chunks_exact_mut(width).enumerate() {
                let patches = self.square.patches(features, grid[0], first + index);
                match &self.norm {
                    Some(norm) => {
                        self.square.concatenate(patches, &mut joined);
                        norm.apply(&joined, row, path);
                    }
                    None => self.square.concatenate(patches, row),
                }
            }
        });
        let mut inner = Operands::default();
        inner.reset(rows, &[&self.down.matrix]);
        let gelu = |sums: RowSums<'_>| {
            self.up.add_bias(path, sums.feature, sums.first);
            kernels::gelu_in_place(path, sums.first);
        };
        multiply(&self.up, &packed, &gelu, Sink::Operands(inner.only()), (path, workers));
        let mut values = vec![0.0; rows * self.down.matrix.out_features()];
        project(&self.down, &inner, Sink::Rows(&mut values), path, workers);
        values
    }
}
