//! Compares models in GGUF files, which llama.cpp's own converter has written, with transformers.

use std::path::{Path, PathBuf};

use stolon_model::{DecoderConfig, LoadOptions, ModelSource, load};

use super::fixture::{self, Setup};
use crate::suite::run;

/// The files in the folder that `convert_fixtures.py` has filled.
fn files() -> Vec<PathBuf> {
    let folder = std::env::var_os("STOLON_CONVERTED").expect("STOLON_CONVERTED");
    let entries = std::fs::read_dir(folder).expect("a folder of converted models");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> = paths.filter(|path| path.is_file()).collect();
    files.sort_unstable();
    assert!(!files.is_empty(), "a model");
    files
}

/// Restores what such files cannot say, because llama.cpp does not compute it, or not for sizes
/// that no published model has.
fn restore(name: &str, config: &mut DecoderConfig, fixture: &DecoderConfig) {
    match name {
        // No windows, layers without a rotary embedding are every fourth, windows are in all layers
        // but every sixth, and hybrids have no rotary embedding.
        "mistral" | "mixtral" | "starcoder2" | "smollm3" | "granite_mamba_moe" => {
            config.layers.clone_from(&fixture.layers);
        }
        // Two factors of YaRN that are not the same.
        "deepseek_v2" | "deepseek_v3" => config.ropes.clone_from(&fixture.ropes),
        // The scale of attention of all models but the largest.
        "gemma2" | "gemma3" => {
            config.layers.clone_from(&fixture.layers);
            config.attention_scale = fixture.attention_scale;
        }
        // The limit of activations.
        "gpt_oss" => config.activation = fixture.activation,
        _ => {}
    }
}

/// The largest difference of logits from those of transformers, in standard deviations.
fn difference(file: &Path, name: &str) -> Result<f32, String> {
    let source = ModelSource::Gguf(file.to_owned());
    let mut model = load(&source, &LoadOptions::default()).map_err(|error| error.to_string())?;
    restore(name, &mut model.config, &fixture::model(name).config);
    let expected = fixture::expected(name);
    let mut backend = fixture::backend(model, Setup::default());
    let table = run::table(5, expected.prompt.len(), Setup::default().block_size);
    let rows = run::rows(&mut backend, &expected.prompt, 0, usize::MAX / 2, &table);
    let pairs = expected.rows.iter().zip(&expected.logits);
    Ok(pairs.map(|(&row, logits)| fixture::difference(&rows[row], logits)).fold(0.0, f32::max))
}

/// Goal: a fixture that llama.cpp's converter has written to a GGUF file has the logits of
/// transformers, so the names, keys and orders of its files are read as it means them.
#[test]
#[ignore = "needs the folder STOLON_CONVERTED, which convert_fixtures.py fills"]
fn converted_models_match_transformers() {
    let mut wrong = Vec::new();
    for file in files() {
        let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
        match difference(&file, &name) {
            Ok(difference) if difference < 1e-3 => println!("{name}: {difference}"),
            Ok(difference) => wrong.push(format!("{name}: {difference} standard deviations")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
