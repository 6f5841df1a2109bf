//! Compares decoded pictures with those of Pillow. `fixtures/make_fixtures.py` writes them.

use fixture::Fixture;
use stolon_vision::{Picture, PictureLimits};

use crate::support::fixture;

/// Goal: files of all formats and kinds of pixels are decoded as Pillow decodes them, to the bit,
/// turned as their EXIF orientation says, with white behind transparent pixels. The picture of an
/// animation is its first frame.
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
        let different = picture.pixels().iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert_eq!(different, 0, "{name}: of {} values", expected.len());
        count += 1;
    }
    assert_eq!(count, 16);
}
