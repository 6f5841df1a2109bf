//! The embeddings of images.

use std::sync::Arc;
use std::time::Duration;

use stolon_backend::{Backend, BackendError, ImageInput};
use stolon_checkpoint::{KvBudget, TensorType};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kernels::Path;

use super::fixture::{self, NAMES};

/// Maximum difference from transformers, in standard deviations of the embeddings.
const DIFFERENCE_MAX: f32 = 1e-4;
/// The same if keys and values are bf16.
const BF16_DIFFERENCE_MAX: f32 = 0.05;

/// Goal: the embeddings of every model match those of transformers, on every instruction set of this
/// machine.
#[test]
fn embeddings_match_transformers() {
    for name in NAMES {
        for path in Path::supported() {
            let model = fixture::model(name);
            let inputs = fixture::inputs(name, &model);
            let mut backend = fixture::backend(model, Some(path), 1);
            let expected = fixture::expected(name).embeddings;
            let mut got: Vec<f32> =
                inputs.iter().flat_map(|image| fixture::encode(&mut backend, image)).collect();
            if fixture::expected(name).tiling.is_some() {
                // The second image is not that of the script.
                let other = got.split_off(expected.len());
                assert!(fixture::difference(&other, &expected) > 0.1, "{name}");
            }
            assert_eq!(got.len(), expected.len(), "{name}");
            let largest = fixture::difference(&got, &expected);
            assert!(largest < DIFFERENCE_MAX, "{name}, {path}: {largest} standard deviations");
        }
    }
}

/// Goal: the bits of embeddings depend neither on how the work was divided into calls nor on the
/// number of threads.
#[test]
fn embeddings_depend_on_the_image_only() {
    for name in NAMES {
        let model = fixture::model(name);
        let inputs = fixture::inputs(name, &model);
        let pictures = 1 + inputs[0].tiles.iter().product::<usize>();
        let layers = pictures * fixture::images(&model).encoder.tower.layers;
        let mut backend = fixture::backend(model, None, 1);
        let whole = fixture::encode(&mut backend, &inputs[0]);
        for call in 1..=layers {
            let embeddings = backend.encode(&inputs[0], Duration::ZERO).expect("a good image");
            assert_eq!(embeddings.is_some(), call == layers, "{name}, call {call}");
            if let Some(embeddings) = embeddings {
                assert_eq!(embeddings.values[..], whole, "{name}");
            }
        }
        let mut parallel = fixture::backend(fixture::model(name), None, 3);
        assert_eq!(fixture::encode(&mut parallel, &inputs[0]), whole, "{name}");
    }
}

/// Goal: with keys and values of patches in bf16, embeddings are close to those of transformers in
/// f32 on every instruction set, and their bits depend on the image only.
#[test]
fn embeddings_with_bf16_keys_are_close() {
    for name in NAMES {
        let expected = fixture::expected(name).embeddings;
        for path in Path::supported() {
            let of = |threads| {
                let mut model = fixture::model(name);
                let inputs = fixture::inputs(name, &model);
                model.config.dtype = TensorType::Bf16;
                let mut backend = fixture::backend(model, Some(path), threads);
                let encode = |image| fixture::encode(&mut backend, image);
                inputs.iter().flat_map(encode).collect::<Vec<f32>>()
            };
            let got = of(1);
            // A second image of Moondream is not that of the script.
            let largest = fixture::difference(&got[..expected.len()], &expected);
            // More than the difference in f32, or nothing was rounded.
            let rounded = DIFFERENCE_MAX..BF16_DIFFERENCE_MAX;
            assert!(rounded.contains(&largest), "{name}, {path}: {largest}");
            assert_eq!(of(3), got, "{name}, {path}");
        }
    }
}

/// Goal: a call for another image drops the one that is not complete, which then begins anew with
/// the same result.
#[test]
fn another_image_replaces_an_incomplete_one() {
    let model = fixture::model("smolvlm");
    let inputs = fixture::inputs("smolvlm", &model);
    let mut backend = fixture::backend(model, None, 1);
    let whole = fixture::encode(&mut backend, &inputs[0]);
    assert!(matches!(backend.encode(&inputs[0], Duration::ZERO), Ok(None)));
    assert!(matches!(backend.encode(&inputs[1], Duration::ZERO), Ok(None)));
    for _ in 0..2 {
        assert!(matches!(backend.encode(&inputs[0], Duration::ZERO), Ok(None)));
    }
    // The same image in other memory goes on.
    let copy = Arc::new(ImageInput::clone(&inputs[0]));
    let embeddings = backend.encode(&copy, Duration::ZERO).expect("a good image");
    assert_eq!(embeddings.expect("all layers").values[..], whole);
}

/// Goal: an image that the encoder cannot process is refused with what was expected.
#[test]
fn other_images_are_refused() {
    let model = fixture::model("smolvlm");
    let inputs = fixture::inputs("smolvlm", &model);
    let mut backend = fixture::backend(model, None, 1);
    let image = ImageInput::clone(&inputs[0]);
    for (image, expected) in [
        (ImageInput { size: [40, 32], ..image.clone() }, "multiples of 16 pixels up to 32"),
        (ImageInput { size: [0, 32], ..image.clone() }, "got 0 x 32 pixels"),
        (ImageInput { kv_len: 5, ..image.clone() }, "expected 4 rows, got 5"),
        (ImageInput { pixels: vec![0; 5], ..image }, "expected 3072 bytes of pixels, got 5"),
    ] {
        let error = backend.encode(&Arc::new(image), Duration::MAX).expect_err("a bad image");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Goal: an image with another number of tiles than its pixels have is refused.
#[test]
fn other_tilings_are_refused() {
    let model = fixture::model("moondream2");
    let inputs = fixture::inputs("moondream2", &model);
    let mut backend = fixture::backend(model, None, 1);
    let image = ImageInput::clone(&inputs[0]);
    for (image, expected) in [
        (ImageInput { tiles: [3, 2], ..image.clone() }, "expected 8 tiles, got 3 x 2"),
        (ImageInput { tiles: [usize::MAX, 3], ..image.clone() }, "expected 8 tiles"),
        (ImageInput { size: [30, 30], ..image.clone() }, "a picture and 1 to 8 tiles of 30 pixels"),
        (ImageInput { size: [30, 275], ..image.clone() }, "got 30 x 275 pixels"),
        (ImageInput { size: [30, 300], ..image.clone() }, "a picture and 1 to 8 tiles"),
        (ImageInput { kv_len: 25, ..image.clone() }, "expected 26 rows, got 25"),
        (ImageInput { pixels: vec![0; 5], ..image }, "expected 24300 bytes of pixels, got 5"),
    ] {
        let error = backend.encode(&Arc::new(image), Duration::MAX).expect_err("a bad image");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let model = fixture::model("smolvlm");
    let plain = fixture::inputs("smolvlm", &model);
    let mut backend = fixture::backend(model, None, 1);
    let image = ImageInput { tiles: [1, 1], ..ImageInput::clone(&plain[0]) };
    let error = backend.encode(&Arc::new(image), Duration::MAX).expect_err("a bad image");
    assert!(error.to_string().contains("expected 0 tiles, got 1 x 1"), "{error}");
}

/// Goal: a backend without an encoder says that it does not support images.
#[test]
fn backends_without_encoder_refuse_images() {
    let model = fixture::model("smolvlm");
    let inputs = fixture::inputs("smolvlm", &model);
    let options = CpuOptions { kv_budget: KvBudget::Blocks(16), ..CpuOptions::default() };
    let mut backend = CpuBackend::new(model.config, model.weights, options).expect("a model");
    let error = backend.encode(&inputs[0], Duration::MAX).expect_err("no encoder");
    assert!(matches!(error, BackendError::Unsupported("images")));
}
