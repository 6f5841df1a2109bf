//! [`WindowKv`]: where layers with a sliding window keep their keys and values.

use std::str::FromStr;

use super::KvShape;
use crate::config::DecoderConfig;
use crate::error::ModelError;

/// Where layers with a sliding window keep their keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WindowKv {
    /// In blocks, as other layers do, for all positions: a prefix can be used again from any block.
    #[default]
    Blocks,
    /// In the state of each running sequence, for the positions of the window only: long contexts
    /// take less memory, and a prefix can be used again only from where a state was kept.
    States,
}

impl WindowKv {
    /// All places.
    pub const ALL: [Self; 2] = [Self::Blocks, Self::States];

    /// The shape `shape` of the KV store of a model with windows in this place.
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
        Self::ALL.into_iter().find(|place| place.name() == name).ok_or_else(|| {
            ModelError::InvalidOption {
                name: "window KV".to_owned(),
                expected: format!("one of {}", Self::ALL.map(Self::name).join(", ")),
                got: format!("`{name}`"),
            }
        })
    }
}
