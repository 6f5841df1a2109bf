//! Hostile pictures take no more memory than the limits say. Each is decoded in a process of its
//! own, whose peak memory is measured.

#![cfg(target_os = "linux")]

#[path = "it/support/png.rs"]
mod png;

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::Command;

use image::codecs::gif::GifEncoder;
use image::{DynamicImage, Frame, ImageFormat, RgbaImage};
use stolon_vision::{Picture, PictureLimits};

/// The default limits with a sixteenth of the pixels and of the memory.
const LIMITS: PictureLimits = PictureLimits {
    bytes_max: 32 << 20,
    edge_max: 1 << 14,
    pixels_max: 4 << 20,
    memory_max: 16 << 20,
};

/// Bytes for allocations of the process other than pictures, and for the file's pages that are
/// touched again.
const SLACK: usize = 4 << 20;

/// The variable with the path of the picture that a child process decodes.
const PICTURE: &str = "STOLON_TEST_PICTURE";

/// The edge of a square picture of as many pixels as the limits permit.
const EDGE: u32 = 2048;

fn fixture(name: &str) -> Vec<u8> {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests/fixtures/pictures"].iter().collect();
    std::fs::read(folder.join(name)).expect("a fixture")
}

fn encoded(picture: &DynamicImage, format: ImageFormat) -> Vec<u8> {
    let mut file = Cursor::new(Vec::new());
    picture.write_to(&mut file, format).expect("an encoder");
    file.into_inner()
}

/// The file `name` with `bytes` in the place `at`.
fn patched(name: &str, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = fixture(name);
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

/// The place of `marker` in a file.
fn place(file: &[u8], marker: &[u8]) -> usize {
    file.windows(marker.len()).position(|bytes| bytes == marker).expect("a marker")
}

/// A JPEG file whose header says that its picture has this height and a width of [`EDGE`].
fn tall_jpeg(name: &str, height: u32) -> Vec<u8> {
    let file = fixture(name);
    let frame = [&[0xff, 0xc0, 0][..], &[0xff, 0xc2, 0]];
    let frame = frame.into_iter().find(|frame| file.windows(3).any(|bytes| bytes == *frame));
    let at = place(&file, frame.expect("a frame")) + 5;
    patched(name, at, [height as u16, EDGE as u16].map(u16::to_be_bytes).as_flattened())
}

/// The chunks of a PNG file that have the type `kind`, joined.
fn chunks(png: &[u8], kind: &[u8; 4]) -> Vec<u8> {
    let (mut rest, mut data) = (&png[8..], Vec::new());
    while let Some((head, body)) = rest.split_first_chunk::<8>() {
        let (length, of_kind) = head.split_at(4);
        let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
        if of_kind == kind {
            data.extend(&body[..length]);
        }
        rest = &body[length + 4..];
    }
    data
}

/// A PNG file with another chunk after its header.
fn with_chunk(mut png: Vec<u8>, kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    png.splice(33..33, png::chunk(kind, data));
    png
}

/// PNG files of zeros, as large as the limits permit, with all kinds of pixels, and files whose
/// text chunks and profiles are zeros, compressed by a factor of about 1,000.
fn pngs() -> Vec<(String, Vec<u8>)> {
    let png = |picture: DynamicImage| encoded(&picture, ImageFormat::Png);
    let half = EDGE / 2;
    let (rgba, rgba16) =
        (png(DynamicImage::new_rgba8(EDGE, EDGE)), png(DynamicImage::new_rgba16(half, EDGE)));
    let zeros = png(DynamicImage::new_luma8(4 * EDGE, 4 * EDGE));
    let zeros = chunks(&zeros, b"IDAT");
    let text = [b"Comment\0\0", &zeros[..]].concat();
    let profile = [b"icc\0\0", &zeros[..]].concat();
    [
        ("rgb", png(DynamicImage::new_rgb8(EDGE, EDGE))),
        ("text", with_chunk(rgba.clone(), b"zTXt", &text)),
        ("profile", with_chunk(rgba.clone(), b"iCCP", &profile)),
        ("profile16", with_chunk(rgba16.clone(), b"iCCP", &profile)),
        ("rgba", rgba),
        ("gray", png(DynamicImage::new_luma8(EDGE, EDGE))),
        ("gray16", png(DynamicImage::new_luma16(EDGE, EDGE))),
        ("gray-alpha16", png(DynamicImage::new_luma_a16(EDGE, EDGE))),
        ("rgba16", rgba16),
        ("edge", png(DynamicImage::new_rgb8(4 * EDGE, EDGE / 4))),
    ]
    .map(|(name, file)| (format!("{name}.png"), file))
    .into()
}

/// Files of other formats whose headers promise large pictures, or that have many pictures.
fn others() -> Vec<(String, Vec<u8>)> {
    let (rgb, rgba) = (DynamicImage::new_rgb8(EDGE, EDGE), DynamicImage::new_rgba8(EDGE, EDGE));
    let mut frames = Vec::new();
    let mut encoder = GifEncoder::new(&mut frames);
    let frame = Frame::new(RgbaImage::new(512, 512));
    encoder.encode_frames(vec![frame; 200]).expect("an encoder");
    drop(encoder);
    let animated = fixture("animated.webp");
    let canvas = place(&animated, b"VP8X") + 12;
    let frame = place(&animated, b"ANMF");
    let mut many = animated.clone();
    (0..5000).for_each(|_| many.extend(&animated[frame..]));
    let length = (many.len() as u32 - 8).to_le_bytes();
    many[4..8].copy_from_slice(&length);
    let edge = (EDGE as u16).to_le_bytes();
    let lossy = place(&fixture("lossy.webp"), &[0x9d, 0x01, 0x2a]) + 3;
    [
        ("rgb.jpg", encoded(&rgb, ImageFormat::Jpeg)),
        ("cmyk.jpg", tall_jpeg("cmyk.jpg", EDGE)),
        ("progressive.jpg", tall_jpeg("progressive.jpg", EDGE / 2)),
        ("color.jpg", tall_jpeg("color.jpg", EDGE)),
        ("gray.jpg", tall_jpeg("gray.jpg", EDGE)),
        ("rotated.jpg", tall_jpeg("rotated.jpg", EDGE)),
        ("large.gif", encoded(&rgba, ImageFormat::Gif)),
        ("frames.gif", frames),
        ("screen.gif", patched("plain.gif", 6, &[edge; 2].concat())),
        ("large.webp", encoded(&rgba, ImageFormat::WebP)),
        ("lossy.webp", patched("lossy.webp", lossy, &[edge; 2].concat())),
        ("canvas.webp", patched("animated.webp", canvas, &[0xff, 0x07, 0, 0xff, 0x07, 0])),
        ("frames.webp", many),
        ("large.bmp", encoded(&rgb, ImageFormat::Bmp)[..1 << 20].to_vec()),
        ("alpha.bmp", encoded(&rgba, ImageFormat::Bmp)[..1 << 20].to_vec()),
        ("header.bmp", patched("color.bmp", 18, &[0, 8, 0, 0, 0, 8, 0, 0])),
    ]
    .map(|(name, file)| (name.to_owned(), file))
    .into()
}

/// The maximum memory of this process so far, in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("the status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the peak");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// The number of bytes by which decoding a picture raises the peak memory of this process, and
/// whether the file is a picture.
fn measure(path: &Path) -> (usize, bool) {
    let file = std::fs::read(path).expect("a file");
    let before = peak();
    let decoded = Picture::decode(&file, &LIMITS);
    (peak() - before, decoded.is_ok())
}

/// Goal: a file takes at most the memory of a decoded picture within the limits, and as much again
/// for the decoder or for the conversion of the pixels. Its header may promise more, and it may be
/// compressed by a large factor.
#[test]
fn hostile_pictures_take_bounded_memory() {
    if let Some(path) = std::env::var_os(PICTURE) {
        let (bytes, is_picture) = measure(Path::new(&path));
        println!("measured {bytes} {is_picture}");
        return;
    }
    let directory = std::env::temp_dir().join(format!("stolon-pictures-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let mut files: Vec<_> = pngs().into_iter().chain(others()).collect();
    let cut = |(name, file): &(String, Vec<u8>)| {
        (format!("cut-{name}"), file[..file.len() * 3 / 4].to_vec())
    };
    files.extend(files.iter().map(cut).collect::<Vec<_>>());
    let (mut pictures, mut most) = (0, 0);
    for (name, file) in files {
        let path = directory.join(&name);
        std::fs::write(&path, &file).expect("a file");
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        child.args(["--exact", "hostile_pictures_take_bounded_memory", "--nocapture"]);
        let output = child.env(PICTURE, &path).output().expect("a child process");
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = output.lines().find_map(|line| line.split_once("measured "));
        let (bytes, is_picture) = line
            .unwrap_or_else(|| panic!("{name}: {output}"))
            .1
            .split_once(' ')
            .expect("two words");
        let bytes: usize = bytes.parse().expect("a number");
        println!("{name}: {} KiB in the file, {} MiB, {is_picture}", file.len() >> 10, bytes >> 20);
        let bound = 2 * LIMITS.memory_max + SLACK;
        assert!(bytes <= bound, "{name}: expected at most {bound} bytes, got {bytes}");
        pictures += usize::from(is_picture == "true");
        most = most.max(bytes);
    }
    std::fs::remove_dir_all(&directory).expect("the directory");
    // Otherwise the files would not show how much memory decoding takes.
    assert!(pictures >= 10 && most > LIMITS.memory_max, "{pictures} pictures, {most} bytes");
}
