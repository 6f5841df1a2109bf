//! A model's weights: named tensors in memory that outlive every step, found by the names that
//! Hugging Face gives them, whatever file they came from.
//!
//! Opened once by the loader. The bytes stay where they are (a memory map, the binary, a
//! buffer); a [`Tensor`] borrows them, except where the file's layout has to be undone.

use std::borrow::Cow;

use crate::error::ModelError;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// Blocks of 32: an f16 scale and 32 i8.
    Q8_0,
    /// Super-blocks of 256 with 4-bit values (144 bytes).
    Q4K,
    /// Super-blocks of 256 with 5-bit values (176 bytes).
    Q5K,
    /// Super-blocks of 256 with 6-bit values (210 bytes).
    Q6K,
}

impl TensorType {
    /// Elements that are stored together; a row's length is a multiple of it.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of [`block_len`](Self::block_len) elements.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// The name used in messages and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Bytes of a row-major tensor with `elements` elements; `None` when they are no whole
    /// blocks or the number overflows.
    #[must_use]
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if elements % self.block_len() != 0 {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}

/// One tensor, row-major (last dimension contiguous), little-endian.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Its Hugging Face name.
    pub name: String,
    /// Element type.
    pub dtype: TensorType,
    /// Sizes, outermost first: `[out, in]` of a projection.
    pub shape: Vec<usize>,
    /// The elements. Alignment is not promised: safetensors headers have any length.
    pub bytes: Cow<'a, [u8]>,
}

/// All tensors of a model.
#[derive(Debug)]
pub struct Weights {
    inner: std::collections::HashMap<String, (TensorType, Vec<usize>, Vec<u8>)>,
}

impl Weights {
    /// The tensor called `name` by Hugging Face (`model.layers.0.self_attn.q_proj.weight`,
    /// `model.embed_tokens.weight`, `model.norm.weight`, `lm_head.weight`), with exactly `shape`.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], [`ModelError::WrongType`] when
    /// the kernels cannot read its type; each names the file and the tensor.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let Some((dtype, got, bytes)) = self.inner.get(name) else {
            return Err(ModelError::MissingTensor {
                file: "memory".into(),
                tensor: name.into(),
                expected: shape.to_vec(),
            });
        };
        if got != shape {
            return Err(ModelError::WrongShape {
                file: "memory".into(),
                tensor: name.into(),
                expected: shape.to_vec(),
                got: got.clone(),
            });
        }
        Ok(Tensor {
            name: name.into(),
            dtype: *dtype,
            shape: got.clone(),
            bytes: Cow::Borrowed(bytes),
        })
    }

    /// Whether a tensor of that name is there.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.inner.contains_key(name)
    }
}
