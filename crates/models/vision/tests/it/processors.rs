//! Compares the tiles and texts of processors with those of transformers.
//! `fixtures/make_fixtures.py` writes the pictures and the results.

use fixture::Fixture;
use serde_json::Value;
use stolon_vision::{
    Gemma3Tiles, Idefics3Tiles, ImageProcessor, PanAndScan, Picture, ProcessorConfig, Resampling,
    Tiling,
};

use crate::support::fixture;

/// Maximum difference of a channel of a pixel from the processors that use torchvision.
const DIFFERENCE_MAX: u8 = 1;
/// Maximum mean difference. With the processors that use Pillow 13 it is up to 0.31.
const MEAN_MAX: f64 = 0.01;

fn processor(case: &Value) -> ImageProcessor {
    let size = |key: &str| case[key].as_u64().expect("a size") as usize;
    let (tiling, resampling, placeholder, image_token) = match case["kind"].as_str() {
        Some("idefics3") => {
            let tiles = Idefics3Tiles {
                longest_edge: Some(size("longest_edge")),
                tile_edge: size("tile_edge"),
                splits: case["splits"] == true,
                tile_rows: 4,
            };
            (Tiling::Idefics3(tiles), Resampling::Lanczos, "<image>", "<image>")
        }
        _ => {
            let options = PanAndScan { min_crop_edge: 16, max_crops: 4, min_ratio: 1.2 };
            let tiles = Gemma3Tiles {
                tile_edge: size("tile_edge"),
                tile_rows: 4,
                pan_and_scan: (case["pan_and_scan"] == true).then_some(options),
            };
            let token = "<image_soft_token>";
            (Tiling::Gemma3(tiles), Resampling::Bilinear, "<start_of_image>", token)
        }
    };
    ImageProcessor::new(ProcessorConfig {
        placeholder: placeholder.into(),
        image_token: image_token.into(),
        image_token_id: 9,
        resampling,
        tiling,
    })
}

/// Goal: tiles and texts are those of transformers, within the documented tolerance.
#[test]
fn tiles_are_those_of_transformers() {
    let cases: Value = serde_json::from_str(include_str!("../fixtures/processors.json")).unwrap();
    let fixture = Fixture::read("processors.safetensors");
    for (name, case) in cases.as_object().unwrap() {
        let (shape, pixels) = fixture.bytes(&format!("{name}.picture"));
        let picture = Picture::from_rgb(shape[1], shape[0], pixels).unwrap();
        let processor = processor(case);
        let prepared = processor.prepare(&picture).unwrap();
        assert_eq!(prepared.text, case["text"].as_str().unwrap(), "{name}");
        let (shape, expected) = fixture.bytes(&format!("{name}.tiles"));
        assert_eq!(prepared.tiles.len(), shape[0], "{name}");
        assert_eq!(prepared.text.matches(processor.image_token()).count(), shape[0], "{name}");
        let (mut largest, mut sum) = (0, 0.0);
        for (tile, expected) in
            prepared.tiles.iter().zip(expected.chunks_exact(3 * shape[1] * shape[2]))
        {
            assert_eq!(tile.size, [shape[2], shape[1]], "{name}");
            assert_eq!(tile.kv_len, 4);
            for (got, expected) in tile.pixels.iter().zip(expected) {
                largest = largest.max(got.abs_diff(*expected));
                sum += f64::from(got.abs_diff(*expected));
            }
        }
        let mean = sum / expected.len() as f64;
        println!("{name}: differences of at most {largest}, {mean:.4} on average");
        assert!(largest <= DIFFERENCE_MAX && mean <= MEAN_MAX, "{name}: {largest} {mean}");
    }
}

/// Goal: the hash of a tile depends on its pixels and on how they are used.
#[test]
fn hashes_distinguish_tiles() {
    let cases: Value = serde_json::from_str(include_str!("../fixtures/processors.json")).unwrap();
    let picture = |seed: u8| {
        let pixels = (0..60 * 40 * 3).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed));
        Picture::from_rgb(60, 40, pixels.collect()).unwrap()
    };
    let processor = |name: &str| processor(&cases[name]);
    let hash = |name: &str, seed| {
        processor(name).prepare(&picture(seed)).unwrap().tiles.last().unwrap().content_hash
    };
    let first = hash("gemma3", 0);
    assert_eq!(first, hash("gemma3", 0));
    assert_ne!(first, hash("gemma3", 1));
    assert_ne!(first, hash("gemma3_crops", 0));
    assert_ne!(hash("idefics3_whole", 0), hash("idefics3_wide", 0));
}
