//! The norms of rows: RMS norms and layer norms.

use candle_core::{Device, Result, Tensor};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::config::{NormKind, NormWeights, NormsConfig, TensorSpec};

use crate::OpenError;
use crate::loader::Loader;

/// A norm.
#[derive(Debug)]
pub(crate) struct Norm {
    /// The factor of each element, in f32, with the configuration's offset added.
    weight: Tensor,
    /// The bias of a layer norm, zeroes if the model has none; `None` for an RMS norm.
    bias: Option<Tensor>,
    eps: f32,
}

impl Norm {
    /// Loads a norm of rows of the residual stream.
    pub(crate) fn load(
        spec: &NormWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let NormWeights { kind, eps, offset, weight, bias } = spec;
        let weight = loader.vector(weight, *offset)?;
        let bias = match (kind, bias) {
            (NormKind::Rms, _) => None,
            (NormKind::Layer, Some(bias)) => Some(loader.vector(bias, 0.0)?),
            (NormKind::Layer | NormKind::LayerWithoutBias, _) => Some(weight.zeros_like()?),
        };
        Ok(Self { weight, bias, eps: *eps })
    }

    /// The same as [`Norm::load`], if there is a norm.
    pub(crate) fn optional(
        spec: Option<&NormWeights>,
        loader: &mut Loader,
    ) -> std::result::Result<Option<Self>, OpenError> {
        spec.map(|spec| Self::load(spec, loader)).transpose()
    }

    /// Loads an RMS norm of heads or other parts of rows, which has the epsilon and the offset of
    /// the configuration.
    pub(crate) fn of_parts(
        config: &DecoderConfig,
        spec: &TensorSpec,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let NormsConfig { eps, offset, .. } = config.norms;
        Self::of_parts_with(spec, eps, offset, loader)
    }

    /// The same with this epsilon and this offset of the weights.
    pub(crate) fn of_parts_with(
        spec: &TensorSpec,
        eps: f32,
        offset: f32,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        Ok(Self { weight: loader.vector(spec, offset)?, bias: None, eps })
    }

    /// An RMS norm of `width` elements whose factors are all `factor`.
    pub(crate) fn uniform(width: usize, factor: f32, eps: f32, device: &Device) -> Result<Self> {
        Ok(Self { weight: Tensor::full(factor, width, device)?, bias: None, eps })
    }

    /// The same norm with its factors multiplied by `factor`.
    pub(crate) fn scaled(self, factor: f32) -> Result<Self> {
        Ok(Self { weight: self.weight.affine(f64::from(factor), 0.0)?, ..self })
    }

    /// Normalizes the last dimension of `x`, in f32.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.contiguous()?;
        match &self.bias {
            Some(bias) => candle_nn::ops::layer_norm(&x, &self.weight, bias, self.eps),
            None => candle_nn::ops::rms_norm(&x, &self.weight, self.eps),
        }
    }
}
