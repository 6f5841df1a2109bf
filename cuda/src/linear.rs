//! Matrix products of the decoder: dense matrices in the compute type, and quantised ones in the
//! blocks of a GGUF file.
//!
//! **Invariant: batch invariance.** With a row tile, every product has exactly that number of rows;
//! missing ones are filled up with zeros. A library chooses its kernel, and with it the order of
//! additions, by the shapes only, so a row's result does not depend on the number of other rows.

use candle_core::quantized::QMatMul;
use candle_core::{DType, Module, Result, Tensor};

/// Number of rows of every matrix product; `None` for a single product of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTile(pub(crate) Option<usize>);

impl RowTile {
    /// Applies `f`, which computes each row of its result from the same row of its argument, to the
    /// rows of `x`, one tile after the other.
    pub(crate) fn apply(self, x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let Some(tile) = self.0 else { return f(&x.contiguous()?) };
        let rows = x.dim(0)?;
        let missing = rows.next_multiple_of(tile) - rows;
        let x = if missing > 0 { x.pad_with_zeros(0, 0, missing)? } else { x.clone() };
        let results = (0..rows).step_by(tile).map(|first| {
            let result = f(&x.narrow(0, first, tile)?.contiguous()?)?;
            result.narrow(0, 0, tile.min(rows - first))
        });
        match results.collect::<Result<Vec<_>>>()?.as_slice() {
            [result] => result.contiguous(),
            results => Tensor::cat(results, 0),
        }
    }
}

/// One or more matrices, one above the other: `[out, in]` with an optional bias.
#[derive(Debug)]
pub(crate) struct Linear {
    /// The parts: more than one only if they have different types. All have the same rows as input.
    matrices: Vec<Matrix>,
    /// `[out]`, in f32.
    bias: Option<Tensor>,
    tile: RowTile,
}

/// The elements of a matrix.
#[derive(Debug)]
pub(crate) enum Matrix {
    /// `[out, in]` in the compute type.
    Dense(Tensor),
    /// `[out, in]` in quantised blocks. The device rounds activations to 8 bits.
    Quantised(QMatMul),
}

impl Linear {
    pub(crate) fn new(matrices: Vec<Matrix>, bias: Option<Tensor>, tile: RowTile) -> Self {
        Self { matrices, bias, tile }
    }

    pub(crate) fn tile(&self) -> RowTile {
        self.tile
    }

    /// Multiplies the rows of `x`, `[rows, in]`, and returns `[rows, out]` in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.tiled(x)?.to_dtype(DType::F32)
    }

    /// As [`Linear::forward`], in the type of [`Linear::product`].
    pub(crate) fn tiled(&self, x: &Tensor) -> Result<Tensor> {
        self.tile.apply(x, |x| self.product(x))
    }

    /// The product with all rows of `x`, a tile if there are tiles: `[rows, out]`, in the compute
    /// type if the matrix is dense and has no bias, else in f32.
    pub(crate) fn product(&self, x: &Tensor) -> Result<Tensor> {
        let product = match self.matrices.as_slice() {
            [matrix] => matrix.multiply(x)?,
            matrices => {
                let products =
                    matrices.iter().map(|matrix| matrix.multiply(x)?.to_dtype(DType::F32));
                Tensor::cat(&products.collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        match &self.bias {
            Some(bias) => product.to_dtype(DType::F32)?.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

impl Matrix {
    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(matrix) => x.to_dtype(matrix.dtype())?.matmul(&matrix.t()?),
            Self::Quantised(matrix) => matrix.forward(&x.to_dtype(DType::F32)?),
        }
    }
}
