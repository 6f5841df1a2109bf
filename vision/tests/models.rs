//! The tiles of models whose processors are configured by their files, compared with transformers.
//! `model/tests/fixtures/make_images.py` writes the models and the results.

use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_model::{LoadOptions, ModelSource, load};
use stolon_vision::{ImageProcessor, Picture};

/// Goal: tiles are those of transformers with the configuration in the files of the model.
#[test]
fn processors_are_configured_as_in_transformers() {
    for name in ["smolvlm", "gemma3"] {
        let root = env!("CARGO_MANIFEST_DIR");
        let directory: PathBuf = [root, "../model/tests/fixtures/images", name].iter().collect();
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
