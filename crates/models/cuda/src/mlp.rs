//! An MLP, with or without a gate.

use candle_core::{DType, Device, Result, Tensor};
use stolon_checkpoint::GateFunction;
use stolon_checkpoint::adapter::{ExpertSite, Site};
use stolon_checkpoint::config::{GateConfig, MlpInputs, MlpWeights, PlainFunction};

use crate::OpenError;
use crate::adapters::{AdapterRows, At, Updates};
use crate::gate::gate;
use crate::linear::Linear;
use crate::loader::Loader;

/// An MLP: the fields of [`MlpWeights`].
#[derive(Debug)]
pub(crate) struct Mlp {
    inner: Inner,
    down: Linear,
    /// Factor by which the output is multiplied.
    output_factor: f32,
}

/// The projection to the inner features, and the function that is applied to them.
#[derive(Debug)]
enum Inner {
    /// `function(gate(x)) * up(x)`. The matrices of `gate` and `up` are concatenated along the
    /// output features. `factors`, `[2 * width]`, are the factors of their results; `None` if all
    /// are 1.
    Gated { gate_up: Linear, function: GateFunction, factors: Option<Tensor> },
    /// `function(up(x))`.
    Plain { up: Linear, function: PlainFunction },
}

impl Mlp {
    /// Loads an MLP.
    pub(crate) fn load(
        spec: &MlpWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let MlpWeights { inputs, down, output_factor } = spec;
        let inner = match inputs {
            MlpInputs::Gated(gate_up, GateConfig { function, factor }) => {
                let width = gate_up.parts[0].weight.shape[0];
                let factors = (*factor != 1.0).then(|| halves(width, [*factor, 1.0]));
                let factors = factors.map(|values| Tensor::new(values, &loader.device));
                Inner::Gated {
                    gate_up: loader.stacked(&gate_up.parts)?,
                    function: *function,
                    factors: factors.transpose()?,
                }
            }
            MlpInputs::Plain(up, function) => {
                Inner::Plain { up: loader.linear(up)?, function: *function }
            }
        };
        Ok(Self { inner, down: loader.linear(down)?, output_factor: *output_factor })
    }

    /// Adds `offset` to the results of `up`, before the function or the multiplication by the gate.
    pub(crate) fn shift(&mut self, offset: f32, device: &Device) -> Result<()> {
        match &mut self.inner {
            Inner::Gated { gate_up, .. } => {
                let width = gate_up.out_features() / 2;
                gate_up.add_bias(Tensor::new(halves(width, [0.0, offset]), device)?)
            }
            Inner::Plain { up, .. } => {
                up.add_bias(Tensor::full(offset, up.out_features(), device)?)
            }
        }
    }

    /// Factor by which the output is multiplied.
    pub(crate) fn output_factor(&self) -> f32 {
        self.output_factor
    }

    /// Computes the MLP of `x`, `[rows, hidden_size]`. Returns `[rows, hidden_size]` in f32,
    /// without the output factor.
    pub(crate) fn forward(&self, x: &Tensor, adapters: MlpAdapters<'_>) -> Result<Tensor> {
        // The rows are padded to whole tiles once, for both products.
        let tiles = self.down.tile().fill(x)?;
        let updates = adapters.updates(ExpertSite::GateUp, &tiles)?;
        let inner = match &self.inner {
            Inner::Gated { gate_up, function, factors: None } => {
                gate(&updates.add(0, gate_up.tiles(&tiles)?)?, *function)?
            }
            Inner::Gated { gate_up, function, factors: Some(factors) } => {
                let inputs = updates.add(0, gate_up.tiles(&tiles)?)?.to_dtype(DType::F32)?;
                gate(&inputs.broadcast_mul(factors)?, *function)?
            }
            Inner::Plain { up, function } => {
                let inner = updates.add(0, up.tiles(&tiles)?)?.to_dtype(DType::F32)?;
                match function {
                    PlainFunction::Gelu => inner.gelu_erf()?,
                    PlainFunction::GeluTanh => inner.gelu()?,
                    PlainFunction::SquaredRelu => inner.relu()?.sqr()?,
                }
            }
        };
        let updates = adapters.updates(ExpertSite::Down, &inner)?;
        let output = updates.add(0, self.down.tiles(&inner)?)?;
        output.narrow(0, 0, x.dim(0)?)?.to_dtype(DType::F32)
    }
}

/// The adapters of the rows of an MLP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpAdapters<'a> {
    pub(crate) rows: &'a AdapterRows,
    /// Index of the layer.
    pub(crate) layer: usize,
    /// Index of the expert, if the MLP is one of several. The shared expert comes after the others.
    pub(crate) expert: Option<usize>,
}

impl<'a> MlpAdapters<'a> {
    /// The updates of the projections `site` with the input `x`.
    fn updates(self, site: ExpertSite, x: &Tensor) -> Result<Updates<'a>> {
        let at = match (self.expert, site) {
            (Some(expert), site) => At::Expert(self.layer, expert, site),
            (None, ExpertSite::GateUp) => At::Layer(self.layer, Site::GateUp),
            (None, ExpertSite::Down) => At::Layer(self.layer, Site::Down),
        };
        self.rows.updates(at, x)
    }
}

/// Two vectors of `width` equal elements, one after the other.
fn halves(width: usize, [first, second]: [f32; 2]) -> Vec<f32> {
    [vec![first; width], vec![second; width]].concat()
}
