//! The element types of weights, as checkpoint files store them and kernels multiply them.

/// Element type of a stored tensor. The quantised types have the layouts of GGUF files (ggml).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// The upper 16 bits of an f32 (bfloat16), 2 bytes.
    Bf16,
    /// Blocks of 32 weights: an f16 scale and 32 signed bytes (34 bytes).
    Q8_0,
    /// Super-blocks of 256 weights of 4 bits (144 bytes).
    Q4K,
    /// Super-blocks of 256 weights of 5 bits (176 bytes).
    Q5K,
    /// Super-blocks of 256 weights of 6 bits (210 bytes).
    Q6K,
}

impl TensorType {
    /// All element types.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    /// Number of elements in a block, the unit of storage: 1, 32 or 256. The row length of a tensor
    /// must be a multiple of it.
    #[must_use]
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block, that is, of [`block_len`](Self::block_len) elements.
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

    /// The name used in messages and files, such as `BF16` or `Q4_K`.
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

    /// Bytes of a tensor with `elements` elements; `None` if `elements` is not a multiple of
    /// [`block_len`](Self::block_len) or the size overflows.
    #[must_use]
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}
