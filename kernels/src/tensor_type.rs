//! The element types of weights: what the loaders read and the kernels multiply.

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
    /// Every type there is.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

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
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }
}
