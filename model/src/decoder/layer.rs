//! The weights of one layer.

use super::experts::Experts;
use super::linear::{Linear, Loader};
use super::mlp::GatedMlp;
use crate::config::{FeedForwardWeights, LayerWeights};
use crate::error::ModelError;

/// The weights of one layer: the fields of [`LayerWeights`], which describes them.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_input_norm: Option<Vec<f32>>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) sinks: Option<Vec<f32>>,
    pub(super) output: Linear,
    pub(super) attention_output_norm: Option<Vec<f32>>,
    pub(super) mlp_input_norm: Option<Vec<f32>>,
    pub(super) mlp: Mlp,
    pub(super) mlp_output_norm: Option<Vec<f32>>,
}

/// What a layer computes after attention.
#[derive(Debug)]
pub(super) enum Mlp {
    /// One MLP for all rows.
    Dense(GatedMlp),
    /// A mixture of experts.
    Experts(Experts),
}

impl Layer {
    /// Loads the tensors that `spec` describes.
    pub(super) fn load(spec: &LayerWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let LayerWeights {
            attention_input_norm,
            qkv,
            qk_norms,
            sinks,
            output,
            attention_output_norm,
            mlp_input_norm,
            mlp,
            mlp_output_norm,
        } = spec;
        let [q, k, v] = &qkv.parts;
        let [q_norm, k_norm] = match qk_norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        Ok(Self {
            attention_input_norm: loader.optional_vector(attention_input_norm.as_ref())?,
            q: loader.linear(q)?,
            k: loader.linear(k)?,
            v: loader.linear(v)?,
            q_norm: loader.optional_vector(q_norm)?,
            k_norm: loader.optional_vector(k_norm)?,
            sinks: loader.optional_vector(sinks.as_ref())?,
            output: loader.linear(output)?,
            attention_output_norm: loader.optional_vector(attention_output_norm.as_ref())?,
            mlp_input_norm: loader.optional_vector(mlp_input_norm.as_ref())?,
            mlp: match mlp {
                FeedForwardWeights::Dense(mlp) => Mlp::Dense(GatedMlp::load(mlp, loader)?),
                FeedForwardWeights::Experts(experts) => {
                    Mlp::Experts(Experts::load(experts, loader)?)
                }
            },
            mlp_output_norm: loader.optional_vector(mlp_output_norm.as_ref())?,
        })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let attention = [&self.q, &self.k, &self.v, &self.output];
        let mlp = match &self.mlp {
            Mlp::Dense(mlp) => mlp.bytes(),
            Mlp::Experts(experts) => experts.bytes(),
        };
        attention.iter().map(|linear| linear.bytes()).sum::<usize>() + mlp
    }
}
