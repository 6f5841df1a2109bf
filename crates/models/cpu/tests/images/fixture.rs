//! Loads the models of `fixtures/images` and what transformers makes of a picture.

#[path = "../../../checkpoint/tests/it/support/difference.rs"]
mod difference;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use safetensors::SafeTensors;
use stolon_backend::{Backend, ImageInput};
use stolon_checkpoint::{
    ImageModel, KvBudget, KvType, LoadOptions, LoadedModel, ModelSource, load,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kernels::Path;

pub(super) use difference::difference;

/// The names of all models.
pub(super) const NAMES: [&str; 8] = [
    "smolvlm",
    "gemma3",
    "moondream2",
    "moondream3",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
];

pub(super) fn directory(name: &str) -> PathBuf {
    stolon_fixtures::path("images").join(name)
}

pub(super) fn model(name: &str) -> LoadedModel {
    load(&ModelSource::Directory(directory(name)), &LoadOptions::default()).expect("a valid model")
}

pub(super) fn images(model: &LoadedModel) -> &ImageModel {
    model.images.as_ref().expect("a vision model")
}

/// The results of transformers for a model.
pub(super) struct Expected {
    /// The width and height of a tile.
    pub(super) tile_size: [usize; 2],
    /// The pixels of each tile.
    pub(super) tiles: Vec<Vec<u8>>,
    /// Columns and rows of tiles of an image that the encoder reads in several pictures.
    pub(super) tiling: Option<[usize; 2]>,
    /// The embeddings of all tiles.
    pub(super) embeddings: Vec<f32>,
}

/// Reads the results for the model `name`.
pub(super) fn expected(name: &str) -> Expected {
    let bytes = std::fs::read(directory(name).join("images.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensor = |key| file.tensor(key).expect("a tensor of the script");
    let tiles = tensor("tiles");
    let [_, tile_height, tile_width, _] = *tiles.shape() else { panic!("tiles have 4 dimensions") };
    Expected {
        tile_size: [tile_width, tile_height],
        tiles: tiles
            .data()
            .chunks_exact(3 * tile_width * tile_height)
            .map(<[u8]>::to_vec)
            .collect(),
        tiling: file.tensor("tiling").ok().map(|tiling| {
            let [columns, rows] = [0, 8].map(|at| tiling.data()[at].into());
            [columns, rows]
        }),
        embeddings: floats(tensor("embeddings").data()),
    }
}

/// The tiles of transformers as inputs of the encoder.
pub(super) fn inputs(name: &str, model: &LoadedModel) -> Vec<Arc<ImageInput>> {
    let Expected { tiles, tile_size, tiling, .. } = expected(name);
    if let Some(tiling) = tiling {
        let size = [tile_size[0], tile_size[1] * tiles.len()];
        let kv_len = images(model).encoder.rows_of(size).expect("a size for the encoder");
        let (full_attention, pixels) = (true, tiles.concat());
        let input = |content_hash, pixels| {
            Arc::new(ImageInput {
                content_hash,
                kv_len,
                full_attention,
                columns: 0,
                size,
                tiles: tiling,
                pixels,
            })
        };
        // Another image, for tests that need two.
        let other = pixels.iter().map(|value| 255 - value).collect();
        return vec![input(0, pixels), input(1, other)];
    }
    let encoder = &images(model).encoder;
    let kv_len = encoder.rows_of(tile_size).expect("a size for the encoder");
    let columns = encoder.columns_of(tile_size[0]);
    // Gemma 3 has full attention.
    let full = name == "gemma3";
    let input = |(index, pixels)| {
        let (content_hash, full_attention) = (index as u128, full);
        let (size, tiles) = (tile_size, [0, 0]);
        Arc::new(ImageInput { content_hash, kv_len, full_attention, columns, size, tiles, pixels })
    };
    tiles.into_iter().enumerate().map(input).collect()
}

/// A prompt with the picture, and what transformers computes for it.
pub(super) struct Logits {
    /// Token ids, with the image token at each position of a tile.
    pub(super) prompt: Vec<u32>,
    /// The positions whose logits are known.
    pub(super) rows: Vec<usize>,
    /// `[rows, vocab_size]`.
    pub(super) logits: Vec<f32>,
}

/// The token that stands for images in [`Logits::prompt`].
pub(super) const IMAGE_TOKEN: u32 = 60;

/// Reads the prompt of the model `name` and its logits.
pub(super) fn logits(name: &str) -> Logits {
    let bytes = std::fs::read(directory(name).join("images.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let data = |key| file.tensor(key).expect("a tensor of the script").data();
    let integers =
        |key| data(key).chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8")));
    Logits {
        prompt: integers("prompt").map(|id| id as u32).collect(),
        rows: integers("rows").map(|row| row as usize).collect(),
        logits: floats(data("logits")),
    }
}

/// The shape and the bytes of the tensor `key` of the results for the model `name`.
pub(super) fn tensor(name: &str, key: &str) -> (Vec<usize>, Vec<u8>) {
    let bytes = std::fs::read(directory(name).join("images.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensor = file.tensor(key).expect("a tensor of the script");
    (tensor.shape().to_vec(), tensor.data().to_vec())
}

/// The bins of a point, a width and a height that follow the prompt of the model `name`.
pub(super) fn region_bins(name: &str) -> Vec<u32> {
    let bytes = std::fs::read(directory(name).join("images.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let bins = file.tensor("region.bins").expect("a tensor of the script");
    bins.data().chunks_exact(8).map(|bin| bin[0].into()).collect()
}

/// The logits at the last position of the prompt of the model `name` and at these tokens: of the
/// vocabulary, and of the bins of coordinates, widths and heights.
pub(super) fn region_logits(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(directory(name).join("images.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    floats(file.tensor("region.logits").expect("a tensor of the script").data())
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect()
}

/// A backend with the model's encoder.
pub(super) fn backend(model: LoadedModel, path: Option<Path>, threads: usize) -> CpuBackend {
    let blocks = KvBudget::Blocks(16);
    let options = CpuOptions { kv_budget: blocks, threads: Some(threads), path, ..options() };
    backend_with(model, options)
}

/// The options that the tests share.
pub(super) fn options() -> CpuOptions {
    CpuOptions { threads: Some(1), kv_type: Some(KvType::F32), ..CpuOptions::default() }
}

/// The same with these options.
pub(super) fn backend_with(model: LoadedModel, options: CpuOptions) -> CpuBackend {
    let LoadedModel { config, weights, images, .. } = model;
    let encoder = images.map(|images| images.encoder);
    CpuBackend::with_encoder(config, encoder, weights, options).expect("a valid model")
}

/// The embeddings of an image, in one call.
pub(super) fn encode(backend: &mut CpuBackend, image: &Arc<ImageInput>) -> Vec<f32> {
    let embeddings = backend.encode(image, Duration::MAX).expect("a good image");
    embeddings.expect("there was time").values.to_vec()
}
