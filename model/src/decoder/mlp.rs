//! The weights of an MLP with a gate.

use super::linear::{Linear, Loader};
use crate::config::MlpWeights;
use crate::error::ModelError;

/// An MLP with a gate: `down(activation(gate(x)) * up(x))`.
#[derive(Debug)]
pub(super) struct GatedMlp {
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

impl GatedMlp {
    /// Loads an MLP.
    pub(super) fn load(spec: &MlpWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let MlpWeights { gate_up, down } = spec;
        let [gate, up] = &gate_up.parts;
        Ok(Self { gate: loader.linear(gate)?, up: loader.linear(up)?, down: loader.linear(down)? })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        self.gate.bytes() + self.up.bytes() + self.down.bytes()
    }
}
