//! [`WindowKv`] says where layers with a sliding window keep their keys and values.

use std::str::FromStr;

use super::KvShape;
use crate::config::DecoderConfig;
use crate::error::ModelError;

/// The place where layers with a sliding window keep their keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowKv {
    /// In blocks for all positions, as in other layers. A prefix can be resumed from any block.
    #[default]
    Blocks,
    /// In the state of each running sequence, only for the positions of the window. Long contexts
    /// take less memory, but a prefix can be resumed only where a state was kept.
    States,
}

impl WindowKv {
    /// All places.
    pub const ALL: [Self; 2] = [Self::Blocks, Self::States];

    /// Changes the shape `shape` of a model's KV store so that windows are kept in this place.
    #[must_use]
    pub fn apply(self, shape: KvShape, config: &DecoderConfig) -> KvShape {
        match self {
            Self::Blocks => shape,
            Self::States => shape.with_windows(config),
        }
    }

    /// The name, which [`WindowKv::from_str`] parses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::States => "states",
        }
    }
}

impl std::fmt::Display for WindowKv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WindowKv {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        let named = Self::ALL.into_iter().find(|place| place.name() == name);
        named.ok_or_else(|| ModelError::not_one_of("window KV", &Self::ALL.map(Self::name), name))
    }
}
