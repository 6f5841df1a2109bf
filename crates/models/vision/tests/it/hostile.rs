//! Files that are broken, too large, or not pictures: each leads to an error, and none to a panic
//! or to the use of much memory.

use std::path::PathBuf;

use proptest::prelude::*;
use stolon_vision::{Picture, PictureError, PictureLimits};

use crate::support::png;

const LIMITS: PictureLimits =
    PictureLimits { bytes_max: 1 << 16, edge_max: 1000, pixels_max: 100_000, memory_max: 1 << 20 };

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures/pictures"].iter().collect()
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(name)).expect("a fixture")
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(folder()).expect("the fixtures");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("an entry").file_name().into_string().expect("a name in UTF-8")
    };
    let mut names: Vec<_> = entries.map(name).collect();
    names.sort_unstable();
    names
}

fn message(bytes: &[u8], limits: &PictureLimits) -> String {
    Picture::decode(bytes, limits).expect_err("a bad picture").to_string()
}

/// A PNG file that has only a header, of an RGB picture of `width` x `height` pixels.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    png.extend(png::chunk(b"IHDR", &header));
    // The start of compressed data, without which the header does not count as complete.
    png.extend(b"\0\0\0\x0aIDATx\x9c");
    png
}

/// Goal: each limit is checked, and the message has the limit and the size.
#[test]
fn large_pictures_are_refused() {
    let png = file("rgb.png");
    let small = PictureLimits { bytes_max: 100, ..LIMITS };
    assert_eq!(
        message(&png, &small),
        format!("the picture is too large: expected at most 100 bytes, got {}", png.len())
    );
    for (limits, expected) in [
        (PictureLimits { edge_max: 20, ..LIMITS }, "20 pixels of width, got 23"),
        (PictureLimits { pixels_max: 390, ..LIMITS }, "390 pixels, got 391"),
        (PictureLimits { memory_max: 1172, ..LIMITS }, "1172 bytes of decoded pixels, got 1173"),
    ] {
        let expected = format!("the picture is too large: expected at most {expected}");
        assert_eq!(message(&png, &limits), expected);
    }
}

/// Goal: a small file with a header of a huge picture is refused before anything is allocated.
#[test]
fn bombs_are_refused_by_their_headers() {
    for (width, height) in [(100_000, 1), (1, 100_000), (16_384, 16_384), (u32::MAX, u32::MAX)] {
        let error = Picture::decode(&png_header(width, height), &PictureLimits::default());
        assert!(error.is_err(), "{width} x {height}");
    }
    let error = Picture::decode(&png_header(16_000, 16_000), &PictureLimits::default());
    assert!(matches!(error, Err(PictureError::TooLarge { what: "pixels", .. })), "{error:?}");
    for (name, at) in [("color.bmp", 18), ("plain.gif", 6)] {
        let mut bytes = file(name);
        bytes[at..at + 2].copy_from_slice(&[0xff, 0x7f]);
        let error = Picture::decode(&bytes, &LIMITS).unwrap_err();
        assert!(matches!(error, PictureError::TooLarge { .. }), "{name}: {error}");
    }
}

/// A JPEG file of a picture with colors at half the resolution, which begins with the marker of a
/// frame and the number of components of its first scan. Its compressed data is missing.
fn jpeg_header([width, height]: [u16; 2], frame: u8, scanned: u8) -> Vec<u8> {
    let mut jpeg = vec![0xff, 0xd8, 0xff, 0xdb, 0, 67, 0];
    jpeg.extend([1; 64]);
    jpeg.extend([0xff, frame, 0, 17, 8]);
    jpeg.extend([height, width].map(u16::to_be_bytes).as_flattened());
    jpeg.extend([3, 1, 0x22, 0, 2, 0x11, 0, 3, 0x11, 0]);
    jpeg.extend([0xff, 0xda, 0, 6 + 2 * scanned, scanned]);
    (1..=scanned).for_each(|component| jpeg.extend([component, 0]));
    jpeg.extend([0, 0, 0, 0xff, 0xd9]);
    jpeg
}

/// Goal: coefficients of a whole JPEG picture count as memory, before the decoder allocates them:
/// of a progressive file, and of one whose scans do not have all components. A sequential file
/// needs no such memory, and a progressive one is decoded if its coefficients fit.
#[test]
fn coefficients_of_a_whole_picture_are_bounded() {
    // 500 x 500 units of 16 x 16 pixels, each with 6 blocks of 64 coefficients of 2 bytes.
    let (size, pixels, coefficients) = ([8000, 8000], 192_000_000, 192_000_000);
    for (frame, scanned) in [(0xc2, 3), (0xc2, 1), (0xc0, 1), (0xc1, 2)] {
        let jpeg = jpeg_header(size, frame, scanned);
        let got = pixels + coefficients;
        assert_eq!(
            message(&jpeg, &PictureLimits::default()),
            format!(
                "the picture is too large: expected at most 268435456 bytes of decoded pixels and \
                 JPEG coefficients, got {got}"
            ),
            "frame {frame:#x}, {scanned} components in a scan"
        );
        let enough = PictureLimits { memory_max: got, ..PictureLimits::default() };
        let small = jpeg_header([80, 80], frame, scanned);
        for (jpeg, limits) in [(&jpeg, enough), (&small, PictureLimits::default())] {
            let error = Picture::decode(jpeg, &limits).err();
            assert!(!matches!(error, Some(PictureError::TooLarge { .. })), "{error:?}");
        }
    }
    let sequential = Picture::decode(&jpeg_header(size, 0xc0, 3), &PictureLimits::default());
    assert!(!matches!(sequential, Err(PictureError::TooLarge { .. })), "{sequential:?}");
    let progressive = file("progressive.jpg");
    Picture::decode(&progressive, &LIMITS).expect("a small progressive picture");
}

/// Goal: a file that is not a picture is refused with the list of formats.
#[test]
fn other_files_are_refused() {
    let tiff = b"II*\0\x08\0\0\0\0\0";
    let svg = b"<svg xmlns=\"http://www.w3.org/2000/svg\"/>";
    for bytes in [&b""[..], b"\x89", b"hello", tiff, svg, b"\0\0\0\x1cftypavif"] {
        assert_eq!(Picture::decode(bytes, &LIMITS), Err(PictureError::UnknownFormat));
    }
}

/// Goal: a picture that is cut off anywhere is refused, except in the part after its pixels.
#[test]
fn truncated_pictures_are_refused() {
    for name in names() {
        let bytes = file(&name);
        for end in 0..bytes.len() / 2 {
            assert!(Picture::decode(&bytes[..end], &LIMITS).is_err(), "{name}, {end} bytes");
        }
        for end in bytes.len() / 2..bytes.len() {
            let _ = Picture::decode(&bytes[..end], &LIMITS);
        }
        if name.ends_with(".jpg") {
            let error = message(&bytes[..bytes.len() - 40], &LIMITS);
            assert!(error.ends_with("the end of the picture is missing"), "{name}: {error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Goal: no change of bytes makes a decoder panic or exceed the limits.
    #[test]
    fn changed_pictures_do_not_panic(
        index in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let names = names();
        let mut bytes = file(index.get(names.as_slice()).as_str());
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        match Picture::decode(&bytes, &LIMITS) {
            Ok(picture) => {
                prop_assert!(picture.width() * picture.height() <= LIMITS.pixels_max);
            }
            Err(error) => {
                prop_assert!(!error.to_string().ends_with("the decoder failed"), "{}", error);
            }
        }
    }
}
