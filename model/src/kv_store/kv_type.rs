//! What keys and values are stored as.

use std::str::FromStr;

use crate::error::ModelError;

/// Element type of stored keys and values. What is stored is nearest to what was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Single precision: exact, twice the memory of bf16.
    F32,
    /// The upper half of an f32: relative error up to 2^-9.
    Bf16,
    /// IEEE half precision: relative error up to 2^-12; what is beyond its range, 65,504, is stored as
    /// that. Takes bf16's memory and computes slower where there are tiles of bf16.
    F16,
    /// Integers of 8 bits with an f32 scale a position and head: about half of bf16's memory; error
    /// up to 1/254 of the head's largest value. Computes as [`KvType::F16`] does.
    Int8,
}

impl KvType {
    /// Every type there is.
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::F16, Self::Int8];

    /// Bytes of one head of `head_dim` elements, its scale included.
    #[must_use]
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::Bf16 | Self::F16 => 2 * head_dim,
            Self::Int8 => head_dim + size_of::<f32>(),
        }
    }

    /// Its name, as [`KvType::from_str`] reads it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
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
        Self::ALL.into_iter().find(|kv_type| kv_type.name() == name).ok_or_else(|| {
            ModelError::InvalidOption {
                name: "KV type".to_owned(),
                expected: format!("one of {}", Self::ALL.map(Self::name).join(", ")),
                got: format!("`{name}`"),
            }
        })
    }
}
