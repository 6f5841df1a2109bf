//! Copies a model's weights to the device, and releases the memory of each one afterwards, so that
//! the model is never in memory twice.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use stolon_model::{ModelError, TensorType, Weights};

use crate::OpenError;
use crate::linear::{Linear, Matrix};

/// Loads tensors by their Hugging Face names.
#[derive(Debug)]
pub(crate) struct Loader {
    pub(crate) weights: Weights,
    pub(crate) device: Device,
    /// Element type of dense matrices.
    pub(crate) dtype: DType,
    /// See [`Linear::new`].
    pub(crate) row_tile: Option<usize>,
}

impl Loader {
    /// Loads `{name}.weight` of the shape `[out, input]` and, if `bias` is true, `{name}.bias`.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        shape: [usize; 2],
        bias: bool,
    ) -> Result<Linear, OpenError> {
        let matrix = self.matrix(&format!("{name}.weight"), shape)?;
        self.weights.remove(&format!("{name}.weight"));
        let bias = bias.then(|| self.vector(&format!("{name}.bias"), shape[0], 0.0)).transpose()?;
        Ok(Linear::new(matrix, bias, self.row_tile))
    }

    /// The output matrix of a model that has the embedding as its output matrix. `embedding` is the
    /// same tensor in the compute type; it is loaded again only to keep it in quantised blocks.
    pub(crate) fn tied_linear(
        &self,
        name: &str,
        shape: [usize; 2],
        embedding: &Tensor,
    ) -> Result<Linear, OpenError> {
        let is_quantised = self.weights.dtype(name).and_then(quantised_type).is_some();
        let matrix = match is_quantised {
            true => self.matrix(name, shape)?,
            false => Matrix::Dense(embedding.clone()),
        };
        Ok(Linear::new(matrix, None, self.row_tile))
    }

    /// Loads the matrix `name` of the shape `[out, input]`: in quantised blocks where candle has the
    /// type, else in the compute type.
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Matrix, OpenError> {
        let tensor = self.weights.tensor(name, &shape)?;
        let matrix = match quantised_type(tensor.dtype) {
            Some(dtype) => {
                let mut buffer = Vec::new();
                let bytes = Cow::Borrowed(aligned(&tensor.bytes, &mut buffer));
                let storage = QStorage::from_data(bytes, &self.device, dtype)?;
                let tensor = Arc::new(QTensor::new(storage, &shape[..])?);
                Matrix::Quantised(QMatMul::QTensor(tensor))
            }
            None => Matrix::Dense(self.dense(name, &shape)?),
        };
        self.weights.release(&tensor.bytes);
        Ok(matrix)
    }

    /// Loads the tensor `name` in the compute type, whatever its type in the file is.
    pub(crate) fn dense(&self, name: &str, shape: &[usize]) -> Result<Tensor, OpenError> {
        let tensor = self.weights.tensor(name, shape)?;
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
        Ok(loaded.to_dtype(self.dtype)?)
    }

    /// Loads the vector `name` (a norm or a bias) of the length `len` in f32 and adds `offset` to
    /// each element.
    pub(crate) fn vector(
        &mut self,
        name: &str,
        len: usize,
        offset: f32,
    ) -> Result<Tensor, OpenError> {
        let tensor = self.weights.tensor(name, &[len])?;
        if tensor.dtype.block_len() > 1 {
            let error = ModelError::WrongType {
                file: "weights".to_owned(),
                tensor: name.to_owned(),
                expected: "F32, F16 or BF16".to_owned(),
                got: tensor.dtype.name().to_owned(),
            };
            return Err(error.into());
        }
        let mut values = vec![0.0; len];
        stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
        drop(tensor);
        self.weights.remove(name);
        values.iter_mut().for_each(|value| *value += offset);
        Ok(Tensor::from_vec(values, len, &self.device)?)
    }
}

/// The type of candle with the same blocks, if there is one.
fn quantised_type(dtype: TensorType) -> Option<GgmlDType> {
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

/// The size in bytes that a matrix of the type `dtype` and `elements` elements has on the device, if
/// dense ones have `width` bytes per element.
pub(crate) fn device_bytes(dtype: TensorType, elements: usize, width: usize) -> u64 {
    let bytes = match quantised_type(dtype) {
        Some(_) => dtype.bytes_of(elements),
        None => elements.checked_mul(width),
    };
    bytes.map_or(u64::MAX, |bytes| bytes as u64)
}

/// The same bytes at an address with the alignment that candle's blocks need, or it would panic.
/// They are copied to `buffer` if necessary.
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

    /// Goal: bytes at any address are the same afterwards, at an aligned address.
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
