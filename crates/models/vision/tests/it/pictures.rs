//! Compares decoded pictures with those of Pillow. `fixtures/make_fixtures.py` writes them.

use fixture::Fixture;
use stolon_vision::{Picture, PictureLimits};

use crate::support::fixture;

/// The maximum difference of a channel, and the maximum mean difference. Decoders of formats with
/// losses may round differently.
fn tolerance(name: &str) -> (u8, f64) {
    match name {
        // Colours of half the resolution are interpolated differently.
        "progressive.jpg" | "rotated.jpg" => (3, 0.4),
        name if name.ends_with(".jpg") => (2, 0.05),
        _ => (0, 0.0),
    }
}

/// Goal: files of all formats and kinds of pixels are decoded as Pillow decodes them, turned as
/// their EXIF orientation says, with white behind transparent pixels. Of animations it is the first
/// frame.
#[test]
fn pictures_are_those_of_pillow() {
    let expected = Fixture::read("pictures.safetensors");
    let mut count = 0;
    for entry in std::fs::read_dir(fixture::path("pictures")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let file = std::fs::read(&path).unwrap();
        let picture = Picture::decode(&file, &PictureLimits::default())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let (shape, expected) = expected.bytes(name);
        assert_eq!([picture.height(), picture.width(), 3], shape[..], "{name}");
        let differences = || picture.pixels().iter().zip(&expected).map(|(a, b)| a.abs_diff(*b));
        let largest = differences().max().unwrap();
        let mean = differences().map(f64::from).sum::<f64>() / expected.len() as f64;
        println!("{name}: differences of at most {largest}, {mean:.3} on average");
        let (largest_max, mean_max) = tolerance(name);
        assert!(largest <= largest_max && mean <= mean_max, "{name}: {largest} {mean}");
        count += 1;
    }
    assert_eq!(count, 16);
}
