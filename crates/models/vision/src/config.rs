//! The settings for the preparation of images that a model's files have, as plain data.

/// How pictures are prepared for a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessorConfig {
    /// The string that the chat template writes in the place of an image, for example `<image>`.
    pub placeholder: String,
    /// The string of the token that is repeated for every row of an image's embeddings.
    pub image_token: String,
    /// The id of this token.
    pub image_token_id: u32,
    /// The filter with which pictures are resized.
    pub resampling: Resampling,
    /// How a picture is cut into tiles.
    pub tiling: Tiling,
}

/// A filter for resizing. All widen with the factor by which a picture shrinks, as in Pillow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resampling {
    /// Linear interpolation.
    Bilinear,
    /// Cubic interpolation.
    Bicubic,
    /// Lanczos with three lobes.
    Lanczos,
}

impl Resampling {
    /// The filter with this number in Pillow, as in the key `resample` of processors; `None` for
    /// the filters that no processor uses.
    #[must_use]
    pub fn from_pillow(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }
}

/// How a picture is cut into tiles, each of which the encoder processes by itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Tiling {
    /// Idefics 3 and SmolVLM.
    Idefics3(Idefics3Tiles),
    /// Gemma 3.
    Gemma3(Gemma3Tiles),
    /// Moondream.
    Moondream(MoondreamTiles),
    /// Qwen3-VL and Qwen3.5.
    Qwen3Vl(Qwen3VlTiles),
}

/// Idefics 3 and SmolVLM: a large picture is cut into rows and columns of square tiles, which are
/// followed by the whole picture as one more tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idefics3Tiles {
    /// Length in pixels to which the longer edge of a picture is resized first, so that it has
    /// about as many tiles whatever its size is; at least 1. `None` if it keeps its size.
    pub longest_edge: Option<usize>,
    /// Edge of a tile in pixels, at least 1.
    pub tile_edge: usize,
    /// Whether pictures are cut. Otherwise the whole picture is the only tile.
    pub splits: bool,
    /// Number of rows of embeddings per tile, at least 1.
    pub tile_rows: usize,
}

/// Gemma 3: the whole picture, as a square.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemma3Tiles {
    /// Edge of a tile in pixels, at least 1.
    pub tile_edge: usize,
    /// Number of rows of embeddings per tile, at least 1.
    pub tile_rows: usize,
    /// Whether crops of the picture follow; `None` for the usual setting, in which they do not.
    pub pan_and_scan: Option<PanAndScan>,
}

/// Moondream: a large picture is cut into overlapping tiles, which follow the whole picture. The
/// encoder makes the same number of positions of all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoondreamTiles {
    /// Edge of a tile in pixels, more than twice the margin.
    pub tile_edge: usize,
    /// Margin of a tile in pixels. Adjacent tiles overlap by twice as much.
    pub margin: usize,
    /// Maximum number of tiles of a picture, without the whole picture; at least 1.
    pub tiles_max: usize,
    /// Number of positions that a picture takes in a prompt, at least 1.
    pub rows: usize,
}

/// Qwen3-VL and Qwen3.5: the whole picture in about its own size and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qwen3VlTiles {
    /// Edge in pixels of the square that becomes one row of embeddings, at least 1. Both edges of a
    /// picture are multiples of it.
    pub square_edge: usize,
    /// Number of pixels below which pictures are enlarged, at most `pixels_max`.
    pub pixels_min: usize,
    /// Number of pixels above which pictures are reduced, at least one square.
    pub pixels_max: usize,
}

/// How Gemma 3 crops pictures that are much wider than high, or higher than wide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PanAndScan {
    /// Minimum edge of a crop in pixels, at least 1.
    pub min_crop_edge: usize,
    /// Maximum number of crops of a picture.
    pub max_crops: usize,
    /// Minimum quotient of the longer and the shorter edge of a picture that is cropped.
    pub min_ratio: f64,
}
