//! Copies a model's weights to the device. The memory of each tensor is released as soon as it is
//! copied, so that the model is never in memory twice.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use stolon_checkpoint::config::{LinearWeights, TensorSpec};
use stolon_checkpoint::{TensorType, Weights};

use crate::OpenError;
use crate::linear::{HeadLinear, Kind, Linear, Matrix, RowTile};

/// Loads tensors by their descriptions.
#[derive(Debug)]
pub(crate) struct Loader {
    pub(crate) weights: Weights,
    pub(crate) device: Device,
    /// Element type of dense matrices.
    pub(crate) dtype: DType,
    /// The row tile of all products.
    pub(crate) tile: RowTile,
    /// The matrices that were tried, with the numbers of rows that [`Linear::try_larger`] has
    /// returned.
    pub(crate) tried: Vec<(Vec<Kind>, Arc<[usize]>)>,
}

impl Loader {
    /// Loads a matrix and its bias.
    pub(crate) fn linear(&mut self, spec: &LinearWeights) -> Result<Linear, OpenError> {
        self.stacked(std::slice::from_ref(spec))
    }

    /// Loads projections with the same input and concatenates their matrices along the output
    /// features. Adjacent matrices of the same type become one.
    pub(crate) fn stacked(&mut self, parts: &[LinearWeights]) -> Result<Linear, OpenError> {
        let kind = |part: &LinearWeights| self.weights.dtype(&part.weight.name).and_then(quantized);
        let matrices = parts.chunk_by(|a, b| kind(a) == kind(b)).map(|parts| {
            let specs: Vec<&TensorSpec> = parts.iter().map(|part| &part.weight).collect();
            self.matrix(&specs)
        });
        let matrices = matrices.collect::<Result<_, _>>()?;
        let mut biases = Vec::new();
        for LinearWeights { weight, bias } in parts {
            self.weights.remove(&weight.name);
            if let Some(bias) = bias {
                biases.push(self.vector(bias, 0.0)?);
            }
        }
        // Either all parts have a bias or none.
        let bias = (!biases.is_empty()).then(|| Tensor::cat(&biases, 0)).transpose()?;
        let linear = Linear::new(matrices, bias, self.tile);
        let kinds = linear.kinds();
        if let Some((_, larger)) = self.tried.iter().find(|(tried, _)| *tried == kinds) {
            return Ok(linear.with_larger(larger.clone()));
        }
        // A trial on the CPU, which is used only for tests, would take longer than it saves.
        let larger = match self.device.is_cpu() {
            true => Arc::default(),
            false => linear.try_larger(&self.device)?,
        };
        tracing::debug!(?kinds, ?larger, "numbers of rows with the bits of a tile");
        self.tried.push((kinds, larger.clone()));
        Ok(linear.with_larger(larger))
    }

    /// Loads projections with the same input, without biases, as one matrix in f32: small matrices
    /// whose errors would matter more than errors of other matrices.
    pub(crate) fn exact(&mut self, parts: &[LinearWeights]) -> Result<Linear, OpenError> {
        let mut matrices = Vec::with_capacity(parts.len());
        for LinearWeights { weight, bias: _ } in parts {
            matrices.push(self.dense_in(weight, DType::F32)?);
            self.weights.remove(&weight.name);
        }
        Ok(Linear::new(vec![Matrix::Dense(Tensor::cat(&matrices, 0)?)], None, self.tile))
    }

    /// Loads the matrices of the heads of a layer, which all have the same shape.
    pub(crate) fn of_heads(&mut self, specs: &[TensorSpec]) -> Result<HeadLinear, OpenError> {
        let mut matrices = Vec::with_capacity(specs.len());
        for spec in specs {
            matrices.push(self.dense(spec)?);
            self.weights.remove(&spec.name);
        }
        Ok(HeadLinear::new(Tensor::stack(&matrices, 0)?, self.tile))
    }

    /// Loads the output matrix and its bias.
    pub(crate) fn head(
        &mut self,
        spec: &TensorSpec,
        bias: Option<&TensorSpec>,
    ) -> Result<Linear, OpenError> {
        let matrix = self.matrix(&[spec])?;
        self.weights.remove(&spec.name);
        let bias = bias.map(|bias| self.vector(bias, 0.0)).transpose()?;
        Ok(Linear::new(vec![matrix], bias, self.tile))
    }

    /// The output matrix of a model whose output matrix is its embedding. `embedding` is the same
    /// tensor in the compute type. It is loaded again only if it can be kept in quantized blocks.
    pub(crate) fn tied_head(
        &self,
        spec: &TensorSpec,
        embedding: &Tensor,
    ) -> Result<Linear, OpenError> {
        let is_quantized = self.weights.dtype(&spec.name).and_then(quantized).is_some();
        let matrix = match is_quantized {
            true => self.matrix(&[spec])?,
            false => Matrix::Dense(embedding.clone()),
        };
        Ok(Linear::new(vec![matrix], None, self.tile))
    }

    /// Loads matrices with the same number of columns and concatenates their rows. They stay in
    /// quantized blocks if candle has their type, which is then the same for all, else they are
    /// converted to the compute type.
    fn matrix(&self, parts: &[&TensorSpec]) -> Result<Matrix, OpenError> {
        let Some(dtype) = self.weights.dtype(&parts[0].name).and_then(quantized) else {
            let parts = parts.iter().map(|spec| self.dense(spec)).collect::<Result<Vec<_>, _>>()?;
            return Ok(Matrix::Dense(Tensor::cat(&parts, 0)?));
        };
        let tensors = parts.iter().map(|spec| self.weights.tensor(&spec.name, &spec.shape));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let bytes = match tensors.as_slice() {
            [tensor] => Cow::Borrowed(tensor.bytes.as_ref()),
            tensors => {
                let parts: Vec<&[u8]> =
                    tensors.iter().map(|tensor| tensor.bytes.as_ref()).collect();
                Cow::Owned(parts.concat())
            }
        };
        let mut buffer = Vec::new();
        let bytes = Cow::Borrowed(aligned(&bytes, &mut buffer));
        let rows: usize = parts.iter().map(|spec| spec.shape[0]).sum();
        let storage = QStorage::from_data(bytes, &self.device, dtype)?;
        let matrix = Arc::new(QTensor::new(storage, (rows, parts[0].shape[1]))?);
        tensors.iter().for_each(|tensor| self.weights.release(&tensor.bytes));
        Ok(Matrix::Quantized(QMatMul::QTensor(matrix)))
    }

    /// Loads a matrix of any type and converts it to the compute type.
    pub(crate) fn dense(&self, spec: &TensorSpec) -> Result<Tensor, OpenError> {
        self.dense_in(spec, self.dtype)
    }

    /// Loads a matrix of any type and converts it to the type `dtype`.
    fn dense_in(&self, spec: &TensorSpec, dtype: DType) -> Result<Tensor, OpenError> {
        let shape = spec.shape.as_slice();
        let tensor = self.weights.tensor(&spec.name, shape)?;
        let stored = match tensor.dtype {
            TensorType::F32 => Some(DType::F32),
            TensorType::F16 => Some(DType::F16),
            TensorType::Bf16 => Some(DType::BF16),
            _ => None,
        };
        let loaded = match stored {
            Some(dtype) => Tensor::from_raw_buffer(&tensor.bytes, dtype, shape, &self.device)?,
            None => {
                let mut values = vec![0.0; shape.iter().product()];
                stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
                Tensor::from_vec(values, shape, &self.device)?
            }
        };
        self.weights.release(&tensor.bytes);
        Ok(loaded.to_dtype(dtype)?)
    }

    /// Loads a norm or a bias in f32 and adds `offset` to each element.
    pub(crate) fn vector(&mut self, spec: &TensorSpec, offset: f32) -> Result<Tensor, OpenError> {
        let mut values = self.weights.floats(spec)?;
        self.weights.remove(&spec.name);
        values.iter_mut().for_each(|value| *value += offset);
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &self.device)?)
    }
}

/// candle's type with the same blocks, if there is one.
fn quantized(dtype: TensorType) -> Option<GgmlDType> {
    Some(match dtype {
        TensorType::Q4_0 => GgmlDType::Q4_0,
        TensorType::Q4_1 => GgmlDType::Q4_1,
        TensorType::Q5_0 => GgmlDType::Q5_0,
        TensorType::Q5_1 => GgmlDType::Q5_1,
        TensorType::Q8_0 => GgmlDType::Q8_0,
        TensorType::Q2K => GgmlDType::Q2K,
        TensorType::Q3K => GgmlDType::Q3K,
        TensorType::Q4K => GgmlDType::Q4K,
        TensorType::Q5K => GgmlDType::Q5K,
        TensorType::Q6K => GgmlDType::Q6K,
        _ => return None,
    })
}

/// Size in bytes on the device of a matrix of `elements` elements that has the type `dtype` in the
/// file. Dense matrices have `width` bytes per element there.
pub(crate) fn device_bytes(dtype: TensorType, elements: usize, width: usize) -> u64 {
    let bytes = match quantized(dtype) {
        Some(_) => dtype.bytes_of(elements),
        None => elements.checked_mul(width),
    };
    bytes.map_or(u64::MAX, |bytes| bytes as u64)
}

/// Returns the bytes at an address with the alignment of candle's blocks; candle panics with any
/// other address. They are copied to `buffer` if necessary.
fn aligned<'a>(bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> &'a [u8] {
    const ALIGNMENT: usize = 8;
    if bytes.as_ptr().align_offset(ALIGNMENT) == 0 {
        return bytes;
    }
    buffer.resize(bytes.len() + ALIGNMENT, 0);
    let start = buffer.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut buffer[start..start + bytes.len()];
    buffer.copy_from_slice(bytes);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: bytes at any address are returned unchanged, at an aligned address.
    #[test]
    fn unaligned_bytes_are_copied() {
        let bytes: Vec<u8> = (0..64).collect();
        for start in 0..16 {
            let mut buffer = Vec::new();
            let got = aligned(&bytes[start..], &mut buffer);
            assert_eq!(got, &bytes[start..]);
            assert_eq!(got.as_ptr().align_offset(8), 0);
        }
    }
}
