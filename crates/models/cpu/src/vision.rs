//! The image encoder of a vision model on the CPU: a vision transformer and a projector.
//!
//! Some encoders read an image as several pictures: the whole image, and tiles of it. The tower
//! computes one picture after the other, and the projector computes the embeddings from all of
//! them.
//!
//! In Qwen3-VL, the features of some layers become embeddings, too. They follow the embeddings of
//! the last layer.
//!
//! The backend that owns the encoder calls [`Encoder::encode`] until it returns the embeddings. An
//! image is computed layer by layer, so that a call ends soon after its time is over and decoder
//! steps can run in between. Only the results for the image of the last call are kept.
//!
//! **Invariant**: the embeddings of an image have the same bits however the work was divided into
//! calls, and for any number of threads. Prefixes with images are cached and shared, so a
//! difference would make results depend on what ran before.

mod merger;
mod patches;
mod positions;
mod projector;
mod tiles;
mod tower;

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_backend::{BackendError, ImageEmbeddings, ImageInput};
use stolon_checkpoint::config::{ProjectorConfig, VisionConfig};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::KvType;
use stolon_kernels::Path;

use crate::decoder::linear::Loader;
use crate::full_kv::{FullKv, FullShape};
use crate::workers::Workers;
use patches::Patches;
use projector::Projector;
use tower::{Activations, Tower};

/// An encoder with packed weights. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Encoder {
    config: VisionConfig,
    path: Path,
    /// Element type of the keys and values of patches.
    kv_type: KvType,
    tower: Tower,
    projector: Projector,
    /// The image of the last call, unless it is complete. Its buffers exist only until it is.
    progress: Option<Progress>,
}

/// An image whose computation is not complete.
#[derive(Debug)]
struct Progress {
    image: Arc<ImageInput>,
    /// The features of the pictures that are complete.
    features: Vec<Vec<f32>>,
    /// Embeddings from earlier layers of the tower, which are added in the decoder's first layers:
    /// `[layers, rows, output_size]`.
    deepstack: Vec<f32>,
    /// Number of layers that have been computed for the current picture.
    layers: usize,
    activations: Activations,
}

impl Encoder {
    /// Packs the weights of the encoder. Keys and values of patches have the type `kv_type`.
    ///
    /// # Errors
    /// [`ModelError`] with the name of a tensor that is missing or has the wrong shape or type.
    pub(crate) fn load(
        config: VisionConfig,
        kv_type: KvType,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let weights = config.weights();
        let projector = Projector::load(&config, &weights.projector, loader)?;
        let tower = Tower::load(&config.tower, weights, loader)?;
        Ok(Self { config, path: loader.path, kv_type, tower, projector, progress: None })
    }

    /// Size in bytes of all packed matrices.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.tower.bytes() + self.projector.bytes()
    }

    /// The token whose embedding comes before the embeddings of each image.
    pub(crate) fn first_token(&self) -> Option<u32> {
        self.config.first_token
    }

    /// Number of values of an image's embeddings per position. The embeddings are row-major
    /// `[1 + deepstack_layers, kv_len, output_size]`: the inputs of the decoder's first layer, and
    /// what is added to the outputs of its first layers.
    pub(crate) fn image_width(&self) -> usize {
        (1 + self.config.deepstack_layers()) * self.config.output_size
    }

    /// Computes layers of `image` until `time` is over, but at least one. Returns the embeddings
    /// once they are complete. An incomplete image of an earlier call is dropped.
    ///
    /// # Errors
    /// [`BackendError::Failed`] if the encoder cannot process the image's size, or if the image
    /// states another number of rows than the encoder computes.
    pub(crate) fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        time: Duration,
        workers: &Workers,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        let begun = Instant::now();
        let mut progress = match self.progress.take() {
            Some(progress) if is_same(&progress.image, image) => progress,
            _ => self.begin(image, workers)?,
        };
        loop {
            self.layer(&mut progress, workers);
            if progress.layers == self.config.tower.layers {
                self.finish_picture(&mut progress, workers)?;
                if progress.features.len() == pictures(&progress.image) {
                    return Ok(Some(self.finish(progress, workers)));
                }
            }
            if begun.elapsed() >= time {
                self.progress = Some(progress);
                return Ok(None);
            }
        }
    }

    fn begin(&self, image: &Arc<ImageInput>, workers: &Workers) -> Result<Progress, BackendError> {
        self.check(image)?;
        let activations = self.embed(image, 0, workers)?;
        let (image, features, deepstack) = (Arc::clone(image), Vec::new(), Vec::new());
        Ok(Progress { image, features, deepstack, layers: 0, activations })
    }

    /// Computes the next layer of the current picture.
    fn layer(&self, progress: &mut Progress, workers: &Workers) {
        let Progress { image, deepstack, layers, activations, .. } = progress;
        self.tower.layer(*layers, activations, self.path, workers);
        if let Projector::Mergers(mergers) = &self.projector {
            let (grid, context) = (self.grid(image), (self.path, workers));
            deepstack.extend(mergers.after_layer(*layers, &activations.x, grid, context));
        }
        *layers += 1;
    }

    /// Number of patches along the width and the height of an image that is a single picture.
    fn grid(&self, image: &ImageInput) -> [usize; 2] {
        image.size.map(|edge| edge / self.config.tower.patch_size)
    }

    /// The activations of picture `index` of an image before the first layer.
    fn embed(
        &self,
        image: &ImageInput,
        index: usize,
        workers: &Workers,
    ) -> Result<Activations, BackendError> {
        let patches = Patches::of(&self.config, image, picture_size(image), index);
        let tower = &self.config.tower;
        let (heads, head_dim) = (tower.heads, tower.head_dim());
        let shape = FullShape {
            heads,
            kv_heads: heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            kv_type: self.kv_type,
            path: self.path,
        };
        let kv = FullKv::new(shape, std::iter::once(patches.count()))
            .map_err(|error| BackendError::Failed(format!("image: {error}")))?;
        Ok(self.tower.embed(&patches, kv, self.path, workers))
    }

    /// Keeps the features of a picture after its last layer, and begins the next picture.
    fn finish_picture(
        &self,
        progress: &mut Progress,
        workers: &Workers,
    ) -> Result<(), BackendError> {
        let Progress { image, features, layers, activations, .. } = progress;
        self.tower.norm(activations, self.path, workers);
        features.push(std::mem::take(&mut activations.x));
        if features.len() < pictures(image) {
            *layers = 0;
            *activations = self.embed(image, features.len(), workers)?;
        }
        Ok(())
    }

    /// The embeddings of an image whose pictures are all complete.
    fn finish(&self, progress: Progress, workers: &Workers) -> ImageEmbeddings {
        let Progress { image, features, mut deepstack, .. } = progress;
        let values = match &self.projector {
            Projector::Squares(squares) => {
                squares.project(features.concat(), self.grid(&image), self.path, workers)
            }
            Projector::Mergers(mergers) => {
                let features = features.concat();
                let mut all = mergers.project(&features, self.grid(&image), self.path, workers);
                all.append(&mut deepstack);
                all
            }
            Projector::Tiles(tiles) => tiles.project(&features, image.tiles, self.path, workers),
        };
        ImageEmbeddings { values: values.into() }
    }

    fn check(&self, image: &ImageInput) -> Result<(), BackendError> {
        let [width, height] = image.size;
        let invalid = |expected: String, got: String| {
            BackendError::Failed(format!("image: expected {expected}, got {got}"))
        };
        let rows = self
            .config
            .rows_of(image.size)
            .map_err(|expected| invalid(expected, format!("{width} x {height} pixels")))?;
        if image.kv_len != rows {
            return Err(invalid(format!("{rows} rows"), image.kv_len.to_string()));
        }
        let columns = self.config.columns_of(width);
        if image.columns != columns {
            return Err(invalid(format!("{columns} columns"), image.columns.to_string()));
        }
        let [columns, rows_of_tiles] = image.tiles;
        let tiles = columns.checked_mul(rows_of_tiles);
        let expected = match self.config.projector {
            ProjectorConfig::Tiles { .. } => height / self.config.tower.image_size - 1,
            _ => 0,
        };
        if tiles != Some(expected) {
            let got = format!("{columns} x {rows_of_tiles}");
            return Err(invalid(format!("{expected} tiles"), got));
        }
        let bytes = 3 * width * height;
        if image.pixels.len() != bytes {
            let got = image.pixels.len().to_string();
            return Err(invalid(format!("{bytes} bytes of pixels"), got));
        }
        Ok(())
    }
}

/// Number of pictures of an image: the whole image and its tiles.
fn pictures(image: &ImageInput) -> usize {
    1 + image.tiles[0] * image.tiles[1]
}

/// Width and height in pixels of each picture of an image.
fn picture_size(image: &ImageInput) -> [usize; 2] {
    [image.size[0], image.size[1] / pictures(image)]
}

/// Whether two inputs are the same image.
fn is_same(one: &Arc<ImageInput>, other: &Arc<ImageInput>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}
