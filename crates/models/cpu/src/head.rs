//! The layers after the pooling of hidden states: dense layers of embedding models, and the heads of
//! classifiers. They are small and are computed for one pooled state at a time, on the thread of the
//! caller.

use stolon_checkpoint::encoder::{HeadActivation, HeadConfig, HeadLayer};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::weights::Weights;
use stolon_kernels::{self as kernels, LayerNorm, Path};

use crate::CpuOptions;

/// Number of partial sums of a dot product.
const LANES: usize = 16;

/// A head with its weights, in f32.
#[derive(Debug)]
pub struct Head {
    layers: Vec<Layer>,
    path: Path,
}

#[derive(Debug)]
enum Layer {
    Linear {
        /// `[out, in]`.
        weight: Vec<f32>,
        outputs: usize,
        bias: Option<Vec<f32>>,
        activation: HeadActivation,
    },
    Norm {
        weight: Vec<f32>,
        bias: Vec<f32>,
        eps: f32,
    },
}

impl Head {
    /// Reads the weights of a head and removes them from `weights`.
    ///
    /// # Errors
    /// [`ModelError`] with the name of a tensor that is missing or has the wrong shape or type, or if
    /// the machine supports no instruction set.
    pub fn load(config: &HeadConfig, weights: &mut Weights) -> Result<Self, ModelError> {
        let mut layers = Vec::with_capacity(config.layers.len());
        for layer in &config.layers {
            layers.push(match layer {
                HeadLayer::Linear { weights: spec, activation } => Layer::Linear {
                    weight: weights.floats(&spec.weight)?,
                    outputs: spec.weight.shape[0],
                    bias: spec.bias.as_ref().map(|bias| weights.floats(bias)).transpose()?,
                    activation: *activation,
                },
                HeadLayer::Norm { weights: spec, eps } => {
                    let weight = weights.floats(&spec.weight)?;
                    let bias = spec.bias.as_ref().map(|bias| weights.floats(bias)).transpose()?;
                    let bias = bias.unwrap_or_else(|| vec![0.0; weight.len()]);
                    Layer::Norm { weight, bias, eps: *eps }
                }
            });
        }
        config.tensors().iter().for_each(|spec| weights.remove(&spec.name));
        let path = CpuOptions::default().path()?;
        Ok(Self { layers, path })
    }

    /// Number of values of the result for pooled hidden states of `hidden` values.
    #[must_use]
    pub fn output_size(&self, hidden: usize) -> usize {
        self.layers.iter().fold(hidden, |size, layer| match layer {
            Layer::Linear { outputs, .. } => *outputs,
            Layer::Norm { .. } => size,
        })
    }

    /// The result for a pooled hidden state, `[hidden_size]`.
    ///
    /// # Panics
    /// If `state` has another size.
    #[must_use]
    pub fn apply(&self, mut state: Vec<f32>) -> Vec<f32> {
        for layer in &self.layers {
            let mut next;
            match layer {
                Layer::Linear { weight, outputs, bias, activation } => {
                    assert_eq!(
                        weight.len(),
                        outputs * state.len(),
                        "a pooled state of another size"
                    );
                    let rows = weight.chunks_exact(state.len().max(1));
                    next = rows.map(|row| dot(row, &state)).collect::<Vec<f32>>();
                    if let Some(bias) = bias {
                        kernels::add(self.path, &mut next, bias);
                    }
                    activate(*activation, &mut next, self.path);
                }
                Layer::Norm { weight, bias, eps } => {
                    next = vec![0.0; state.len()];
                    let norm = LayerNorm { weight, bias, eps: *eps };
                    kernels::layer_norm(self.path, &state, &norm, &mut next);
                }
            }
            state = next;
        }
        state
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a_whole, b_whole) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_whole.remainder().iter().zip(b_whole.remainder()).map(|(a, b)| a * b);
    let rest: f32 = rest.sum();
    for (a, b) in a_whole.zip(b_whole) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

fn activate(function: HeadActivation, values: &mut [f32], path: Path) {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match function {
        HeadActivation::Identity => {}
        HeadActivation::Tanh => values.iter_mut().for_each(|x| *x = x.tanh()),
        HeadActivation::Gelu => kernels::gelu_in_place(path, values),
        HeadActivation::Relu => values.iter_mut().for_each(|x| *x = x.max(0.0)),
        HeadActivation::Sigmoid => values.iter_mut().for_each(|x| *x = sigmoid(*x)),
        HeadActivation::Silu => values.iter_mut().for_each(|x| *x *= sigmoid(*x)),
    }
}
