//! Time to encode an image, by preset and instruction set. The preset is a model with an image
//! encoder.
//!
//! `cargo bench -p stolon-cpu --bench encoder -- [PRESET..] [--threads=N] [--path=NAME]`
//!
//! Without `--bench` and presets (as under `cargo test`), only the smallest model runs once.
#![allow(clippy::print_stdout, reason = "prints its figures")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_backend::{Backend, ImageInput};
use stolon_checkpoint::{KvBudget, LoadOptions, LoadedModel, ModelSource, VisionConfig, load};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kernels::Path;

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| arguments.iter().find_map(|argument| argument.strip_prefix(name));
    let mut presets: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|name| !name.starts_with('-')).collect();
    let full = arguments.iter().any(|argument| argument == "--bench") || !presets.is_empty();
    if presets.is_empty() {
        presets.push(if full { "smolvlm-256m" } else { "smolvlm-tiny" });
    }
    let threads = option("--threads=").map(str::parse).transpose()?;
    let time = if full { Duration::from_secs(3) } else { Duration::ZERO };
    println!("| model | path | threads | patches | ms/image | GFLOP/s |");
    println!("|---|---|---|---|---|---|");
    for preset in presets {
        for path in Path::supported() {
            if option("--path=").is_none_or(|name| name == path.name()) {
                measure(preset, path, threads, time)?;
            }
        }
    }
    Ok(())
}

fn measure(preset: &str, path: Path, threads: Option<usize>, time: Duration) -> Result<(), Error> {
    let source = ModelSource::Random { preset: preset.to_owned(), seed: 1 };
    let LoadedModel { config, weights, images, .. } = load(&source, &LoadOptions::default())?;
    let encoder = images.ok_or("the preset has no image encoder")?.encoder;
    let image = Arc::new(largest_image(&encoder)?);
    let (kv_budget, path) = (KvBudget::Blocks(1), Some(path));
    let options = CpuOptions { kv_budget, threads, path, ..CpuOptions::default() };
    let mut backend = CpuBackend::with_encoder(config, Some(encoder.clone()), weights, options)?;
    let (mut times, start) = (Vec::new(), Instant::now());
    while times.len() < 3 || start.elapsed() < time {
        let begun = Instant::now();
        let embeddings = backend.encode(&image, Duration::MAX)?;
        times.push(begun.elapsed().as_secs_f64());
        assert!(embeddings.is_some_and(|embeddings| !embeddings.values.is_empty()));
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let patches = image.pixels.len() / (3 * encoder.tower.patch_size.pow(2));
    println!(
        "| {preset} | {} | {} | {patches} | {:.1} | {:.0} |",
        backend.path().name(),
        backend.thread_count(),
        median * 1e3,
        2.0 * multiply_adds(&encoder, patches) / median / 1e9,
    );
    Ok(())
}

/// An image of the largest size.
fn largest_image(encoder: &VisionConfig) -> Result<ImageInput, String> {
    let size = [encoder.tower.image_size; 2];
    Ok(ImageInput {
        content_hash: 1,
        kv_len: encoder.rows_of(size)?,
        full_attention: false,
        columns: 0,
        size,
        tiles: [0, 0],
        pixels: (0..3 * size[0] * size[1]).map(|index| (index * 31 % 251) as u8).collect(),
    })
}

/// The multiply-adds of the layers for an image of `patches` patches. The projections of the patches
/// and of the features are a few hundredths of these.
fn multiply_adds(encoder: &VisionConfig, patches: usize) -> f64 {
    let tower = &encoder.tower;
    let (width, patches) = (tower.hidden_size as f64, patches as f64);
    let products = width * (4.0 * width + 2.0 * tower.intermediate_size as f64);
    let attention = 2.0 * width * patches;
    tower.layers as f64 * patches * (products + attention)
}
