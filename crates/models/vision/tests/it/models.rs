//! The tiles of models whose processors are configured by their files, compared with transformers.
//! `crates/models/checkpoint/tests/fixtures/make_images.py` writes the models and the results.

use safetensors::SafeTensors;
use stolon_checkpoint::{LoadOptions, ModelSource, load};
use stolon_vision::{ImageProcessor, Picture};

/// Goal: the pixels of Moondream's pictures are exactly those of `kestrel`: pictures that grow,
/// that shrink, and that shrink so much that pixels are averaged first.
#[test]
fn pixels_of_moondream_are_those_of_kestrel() {
    let directory = stolon_fixtures::path("images/moondream2");
    let bytes = std::fs::read(directory.join("images.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let model = load(&ModelSource::Directory(directory), &LoadOptions::default()).unwrap();
    let images = model.images.unwrap();
    let processor = ImageProcessor::new(images.processor);
    let mut hashes = Vec::new();
    for name in ["", "small.", "high.", "large.", "huge."] {
        let tensor = |key: &str| file.tensor(&format!("{name}{key}")).unwrap();
        let picture = tensor("picture");
        let [height, width, _] = *picture.shape() else { panic!("a picture has 3 dimensions") };
        let picture = Picture::from_rgb(width, height, picture.data().to_vec()).unwrap();
        let prepared = processor.prepare(&picture).unwrap();
        let [image] = &prepared.tiles[..] else { panic!("one image") };
        let tiling: Vec<usize> = image.tiles.to_vec();
        let expected = tensor("tiling");
        let columns_and_rows: Vec<usize> =
            expected.data().chunks_exact(8).map(|number| number[0].into()).collect();
        assert_eq!(tiling, columns_and_rows, "{name}");
        let expected = tensor("tiles");
        let [count, edge, _, _] = *expected.shape() else { panic!("tiles have 4 dimensions") };
        assert_eq!(image.size, [edge, edge * count], "{name}");
        assert_eq!(image.pixels, expected.data(), "{name}");
        assert_eq!(images.encoder.rows_of(image.size), Ok(image.kv_len), "{name}");
        assert!(image.full_attention);
        assert!(!hashes.contains(&image.content_hash), "{name}");
        hashes.push(image.content_hash);
    }
}

/// Goal: the pixels of Qwen3-VL's pictures equal those of its processor that uses torchvision:
/// pictures that keep about their size, wide and narrow ones, and ones that shrink and grow.
#[test]
fn pixels_of_qwen3_vl_are_those_of_transformers() {
    let directory = stolon_fixtures::path("images/qwen3_vl");
    let bytes = std::fs::read(directory.join("images.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let model = load(&ModelSource::Directory(directory), &LoadOptions::default()).unwrap();
    let images = model.images.unwrap();
    let processor = ImageProcessor::new(images.processor);
    for name in ["", "wide.", "large.", "narrow.", "dot."] {
        let tensor = |key: &str| file.tensor(&format!("{name}{key}")).unwrap();
        let picture = tensor("picture");
        let [height, width, _] = *picture.shape() else { panic!("a picture has 3 dimensions") };
        let picture = Picture::from_rgb(width, height, picture.data().to_vec()).unwrap();
        let prepared = processor.prepare(&picture).unwrap();
        assert_eq!(prepared.text, "<|vision_start|><|image_pad|><|vision_end|>");
        let [image] = &prepared.tiles[..] else { panic!("one image") };
        let expected = tensor("tiles");
        let [_, height, width, _] = *expected.shape() else { panic!("tiles have 4 dimensions") };
        assert_eq!(image.size, [width, height], "{name}");
        let differences = image.pixels.iter().zip(expected.data()).map(|(a, b)| a.abs_diff(*b));
        let largest = differences.max();
        assert!(largest <= Some(1), "{name}: {largest:?}");
        assert_eq!(images.encoder.rows_of(image.size), Ok(image.kv_len), "{name}");
        assert_eq!(images.encoder.columns_of(width), image.columns, "{name}");
        assert!(!image.full_attention);
    }
    for [width, height] in [[1, 10_000], [10_000, 1], [201, 1]] {
        let picture = Picture::from_rgb(width, height, vec![0; 3 * width * height]).unwrap();
        let error = processor.prepare(&picture).unwrap_err().to_string();
        let expected = format!("at most 200 times the other, got {width} x {height} pixels");
        assert!(error.contains(&expected), "{error}");
    }
}

/// Goal: tiles are those of transformers with the configuration in the files of the model.
#[test]
fn processors_are_configured_as_in_transformers() {
    for name in ["smolvlm", "gemma3"] {
        let directory = stolon_fixtures::path("images").join(name);
        let bytes = std::fs::read(directory.join("images.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let picture = file.tensor("picture").unwrap();
        let [height, width, _] = *picture.shape() else { panic!("a picture has 3 dimensions") };
        let picture = Picture::from_rgb(width, height, picture.data().to_vec()).unwrap();
        let model = load(&ModelSource::Directory(directory), &LoadOptions::default()).unwrap();
        let images = model.images.unwrap();
        let processor = ImageProcessor::new(images.processor);
        assert_eq!(processor.image_token_id(), 60, "{name}");
        let prepared = processor.prepare(&picture).unwrap();
        let expected = file.tensor("tiles").unwrap();
        assert_eq!(prepared.tiles.len(), expected.shape()[0], "{name}");
        let tile_bytes = expected.data().len() / prepared.tiles.len();
        for (tile, expected) in prepared.tiles.iter().zip(expected.data().chunks(tile_bytes)) {
            let difference = tile.pixels.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max();
            assert!(difference <= Some(2), "{name}: {difference:?}");
            assert_eq!(images.encoder.rows_of(tile.size), Ok(tile.kv_len), "{name}");
        }
    }
}
