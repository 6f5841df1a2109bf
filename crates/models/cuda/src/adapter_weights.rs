//! The matrices of LoRA adapters on a device.
//!
//! Adapters are loaded on other threads while steps are computed. So a load only copies: matrices
//! are converted on the host, and no product is tried. The copies are complete when it returns,
//! because each thread has its own stream.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use stolon_backend::AdapterLoadError;
use stolon_checkpoint::TensorType;
use stolon_checkpoint::adapter::{
    AdapterFormat, Budget, EmbeddingMatrices, PlainMatrix, PlainSecond, SiteMatrices,
};

use crate::linear::{HeadLinear, Linear, Matrix, RowTile};
use crate::options::message;

/// Copies the matrices of adapters to a device.
#[derive(Debug)]
pub(crate) struct OnDevice {
    pub(crate) device: Device,
    /// The compute type.
    pub(crate) dtype: DType,
    /// The row tile of all products.
    pub(crate) tile: RowTile,
}

/// The weights of an adapter for projections with the same input.
#[derive(Debug)]
pub(crate) enum SiteWeights {
    /// All projections have one input. `second` computes the updates of all of them: it has the
    /// matrix `B` of each on its diagonal, multiplied by the scale, and zeros elsewhere.
    Rows { first: Linear, second: Linear },
    /// Each head has its own input.
    Heads { first: OfHeads, second: OfHeads },
}

/// The matrices of the heads of latent attention.
#[derive(Debug)]
pub(crate) enum OfHeads {
    /// All heads have the same matrix.
    Same(Linear),
    Each(HeadLinear),
}

/// The weights of an adapter for the embedding.
#[derive(Debug)]
pub(crate) struct EmbeddingWeights {
    /// `[vocab_size, rank]`: the columns of `A` in the compute type.
    columns: Tensor,
    /// The matrix `B`, multiplied by the scale.
    second: Linear,
}

impl SiteWeights {
    /// The updates of rows with the inputs `x`, in f32. `x` is `[rows, in]` and the result `[rows,
    /// out]`, or with heads `[rows, heads, in]` and `[rows, heads, out]`.
    pub(crate) fn of(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rows { first, second } => second.forward(&first.forward(x)?),
            Self::Heads { first, second } => second.forward(&first.forward(x)?),
        }
    }
}

impl OfHeads {
    /// Multiplies the rows of each head, `[rows, heads, in]`: `[rows, heads, out]` in f32.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Same(linear) => {
                let (rows, heads, _) = x.dims3()?;
                linear.forward(&x.flatten(0, 1)?)?.reshape((rows, heads, ()))
            }
            Self::Each(heads) => heads.forward(x),
        }
    }
}

impl EmbeddingWeights {
    /// The updates of the embeddings of `tokens`, `[tokens, hidden_size]` in f32.
    pub(crate) fn of(&self, tokens: &Tensor) -> Result<Tensor> {
        self.second.forward(&self.columns.index_select(tokens, 0)?)
    }
}

impl AdapterFormat for OnDevice {
    type Site = SiteWeights;
    type Embedding = EmbeddingWeights;

    fn site(
        &self,
        matrices: SiteMatrices,
        budget: &mut Budget,
    ) -> std::result::Result<SiteWeights, AdapterLoadError> {
        let SiteMatrices { first, scales, outputs, second, by_head } = matrices;
        let mut firsts = Vec::with_capacity(first.len());
        for matrix in first {
            firsts.push(self.convert(matrix.values(), [matrix.rows, matrix.columns], budget)?);
        }
        if by_head {
            let seconds = self.seconds_of_heads(&scales, &outputs, &second, budget)?;
            return Ok(SiteWeights::Heads {
                first: self.of_heads(firsts)?,
                second: self.of_heads(seconds)?,
            });
        }
        let out = outputs.iter().sum();
        budget.take(out, scales.len(), self.tensor_type())?;
        let mut values = vec![0.0; out * scales.len()];
        let mut rows = values.chunks_exact_mut(scales.len());
        for (count, second) in outputs.into_iter().zip(second) {
            let own = rows.by_ref().take(count);
            let Some(PlainSecond { start, matrix }) = second else {
                own.for_each(drop);
                continue;
            };
            let updates = scaled(&matrix, &scales[start..]);
            for (row, update) in own.zip(updates.chunks_exact(matrix.columns)) {
                row[start..][..update.len()].copy_from_slice(update);
            }
        }
        let second = self.tensor(values, [out, scales.len()])?;
        // There is one matrix `A`, because the projections have one input.
        let first = Tensor::cat(&firsts, 0).map_err(failed)?;
        Ok(SiteWeights::Rows { first: self.linear(&first)?, second: self.linear(&second)? })
    }

    fn embedding(
        &self,
        matrices: EmbeddingMatrices,
        budget: &mut Budget,
    ) -> std::result::Result<EmbeddingWeights, AdapterLoadError> {
        let EmbeddingMatrices { columns, scale, second } = matrices;
        let columns = self.convert(columns.values(), [columns.rows, columns.columns], budget)?;
        let values = scaled(&second, &vec![scale; second.columns]);
        let second = self.convert(values, [second.rows, second.columns], budget)?;
        Ok(EmbeddingWeights { columns: self.copy(&columns)?, second: self.linear(&second)? })
    }
}

impl OnDevice {
    /// The matrices `B` of all heads, multiplied by their scales: one if all heads share it.
    fn seconds_of_heads(
        &self,
        scales: &[f32],
        outputs: &[usize],
        second: &[Option<PlainSecond>],
        budget: &mut Budget,
    ) -> std::result::Result<Vec<Tensor>, AdapterLoadError> {
        let is_shared = second.windows(2).all(|pair| match pair {
            [Some(a), Some(b)] => Arc::ptr_eq(&a.matrix, &b.matrix),
            _ => false,
        });
        let mut seconds = Vec::with_capacity(second.len());
        let count = if is_shared { 1 } else { second.len() };
        for (second, out) in second.iter().zip(outputs).take(count) {
            let values = match second {
                Some(second) => scaled(&second.matrix, scales),
                None => vec![0.0; out * scales.len()],
            };
            seconds.push(self.convert(values, [*out, scales.len()], budget)?);
        }
        Ok(seconds)
    }

    /// Copies the matrices of all heads to the device; a single one belongs to all.
    fn of_heads(&self, matrices: Vec<Tensor>) -> std::result::Result<OfHeads, AdapterLoadError> {
        if let [matrix] = matrices.as_slice() {
            return Ok(OfHeads::Same(self.linear(matrix)?));
        }
        let stacked = Tensor::stack(&matrices, 0).map_err(failed)?;
        Ok(OfHeads::Each(HeadLinear::new(self.copy(&stacked)?, self.tile)))
    }

    /// Counts a matrix of this shape, and converts it to the compute type on the host.
    fn convert(
        &self,
        values: Vec<f32>,
        shape: [usize; 2],
        budget: &mut Budget,
    ) -> std::result::Result<Tensor, AdapterLoadError> {
        budget.take(shape[0], shape[1], self.tensor_type())?;
        self.tensor(values, shape)
    }

    /// A matrix of this shape in the compute type on the host.
    fn tensor(
        &self,
        values: Vec<f32>,
        shape: [usize; 2],
    ) -> std::result::Result<Tensor, AdapterLoadError> {
        let matrix = Tensor::from_vec(values, (shape[0], shape[1]), &Device::Cpu);
        matrix.and_then(|matrix| matrix.to_dtype(self.dtype)).map_err(failed)
    }

    /// Copies matrices to the device, and waits until this thread's copies are complete.
    fn copy(&self, matrices: &Tensor) -> std::result::Result<Tensor, AdapterLoadError> {
        let copied = matrices.to_device(&self.device).and_then(|copied| {
            self.device.synchronize()?;
            Ok(copied)
        });
        copied.map_err(failed)
    }

    fn linear(&self, matrix: &Tensor) -> std::result::Result<Linear, AdapterLoadError> {
        Ok(Linear::new(vec![Matrix::Dense(self.copy(matrix)?)], None, self.tile))
    }

    /// The type of files with the size of the compute type.
    fn tensor_type(&self) -> TensorType {
        match self.dtype {
            DType::F16 => TensorType::F16,
            DType::BF16 => TensorType::Bf16,
            _ => TensorType::F32,
        }
    }
}

/// The values of a matrix `B`, `[out, rank]`, with each column multiplied by its scale.
fn scaled(matrix: &PlainMatrix, scales: &[f32]) -> Vec<f32> {
    let mut values = matrix.values();
    for row in values.chunks_exact_mut(matrix.columns) {
        row.iter_mut().zip(scales).for_each(|(value, scale)| *value *= scale);
    }
    values
}

/// The error of a copy to the device, which fails if the device has too little memory.
#[allow(clippy::needless_pass_by_value, reason = "it is passed to map_err")]
fn failed(error: candle_core::Error) -> AdapterLoadError {
    AdapterLoadError::TooLarge(format!("copying an adapter to the device: {}", message(&error)))
}
