//! Selective attention (Moondream 3). Queries and values are multiplied by factors that depend on
//! the token and on its position, before the rotary embedding. [`AttentionConfig::selective`] has
//! the formula.
//!
//! [`AttentionConfig::selective`]: stolon_checkpoint::config::AttentionConfig::selective

use candle_core::{DType, Result, Tensor};
use stolon_checkpoint::config::{LinearWeights, SelectiveWeights};

use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;

/// The weights of the factors: the fields of [`SelectiveWeights`].
#[derive(Debug)]
pub(super) struct Selective {
    /// The projections to the factors of queries and of values, concatenated.
    factors: Linear,
    /// `[heads]`.
    alpha: Tensor,
}

impl Selective {
    pub(super) fn load(
        spec: &SelectiveWeights,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let SelectiveWeights { queries, values, alpha } = spec;
        let unbiased =
            [queries, values].map(|weight| LinearWeights { weight: weight.clone(), bias: None });
        Ok(Self { factors: loader.exact(&unbiased)?, alpha: loader.vector(alpha, 0.0)? })
    }

    /// Returns the queries and the values of rows multiplied by their factors. All are `[rows, heads
    /// * head_dim]`, and the results are f32. `positions` are `[rows]`.
    pub(super) fn scale(
        &self,
        qkv: [&Tensor; 3],
        head_dim: usize,
        positions: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let [queries, keys, values] = qkv.map(|x| x.to_dtype(DType::F32));
        let (queries, keys, values) = (queries?, keys?, values?);
        let heads = self.alpha.dim(0)?;
        let of_token = Tensor::cat(&[&queries, &keys, &values], 1)?.gelu()?;
        let of_token = self.factors.forward(&of_token)?.tanh()?;
        let position = positions.to_dtype(DType::F32)?.affine(1.0, 1.0)?.log()?.unsqueeze(1)?;
        let of_position = candle_nn::ops::sigmoid(&position.broadcast_mul(&self.alpha)?)?;
        let of_position = of_position.affine(1.0, 0.5)?;
        let scale = |x: &Tensor, first: usize| {
            let factors = (of_token.narrow(1, first, heads)? + &of_position)?.unsqueeze(2)?;
            x.reshape(((), heads, head_dim))?.broadcast_mul(&factors)?.flatten_from(1)
        };
        Ok((scale(&queries, 0)?, scale(&values, heads)?))
    }
}
