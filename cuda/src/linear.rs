//! Matrix products of the decoder: dense matrices in the compute type, and quantised ones in the
//! blocks of a GGUF file.
//!
//! **Invariant: batch invariance.** With a row tile, every product has exactly that number of rows;
//! missing ones are filled up with zeros. A library chooses its kernel, and with it the order of
//! additions, by the shapes only, so a row's result does not depend on the number of other rows.

use candle_core::quantized::QMatMul;
use candle_core::{DType, Module, Result, Tensor};

/// A matrix `[out, in]` with an optional bias.
#[derive(Debug)]
pub(crate) struct Linear {
    matrix: Matrix,
    /// `[out]`, in f32.
    bias: Option<Tensor>,
    /// Number of rows of every product; `None` for a single product of all rows.
    row_tile: Option<usize>,
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
    pub(crate) fn new(matrix: Matrix, bias: Option<Tensor>, row_tile: Option<usize>) -> Self {
        Self { matrix, bias, row_tile }
    }

    /// Multiplies the rows of `x`, `[rows, in]` in f32, and returns `[rows, out]` in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let sums = match self.row_tile {
            None => self.matrix.multiply(&x.contiguous()?)?,
            Some(tile) => self.multiply_tiles(x, tile)?,
        };
        match &self.bias {
            Some(bias) => sums.broadcast_add(bias),
            None => Ok(sums),
        }
    }

    fn multiply_tiles(&self, x: &Tensor, tile: usize) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let missing = rows.next_multiple_of(tile) - rows;
        let x = if missing > 0 { x.pad_with_zeros(0, 0, missing)? } else { x.clone() };
        let tiles = (0..rows).step_by(tile);
        let products = tiles.map(|first| {
            let product = self.matrix.multiply(&x.narrow(0, first, tile)?.contiguous()?)?;
            product.narrow(0, 0, tile.min(rows - first))
        });
        match products.collect::<Result<Vec<_>>>()?.as_slice() {
            [product] => product.contiguous(),
            products => Tensor::cat(products, 0),
        }
    }
}

impl Matrix {
    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(matrix) => {
                x.to_dtype(matrix.dtype())?.matmul(&matrix.t()?)?.to_dtype(DType::F32)
            }
            Self::Quantised(matrix) => matrix.forward(x),
        }
    }
}
