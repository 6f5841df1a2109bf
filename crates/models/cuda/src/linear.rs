//! Matrix products of the decoder. Dense matrices have the compute type, and quantized ones are in
//! the blocks of a GGUF file.
//!
//! **Invariant: batch invariance.** With a row tile, every product has that number of rows, and
//! missing rows are filled with zeros. A library chooses its kernel, and with it the order of
//! additions, only by the shapes, so the result of a row does not depend on the number of other
//! rows. Products of several tiles are used only where a trial has shown that their rows have the
//! same bits.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul};
use candle_core::{DType, Device, Module, Result, Tensor};

/// The multiples of the tile that are tried as numbers of rows, in descending order.
const MULTIPLES: [usize; 4] = [16, 8, 4, 2];
/// Number of elements that a trial compares, unless that takes more than [`TRIALS_MAX`] products.
/// In bf16, another order of additions changes about one of 10,000 elements.
const COMPARED: usize = 1 << 19;
/// Maximum number of products of a trial.
const TRIALS_MAX: usize = 8;

/// Number of rows of every matrix product; `None` for a single product of all rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTile(pub(crate) Option<usize>);

impl RowTile {
    /// Appends rows of zeros to `x` to fill the last tile.
    pub(crate) fn fill(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        match self.rows(rows) - rows {
            0 => x.contiguous(),
            missing => x.pad_with_zeros(0, 0, missing),
        }
    }

    /// The number of rows after `rows` rows are padded to whole tiles.
    pub(crate) fn rows(self, rows: usize) -> usize {
        self.0.map_or(rows, |tile| rows.next_multiple_of(tile))
    }
}

/// One or more matrices, `[out, in]` when concatenated, with an optional bias.
#[derive(Debug)]
pub(crate) struct Linear {
    /// The matrices, which all have the same input and are concatenated along the output features.
    /// There are several only if their types differ.
    matrices: Vec<Matrix>,
    /// `[out]`, in f32.
    bias: Option<Tensor>,
    tile: RowTile,
    /// Numbers of rows, in descending order, with which a product gives each row the same bits as
    /// with the tile.
    larger: Arc<[usize]>,
}

/// The elements of a matrix.
#[derive(Debug)]
pub(crate) enum Matrix {
    /// `[out, in]` in the compute type.
    Dense(Tensor),
    /// `[out, in]` in quantized blocks. The device rounds activations to 8 bits.
    Quantized(QMatMul),
}

impl Linear {
    pub(crate) fn new(matrices: Vec<Matrix>, bias: Option<Tensor>, tile: RowTile) -> Self {
        Self { matrices, bias, tile, larger: Arc::default() }
    }

    /// Allows products of these numbers of rows as well. See [`Linear::try_larger`].
    pub(crate) fn with_larger(self, larger: Arc<[usize]>) -> Self {
        Self { larger, ..self }
    }

    pub(crate) fn tile(&self) -> RowTile {
        self.tile
    }

    /// Number of output features.
    pub(crate) fn out_features(&self) -> usize {
        self.kinds().iter().map(|kind| kind.rows).sum()
    }

    /// Adds `values`, `[out]` in f32, to the bias.
    pub(crate) fn add_bias(&mut self, values: Tensor) -> Result<()> {
        self.bias = Some(match &self.bias {
            Some(bias) => (bias + values)?,
            None => values,
        });
        Ok(())
    }

    /// The shapes and types of the matrices, which decide the kernels of the products.
    pub(crate) fn kinds(&self) -> Vec<Kind> {
        self.matrices.iter().map(Matrix::kind).collect()
    }

    /// Multiplies the rows of `x`, `[rows, in]`, and returns `[rows, out]` in f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.tiled(x)?.to_dtype(DType::F32)
    }

    /// The same as [`Linear::forward`], in the type of [`Linear::product`].
    pub(crate) fn tiled(&self, x: &Tensor) -> Result<Tensor> {
        self.tiles(&self.tile.fill(x)?)?.narrow(0, 0, x.dim(0)?)
    }

    /// The same as [`Linear::tiled`], for whole tiles of contiguous rows.
    pub(crate) fn tiles(&self, x: &Tensor) -> Result<Tensor> {
        let Some(tile) = self.tile.0 else { return self.product(x) };
        let rows = x.dim(0)?;
        let (mut first, mut products) = (0, Vec::new());
        while first < rows {
            let larger = self.larger.iter().copied().find(|count| first + count <= rows);
            let count = larger.unwrap_or(tile);
            products.push(self.product(&x.narrow(0, first, count)?)?);
            first += count;
        }
        match products.as_slice() {
            [product] => Ok(product.clone()),
            products => Tensor::cat(products, 0),
        }
    }

    /// Tries products of several tiles with random rows. Returns the numbers of rows, in descending
    /// order, with which every row has the same bits as in a product of one tile.
    pub(crate) fn try_larger(&self, device: &Device) -> Result<Arc<[usize]>> {
        let Some(tile) = self.tile.0 else { return Ok(Arc::default()) };
        let kinds = self.kinds();
        let columns = kinds.first().map_or(0, |kind| kind.columns);
        let width: usize = kinds.iter().map(|kind| kind.rows).sum();
        let mut larger = Vec::new();
        for rows in MULTIPLES.map(|multiple| multiple * tile) {
            let trials = COMPARED.div_ceil(rows * width.max(1)).min(TRIALS_MAX);
            let mut is_same = true;
            for _ in 0..trials {
                let x = Tensor::randn(0_f32, 1.0, (rows, columns), device)?;
                let differ = self.product(&x)?.ne(&self.tiles(&x)?)?;
                let count = differ.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
                is_same = is_same && count == 0.0;
            }
            if is_same {
                larger.push(rows);
            }
        }
        Ok(larger.into())
    }

    /// A single product with all rows of `x`, which are one tile or a number of rows that was
    /// tried: `[rows, out]`. It has the compute type if there is one dense matrix and no bias, else
    /// f32.
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

/// A matrix for each head, `[heads, out, in]` in the compute type.
#[derive(Debug)]
pub(crate) struct HeadLinear {
    matrices: Tensor,
    tile: RowTile,
}

impl HeadLinear {
    pub(crate) fn new(matrices: Tensor, tile: RowTile) -> Self {
        Self { matrices, tile }
    }

    /// Multiplies the rows of each head, `[rows, heads, in]`, with the head's matrix, and returns
    /// `[rows, heads, out]` in f32. All heads of a tile of rows are one product.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let count = x.dim(0)?;
        let x = self.tile.fill(&x.to_dtype(self.matrices.dtype())?)?;
        let matrices = self.matrices.transpose(1, 2)?;
        let rows = x.dim(0)?;
        let tile = self.tile.0.unwrap_or(rows);
        let products = (0..rows).step_by(tile.max(1)).map(|first| {
            let x = x.narrow(0, first, tile)?.transpose(0, 1)?.contiguous()?;
            x.matmul(&matrices)?.transpose(0, 1)?.contiguous()
        });
        let product = Tensor::cat(&products.collect::<Result<Vec<_>>>()?, 0)?;
        product.narrow(0, 0, count)?.to_dtype(DType::F32)?.contiguous()
    }
}

/// The properties that determine the kernel of a product, except for the number of rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kind {
    rows: usize,
    columns: usize,
    /// The type of the quantized blocks; `None` for matrices in the compute type.
    blocks: Option<GgmlDType>,
}

impl Matrix {
    fn kind(&self) -> Kind {
        let (dims, blocks) = match self {
            Self::Dense(matrix) => (matrix.dims(), None),
            Self::Quantized(QMatMul::QTensor(matrix)) => {
                (matrix.shape().dims(), Some(matrix.dtype()))
            }
            Self::Quantized(QMatMul::Tensor(matrix) | QMatMul::TensorF16(matrix)) => {
                (matrix.dims(), None)
            }
        };
        Kind { rows: dims[0], columns: dims[1], blocks }
    }

    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(matrix) => x.to_dtype(matrix.dtype())?.matmul(&matrix.t()?),
            Self::Quantized(matrix) => matrix.forward(&x.to_dtype(DType::F32)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix() -> Tensor {
        Tensor::randn(0_f32, 1.0, (48, 96), &Device::Cpu).expect("a matrix")
    }

    fn linear(matrix: &Tensor, tile: Option<usize>) -> Linear {
        Linear::new(vec![Matrix::Dense(matrix.clone())], None, RowTile(tile))
    }

    fn values(product: Result<Tensor>) -> Vec<Vec<f32>> {
        product.and_then(|product| product.to_vec2()).expect("a product")
    }

    /// Goal: a product of any number of rows has the same bits as products of one tile each, also
    /// with the larger numbers of rows that a trial has found. These are multiples of the tile.
    #[test]
    fn larger_products_have_the_bits_of_tiles() {
        let matrix = matrix();
        let one = linear(&matrix, Some(4));
        let larger = one.try_larger(&Device::Cpu).expect("a trial");
        assert!(larger.iter().all(|rows| MULTIPLES.contains(&(rows / 4)) && rows % 4 == 0));
        let several = linear(&matrix, Some(4)).with_larger(larger);
        for rows in [1, 4, 7, 64, 101] {
            let x = Tensor::randn(0_f32, 1.0, (rows, 96), &Device::Cpu).expect("rows");
            let expected = values(one.tiled(&x));
            assert_eq!(expected.len(), rows);
            assert_eq!(values(several.tiled(&x)), expected);
            let first = x.narrow(0, rows - 1, 1).expect("a row");
            assert_eq!(values(one.tiled(&first))[0], expected[rows - 1]);
        }
    }

    /// Goal: without batch invariance, all rows are one product.
    #[test]
    fn without_a_tile_nothing_is_tried() {
        let linear = linear(&matrix(), None);
        assert!(linear.try_larger(&Device::Cpu).expect("a trial").is_empty());
        let x = Tensor::ones((5, 96), DType::F32, &Device::Cpu).expect("rows");
        assert_eq!(values(linear.tiled(&x)), values(linear.product(&x)));
    }
}
