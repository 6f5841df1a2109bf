//! The vision transformer: patches with learned positions, and layers of attention and MLPs.

use stolon_checkpoint::config::{LayerNormWeights, TowerConfig, VisionLayerWeights, VisionWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, LayerNorm, Matrix, Operands, Path, RowSums, Sink};

use super::patches::Patches;
use super::positions::{Positions, Rotations};
use crate::decoder::linear::{Linear, Loader, multiply, project};
use crate::full_kv::{FullKv, FullMask, ProjectionNorms};
use crate::workers::Workers;

/// A tower with packed weights.
#[derive(Debug)]
pub(super) struct Tower {
    config: TowerConfig,
    /// The projection of patches.
    patches: Linear,
    positions: Positions,
    layers: Vec<Layer>,
    final_norm: Norm,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Norm,
    qkv: [Linear; 3],
    output: Linear,
    mlp_norm: Norm,
    up: Linear,
    down: Linear,
}

/// A layer norm.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

/// The activations of an image. Each buffer of f32 is `[patches, hidden_size]`.
#[derive(Debug)]
pub(super) struct Activations {
    /// The residual stream.
    pub(super) x: Vec<f32>,
    /// Its normalized rows, packed.
    normed: Operands,
    /// Queries.
    q: Vec<f32>,
    /// Keys and values.
    kv: FullKv,
    /// The rotations of queries and keys.
    rotations: Rotations,
    /// The output of attention.
    attended: Vec<f32>,
    /// The same, packed.
    mixed: Operands,
    /// The inner features of the MLP, packed.
    inner: Operands,
}

impl Tower {
    pub(super) fn load(
        config: &TowerConfig,
        weights: VisionWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let VisionWeights { patches, positions, layers, final_norm, projector: _ } = weights;
        let eps = config.norm_eps;
        Ok(Self {
            config: config.clone(),
            patches: loader.linear(&patches)?,
            positions: Positions::new(config, loader.vector(&positions)?),
            layers: layers
                .iter()
                .map(|layer| Layer::load(layer, eps, loader))
                .collect::<Result<_, _>>()?,
            final_norm: Norm::load(&final_norm, eps, loader)?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            let Layer { qkv, output, up, down, .. } = layer;
            qkv.iter().chain([output, up, down]).map(Linear::bytes).sum::<usize>()
        });
        self.patches.bytes() + layers.sum::<usize>()
    }

    /// Projects the patches and adds their positions. `kv` has memory for the keys and values of
    /// all patches.
    pub(super) fn embed(
        &self,
        patches: &Patches<'_>,
        kv: FullKv,
        path: Path,
        workers: &Workers,
    ) -> Activations {
        let (rows, width) = (patches.count(), self.config.hidden_size);
        let matrix = &self.patches.matrix;
        let mut packed = Operands::default();
        packed.reset(rows, &[matrix]);
        packed.fill(workers.for_pass(rows, matrix.in_features()), |_, first, block| {
            for (index, row) in block.chunks_exact_mut(matrix.in_features()).enumerate() {
                patches.write(first + index, row);
            }
        });
        let mut x = self.positions.learned(patches.grid);
        project(&self.patches, &packed, Sink::Add(&mut x), path, workers);
        Activations {
            normed: Operands::default(),
            q: vec![0.0; rows * width],
            kv,
            rotations: self.positions.rotations(patches.grid),
            attended: vec![0.0; rows * width],
            mixed: Operands::default(),
            inner: Operands::default(),
            x,
        }
    }

    /// Computes layer `index`.
    pub(super) fn layer(
        &self,
        index: usize,
        activations: &mut Activations,
        path: Path,
        workers: &Workers,
    ) {
        let Layer { attention_norm, qkv, output, mlp_norm, up, down } = &self.layers[index];
        let Activations { x, normed, q, kv, rotations, attended, mixed, inner } = activations;
        let rows = x.len() / self.config.hidden_size;
        attention_norm.pack(x, normed, &[0, 1, 2].map(|part| &qkv[part].matrix), path, workers);
        let rotation = |row| Some(rotations.at(row));
        kv.project((qkv, ProjectionNorms::None), normed, q, |_, _| {}, rotation, workers);
        kv.attend(q, attended, &FullMask::default(), path, workers);
        mixed.reset(rows, &[&output.matrix]);
        mixed.pack(workers.for_pass(rows, self.config.hidden_size), attended);
        project(output, mixed, Sink::Add(x), path, workers);

        mlp_norm.pack(x, normed, &[&up.matrix], path, workers);
        inner.reset(rows, &[&down.matrix]);
        let gelu = |sums: RowSums<'_>| {
            up.add_bias(path, sums.feature, sums.first);
            kernels::gelu_tanh_in_place(path, sums.first);
        };
        multiply(up, normed, &gelu, Sink::Operands(inner.only()), (path, workers));
        project(down, inner, Sink::Add(x), path, workers);
    }

    /// Normalizes the residual stream after the last layer, in place.
    pub(super) fn norm(&self, activations: &mut Activations, path: Path, workers: &Workers) {
        let Activations { x, attended, .. } = activations;
        let width = self.config.hidden_size;
        let chunk = workers.chunk_rows(x.len() / width, width) * width;
        workers.run(x.chunks(chunk).zip(attended.chunks_mut(chunk)), |(x, out)| {
            self.final_norm.apply(x, out, path);
        });
        std::mem::swap(x, attended);
    }
}

impl Layer {
    fn load(
        weights: &VisionLayerWeights,
        eps: f32,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let VisionLayerWeights { attention_norm, qkv: [q, k, v], output, mlp_norm, up, down } =
            weights;
        Ok(Self {
            attention_norm: Norm::load(attention_norm, eps, loader)?,
            qkv: [loader.linear(q)?, loader.linear(k)?, loader.linear(v)?],
            output: loader.linear(output)?,
            mlp_norm: Norm::load(mlp_norm, eps, loader)?,
            up: loader.linear(up)?,
            down: loader.linear(down)?,
        })
    }
}

impl Norm {
    pub(super) fn load(
        weights: &LayerNormWeights,
        eps: f32,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let LayerNormWeights { weight, bias } = weights;
        Ok(Self { weight: loader.vector(weight)?, bias: loader.vector(bias)?, eps })
    }

    /// Normalizes the rows of `x` into `out`.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32], path: Path) {
        let norm = LayerNorm { weight: &self.weight, bias: &self.bias, eps: self.eps };
        kernels::layer_norm(path, x, &norm, out);
    }

    /// Normalizes the rows of `x` and packs them for `readers`.
    fn pack(
        &self,
        x: &[f32],
        out: &mut Operands,
        readers: &[&Matrix],
        path: Path,
        workers: &Workers,
    ) {
        let width = self.weight.len();
        let rows = x.len() / width;
        out.reset(rows, readers);
        out.fill(workers.for_pass(rows, width), |_, first, block| {
            self.apply(&x[first * width..][..block.len()], block, path);
        });
    }
}
