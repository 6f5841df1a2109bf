//! Decoding and preprocessing of images for vision models.
//!
//! * [`Picture`]: a picture that was decoded within [`PictureLimits`];
//! * [`ImageProcessor`]: cuts and resizes a picture for a model, and writes the string that takes
//!   its place in the prompt;
//! * [`ProcessorConfig`]: the settings for that in a model's files. The loader fills it in, also in
//!   builds without the feature `processor`, which have neither decoders nor an [`ImageProcessor`].
//!
//! The crate computes pixels only. The image encoder of a model turns them into embeddings.
#![forbid(unsafe_code)]

// The examples of the README are documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod config;
#[cfg(feature = "processor")]
mod error;
#[cfg(feature = "processor")]
mod picture;
#[cfg(feature = "processor")]
mod processor;
#[cfg(feature = "processor")]
mod resize;

pub use config::{
    Gemma3Tiles, Idefics3Tiles, MoondreamTiles, PanAndScan, ProcessorConfig, Qwen3VlTiles,
    Resampling, Tiling,
};
#[cfg(feature = "processor")]
pub use error::PictureError;
#[cfg(feature = "processor")]
pub use picture::{Picture, PictureLimits};
#[cfg(feature = "processor")]
pub use processor::{ImageProcessor, PreparedImage};
