//! An MLP, with or without a gate.

use stolon_checkpoint::config::{GateConfig, MlpInputs, MlpWeights, PlainFunction};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Matrix, Path, RowSums};

use super::linear::{Linear, Loader};
use super::passes;

/// An MLP: the fields of [`MlpWeights`].
#[derive(Debug)]
pub(super) struct Mlp {
    inner: Inner,
    pub(super) down: Linear,
    pub(super) output_factor: f32,
}

/// The projections to the inner features, and the function that is applied to them.
#[derive(Debug)]
enum Inner {
    /// The inner features are multiplied by a gate.
    Gated { gate: Linear, up: Linear, config: GateConfig },
    /// The inner features have no gate.
    Plain { up: Linear, function: PlainFunction },
}

impl Mlp {
    /// Loads an MLP.
    pub(super) fn load(spec: &MlpWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let MlpWeights { inputs, down, output_factor } = spec;
        let inner = match inputs {
            MlpInputs::Gated(gate_up, config) => {
                let [gate, up] = &gate_up.parts;
                let (gate, up) = (loader.linear(gate)?, loader.linear(up)?);
                Inner::Gated { gate, up, config: *config }
            }
            MlpInputs::Plain(up, function) => {
                Inner::Plain { up: loader.linear(up)?, function: *function }
            }
        };
        Ok(Self { inner, down: loader.linear(down)?, output_factor: *output_factor })
    }

    /// The projection to the inner features, without the projection to the gate.
    fn up(&self) -> &Linear {
        match &self.inner {
            Inner::Gated { up, .. } | Inner::Plain { up, .. } => up,
        }
    }

    /// Adds `offset` to the inner features before the gate or the activation function.
    pub(super) fn shift(&mut self, offset: f32) {
        match &mut self.inner {
            Inner::Gated { up, .. } | Inner::Plain { up, .. } => up.shift(offset),
        }
    }

    /// Number of multiply-adds of the projection of one row to the inner features.
    pub(super) fn work(&self) -> usize {
        self.up().matrix.in_features() * self.up().matrix.out_features()
    }

    /// The matrices that the input is multiplied with: the matrix of the gate, if there is one, and
    /// the matrix of the inner features.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        match &self.inner {
            Inner::Gated { gate, up, .. } => vec![&gate.matrix, &up.matrix],
            Inner::Plain { up, .. } => vec![&up.matrix],
        }
    }

    /// The epilogue of the projections to the inner features: adds the biases and applies the
    /// activation function. The result replaces the values of the gate, or of the only projection.
    pub(super) fn activate(&self, path: Path, sums: RowSums<'_>) {
        let RowSums { feature, first, second, .. } = sums;
        match &self.inner {
            Inner::Gated { gate, up, config: GateConfig { function, factor } } => {
                gate.add_bias(path, feature, first);
                if *factor != 1.0 {
                    kernels::scale(path, first, *factor);
                }
                up.add_bias(path, feature, second);
                passes::apply_gate(*function, path, first, second);
            }
            Inner::Plain { up, function } => {
                up.add_bias(path, feature, first);
                match function {
                    PlainFunction::Gelu => kernels::gelu_in_place(path, first),
                    PlainFunction::GeluTanh => kernels::gelu_tanh_in_place(path, first),
                    PlainFunction::SquaredRelu => kernels::squared_relu_in_place(path, first),
                }
            }
        }
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.inputs().into_iter().map(Matrix::bytes).sum::<usize>() + self.down.bytes()
    }
}
