//! [`KvType`] is the type in which keys and values are stored, and [`KvElement`] that of one of them.

use std::str::FromStr;

use stolon_kernels::TensorType;

use crate::error::ModelError;

/// The type in which keys and values are stored. Values are rounded to nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Single precision: exact, but twice the memory of bf16.
    F32,
    /// The upper half of an f32: relative error up to 2^-8.
    Bf16,
    /// IEEE half precision: relative error up to 2^-11. Values outside of its range are stored as
    /// ±65,504. Needs the same memory as bf16, but is slower on machines with AMX or AVX-512 BF16,
    /// which multiply bf16.
    F16,
    /// 8-bit integers with an f32 scale per position and head: about half the memory of bf16. The
    /// error is up to 1/254 of the largest magnitude in the head. As fast as [`KvType::F16`], or
    /// almost as fast as [`KvType::Bf16`] with AVX-512 BF16.
    Int8,
    /// Keys as [`KvType::Int8`] and values as [`KvType::Int4`]: keys need more bits than values,
    /// because an error of a score changes the weights of all positions. Keys that are also the
    /// values (latent attention) are stored as [`KvType::Int8`].
    K8V4,
    /// 4 bits with an f32 scale per position and head: about half the memory of [`KvType::Int8`].
    /// Heads are rotated by a Walsh-Hadamard matrix before they are rounded, so that a few large
    /// values do not make the error of all others larger: in groups of the largest power of two up
    /// to 256 that divides the number of elements of a head (80 = 5 x 16, 96 = 3 x 32). This number
    /// must be even. Keys in 4 bits cost small models several percent of perplexity;
    /// [`KvType::K8V4`] costs less than 1 %.
    Int4,
}

/// The element type of keys or of values. See [`KvType`].
///
/// In the bytes of a block, the elements of all of its positions come first, and the scales of all
/// of its positions follow, `[block_size, kv_heads]` in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvElement {
    /// Single precision.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 8-bit integers with a scale per position and head.
    Int8,
    /// Rotated heads of 4-bit codes with a scale per position and head.
    Int4,
}

impl KvElement {
    /// Size in bytes of one head of `head_dim` elements, including its scale.
    #[must_use]
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::Bf16 | Self::F16 => 2 * head_dim,
            Self::Int8 => head_dim + size_of::<f32>(),
            Self::Int4 => head_dim / 2 + size_of::<f32>(),
        }
    }
}

impl KvType {
    /// All types.
    pub const ALL: [Self; 6] =
        [Self::F32, Self::Bf16, Self::F16, Self::Int8, Self::K8V4, Self::Int4];

    /// The default type for weights of this type. It is not more precise than the weights.
    #[must_use]
    pub fn of_weights(weights: TensorType) -> Self {
        match weights {
            TensorType::F32 => Self::F32,
            _ => Self::Bf16,
        }
    }

    /// The element types of keys and of values.
    #[must_use]
    pub fn elements(self) -> [KvElement; 2] {
        match self {
            Self::F32 => [KvElement::F32; 2],
            Self::Bf16 => [KvElement::Bf16; 2],
            Self::F16 => [KvElement::F16; 2],
            Self::Int8 => [KvElement::Int8; 2],
            Self::K8V4 => [KvElement::Int8, KvElement::Int4],
            Self::Int4 => [KvElement::Int4; 2],
        }
    }

    /// The type for what has no scales: bf16 instead of types with fewer bits.
    #[must_use]
    pub fn without_scales(self) -> Self {
        match self {
            Self::Int8 | Self::K8V4 | Self::Int4 => Self::Bf16,
            other => other,
        }
    }

    /// The type in which the inputs of convolutions are stored. They have no heads, and therefore
    /// no scales.
    #[must_use]
    pub fn of_convolutions(self) -> KvElement {
        self.without_scales().elements()[0]
    }

    /// The type's name, which [`KvType::from_str`] parses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::K8V4 => "k8v4",
            Self::Int4 => "int4",
        }
    }
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        let named = Self::ALL.into_iter().find(|kv_type| kv_type.name() == name);
        named.ok_or_else(|| ModelError::not_one_of("KV type", &Self::ALL.map(Self::name), name))
    }
}
