//! The configuration of an image encoder. It consists of a vision transformer, which computes
//! features for each patch of an image, and a projector, which converts them to embeddings for the
//! decoder.
//!
//! The decoder has a [`DecoderConfig`](super::DecoderConfig) of its own, and does not depend on the
//! kind of encoder.

mod weights;

use stolon_backend::RegionBins;

use super::keys::SIZE_MAX;
use crate::config::LAYERS_MAX;
use crate::error::ModelError;
pub use weights::{
    LayerNormWeights, MergerWeights, ProjectorWeights, RegionWeights, ValueWeights,
    VisionLayerWeights, VisionWeights,
};

/// Maximum number of tiles of an image. Their features are in memory at the same time.
const TILES_MAX: usize = 64;

/// The description of the encoder, without the weights. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// The vision transformer.
    pub tower: TowerConfig,
    /// The projector from features to embeddings.
    pub projector: ProjectorConfig,
    /// Width of an embedding: `hidden_size` of the decoder.
    pub output_size: usize,
    /// Mean of each channel, which is subtracted from pixel values from 0 to 1.
    pub mean: [f32; 3],
    /// Standard deviation of each channel, by which the difference is divided; above 0.
    pub deviation: [f32; 3],
    /// A token whose embedding is the first row of every image, before the rows of the encoder;
    /// `None` for most models. In Moondream, the token that begins a sequence attends to the image
    /// after it, so it is a part of the image.
    pub first_token: Option<u32>,
    /// Coordinates and sizes in the image as tokens of the decoder, if the model has them.
    pub regions: Option<RegionConfig>,
}

/// Coordinates and sizes as tokens (Moondream). Encoders compute their embeddings from Fourier
/// features, and decoders compute the logits of their bins from the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionConfig {
    /// Number of bins of a coordinate, from 2 to 2^14.
    pub coordinate_bins: usize,
    /// Number of bins of a width, and of a height, from 2 to 2^14.
    pub size_bins: usize,
    /// Number of features of a coordinate, which is even.
    pub coordinate_features: usize,
    /// Number of features of a size, which is even.
    pub size_features: usize,
    /// Width of the MLPs that compute the bins; `None` if projections of the normalized residual
    /// stream compute them (Moondream 3).
    pub inner_size: Option<usize>,
}

impl RegionConfig {
    /// The numbers of bins.
    #[must_use]
    pub fn bins(&self) -> RegionBins {
        RegionBins { coordinates: self.coordinate_bins, sizes: self.size_bins }
    }

    fn check(&self, file: &str) -> Result<(), ModelError> {
        for (key, size, max) in [
            ("coord_out_dim", self.coordinate_bins, BINS_MAX),
            ("size_out_dim", self.size_bins, BINS_MAX),
            ("coord_feat_dim", self.coordinate_features, SIZE_MAX as usize),
            ("size_feat_dim", self.size_features, SIZE_MAX as usize),
            ("inner_dim", self.inner_size.unwrap_or(2), SIZE_MAX as usize),
        ] {
            if !(2..=max).contains(&size) {
                let key = format!("region.{key}");
                return Err(ModelError::key(file, &key, format!("2 to {max}"), size));
            }
        }
        match (self.coordinate_features | self.size_features).is_multiple_of(2) {
            true => Ok(()),
            false => Err(ModelError::key(file, "region", "even numbers of features", "an odd one")),
        }
    }
}

/// Maximum number of bins. A token of a size contains two bins.
const BINS_MAX: usize = 1 << 14;

/// A vision transformer like SigLIP: patches with learned positions, layers with layer norms before
/// attention and MLP, attention in both directions, and a norm at the end. In Qwen3-VL, the last
/// norm belongs to the projector.
#[derive(Clone, Debug, PartialEq)]
pub struct TowerConfig {
    /// The prefix of the names of its tensors, including the dot.
    pub prefix: String,
    /// Width of the residual stream, a multiple of `heads`.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of heads.
    pub heads: usize,
    /// Edge of a patch in pixels.
    pub patch_size: usize,
    /// Number of frames of a patch, each of which is the same picture: 1, or 2 in Qwen3-VL, which
    /// also encodes videos.
    pub frames: usize,
    /// Edge in pixels of the square images of the training, a multiple of `patch_size`. There is
    /// one learned position for each patch of such an image.
    pub image_size: usize,
    /// How the positions of patches are used.
    pub positions: PatchPositions,
    /// Epsilon that is added to the variance in layer norms.
    pub norm_eps: f32,
}

/// How a tower uses the positions of patches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PatchPositions {
    /// SigLIP: a patch has the learned position at the same fraction of the edges.
    Nearest,
    /// Qwen3-VL: learned positions are interpolated linearly along both edges. The first half of
    /// the pairs of queries and keys is rotated by the row of a patch, and the second half by its
    /// column.
    Rotary {
        /// Base of the frequencies, above 0.
        theta: f64,
    },
}

impl TowerConfig {
    /// Length of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Number of patches along the edge of a training image.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size
    }
}

/// How the features of patches become embeddings.
#[derive(Clone, Debug, PartialEq)]
pub enum ProjectorConfig {
    /// Idefics 3 and SmolVLM: the features of a square of patches are concatenated and projected.
    PixelShuffle {
        /// Edge of the square in patches, a divisor of the edge of the image in patches.
        factor: usize,
    },
    /// Gemma 3: the mean of the features of a square of patches is normalized and projected.
    AveragePooling {
        /// Edge of the square in patches, a divisor of the edge of the image in patches.
        factor: usize,
        /// Offset that is added to the weights of the norm.
        norm_offset: f32,
    },
    /// Moondream: the features of the whole picture are concatenated with the features of its
    /// tiles, which are pooled to the same number, and projected by an MLP.
    Tiles {
        /// Margin of a tile in patches. Adjacent tiles overlap by twice the margin, which is less
        /// than their edge.
        margin: usize,
        /// Maximum number of tiles.
        tiles_max: usize,
        /// Width of the MLP.
        inner_size: usize,
    },
    /// Qwen3-VL: the normalized features of a square of patches are concatenated and pass through
    /// an MLP. The features of some layers of the tower also pass through MLPs, and the decoder
    /// adds the results to the outputs of its first layers (DeepStack).
    Merger {
        /// Edge of the square in patches.
        factor: usize,
        /// The layers of the tower whose features are passed to the decoder, in ascending order.
        deepstack: Vec<usize>,
    },
}

impl ProjectorConfig {
    /// Edge in patches of the square that becomes one embedding.
    #[must_use]
    pub fn factor(&self) -> usize {
        match self {
            Self::PixelShuffle { factor }
            | Self::AveragePooling { factor, .. }
            | Self::Merger { factor, .. } => *factor,
            Self::Tiles { .. } => 1,
        }
    }
}

/// Maximum number of embeddings of an image of variable size, whose patches are all in memory at
/// the same time. Processors allow about half of it, and exceed that only for narrow pictures.
const ROWS_MAX: usize = 1 << 13;

impl VisionConfig {
    /// Number of the decoder's first layers to whose outputs an image adds rows.
    #[must_use]
    pub fn deepstack_layers(&self) -> usize {
        match &self.projector {
            ProjectorConfig::Merger { deepstack, .. } => deepstack.len(),
            _ => 0,
        }
    }

    /// Number of columns of the grid of an image's embeddings, for an image of `width` pixels; 0 if
    /// the decoder numbers their positions in the same way as text.
    #[must_use]
    pub fn columns_of(&self, width: usize) -> usize {
        match &self.projector {
            ProjectorConfig::Merger { factor, .. } => width / (self.tower.patch_size * factor),
            _ => 0,
        }
    }

    /// The number of embeddings of an image of `width` x `height` pixels. If the encoder reads
    /// tiles, the image has them below the whole picture.
    ///
    /// # Errors
    /// A description of the expected size, if the encoder cannot process this one.
    pub fn rows_of(&self, [width, height]: [usize; 2]) -> Result<usize, String> {
        let TowerConfig { patch_size, image_size, .. } = self.tower;
        if let ProjectorConfig::Tiles { tiles_max, .. } = self.projector {
            let tiles = (height / image_size).saturating_sub(1);
            let is_valid = width == image_size && height == image_size * (1 + tiles);
            return match is_valid && (1..=tiles_max).contains(&tiles) {
                true => Ok(self.tower.grid().pow(2) + usize::from(self.first_token.is_some())),
                false => {
                    Err(format!("a picture and 1 to {tiles_max} tiles of {image_size} pixels"))
                }
            };
        }
        let step = patch_size * self.projector.factor();
        if let ProjectorConfig::Merger { .. } = self.projector {
            let is_valid = |edge: usize| edge > 0 && edge.is_multiple_of(step);
            let rows = (width / step).checked_mul(height / step);
            return match rows.filter(|rows| *rows <= ROWS_MAX) {
                Some(rows) if is_valid(width) && is_valid(height) => Ok(rows),
                _ => Err(format!("multiples of {step} pixels with at most {ROWS_MAX} squares")),
            };
        }
        let is_valid = |edge: usize| edge > 0 && edge <= image_size && edge.is_multiple_of(step);
        match is_valid(width) && is_valid(height) {
            true => Ok((width / step) * (height / step)),
            false => Err(format!("multiples of {step} pixels up to {image_size}")),
        }
    }

    /// Checks the documented ranges of the fields and the relations between them. `file` is the
    /// file's name in error messages.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] for the first field that is out of range.
    pub fn check(&self, file: &str) -> Result<(), ModelError> {
        let TowerConfig { hidden_size, intermediate_size, layers, heads, .. } = self.tower;
        let TowerConfig { patch_size, image_size, .. } = self.tower;
        for (key, size) in [
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_hidden_layers", layers),
            ("num_attention_heads", heads),
            ("patch_size", patch_size),
            ("image_size", image_size),
        ] {
            let max = if key == "num_hidden_layers" { LAYERS_MAX as u64 } else { SIZE_MAX };
            if size == 0 || size as u64 > max {
                return Err(ModelError::key(file, &named(key), format!("1 to {max}"), size));
            }
        }
        if !hidden_size.is_multiple_of(heads) {
            let expected = format!("a divisor of hidden_size, {hidden_size}");
            return Err(ModelError::key(file, &named("num_attention_heads"), expected, heads));
        }
        // All patches of an image are in memory at the same time.
        let (edge_max, patch_max) = (1 << 14, 1 << 10);
        if patch_size > patch_max || image_size > edge_max || patch_size > image_size {
            let expected = format!("at most {patch_max}, in images of at most {edge_max} pixels");
            return Err(ModelError::key(file, &named("patch_size"), expected, patch_size));
        }
        let factor = self.projector.factor();
        // The size of training images does not matter if positions are interpolated.
        let interpolates = matches!(self.projector, ProjectorConfig::Merger { .. });
        if factor == 0 || !interpolates && !self.tower.grid().is_multiple_of(factor) {
            let expected = format!("a divisor of {} patches", self.tower.grid());
            return Err(ModelError::key(file, "scale_factor", expected, factor));
        }
        if let ProjectorConfig::Tiles { margin, tiles_max, inner_size } = self.projector {
            let grid = self.tower.grid();
            if 2 * margin >= grid {
                let expected = format!("less than half of {grid} patches");
                return Err(ModelError::key(file, "vision.overlap_margin", expected, margin));
            }
            if !(1..=TILES_MAX).contains(&tiles_max) {
                let expected = format!("1 to {TILES_MAX}");
                return Err(ModelError::key(file, "vision.max_crops", expected, tiles_max));
            }
            if inner_size == 0 || inner_size as u64 > SIZE_MAX {
                let expected = format!("1 to {SIZE_MAX}");
                return Err(ModelError::key(file, "vision.proj_inner_dim", expected, inner_size));
            }
        }
        self.regions.iter().try_for_each(|regions| regions.check(file))?;
        self.check_merger(file)?;
        let numbers = self.deviation.iter().chain([&self.tower.norm_eps]);
        match numbers.copied().find(|number| !number.is_finite() || *number <= 0.0) {
            Some(number) => Err(ModelError::key(file, "image_std", "numbers above 0", number)),
            None => Ok(()),
        }
    }
}

impl VisionConfig {
    /// Checks the fields that only Qwen3-VL has.
    fn check_merger(&self, file: &str) -> Result<(), ModelError> {
        let TowerConfig { layers, frames, positions, .. } = self.tower;
        if !(1..=FRAMES_MAX).contains(&frames) {
            let expected = format!("1 to {FRAMES_MAX}");
            return Err(ModelError::key(file, &named("temporal_patch_size"), expected, frames));
        }
        if let PatchPositions::Rotary { theta } = positions {
            if !self.tower.head_dim().is_multiple_of(4) {
                let (expected, got) = ("heads of a multiple of 4", self.tower.head_dim());
                return Err(ModelError::key(file, &named("num_heads"), expected, got));
            }
            if !theta.is_finite() || theta <= 0.0 {
                let key = named("rope_parameters.rope_theta");
                return Err(ModelError::key(file, &key, "a number above 0", theta));
            }
        }
        let ProjectorConfig::Merger { factor, deepstack } = &self.projector else { return Ok(()) };
        if *factor > FACTOR_MAX {
            let (key, expected) = (named("spatial_merge_size"), format!("1 to {FACTOR_MAX}"));
            return Err(ModelError::key(file, &key, expected, factor));
        }
        let ascends = deepstack.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascends || deepstack.last().is_some_and(|last| *last >= layers) {
            let expected = format!("different layers below {layers}, in ascending order");
            let (key, got) = (named("deepstack_visual_indexes"), format!("{deepstack:?}"));
            return Err(ModelError::key(file, &key, expected, got));
        }
        Ok(())
    }
}

/// Maximum number of frames of a patch. Known models have 2.
const FRAMES_MAX: usize = 8;

/// Maximum edge in patches of the squares of Qwen3-VL. Known models have 2.
const FACTOR_MAX: usize = 16;

/// The path of a key of the tower in the configuration, for messages.
fn named(key: &str) -> String {
    format!("vision_config.{key}")
}
