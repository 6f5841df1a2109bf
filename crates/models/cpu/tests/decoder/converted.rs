//! Compares models in GGUF files, which llama.cpp's own converter has written, with transformers.

use std::path::PathBuf;

use stolon_checkpoint::{DecoderConfig, LoadOptions, LoadedModel, ModelError, ModelSource, load};

use super::fixture::{self, Setup};
use crate::suite::run;

/// The folder that `convert_fixtures.py` has filled.
pub(super) fn folder() -> PathBuf {
    std::env::var_os("STOLON_CONVERTED").expect("STOLON_CONVERTED").into()
}

/// The names of the fixtures that were converted.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(folder()).expect("a folder of converted models");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let name = |path: PathBuf| path.file_stem().expect("a name").to_string_lossy().into_owned();
    let mut names: Vec<_> = paths.filter(|path| path.is_file()).map(name).collect();
    names.sort_unstable();
    assert!(!names.is_empty(), "a model");
    names
}

/// Loads a converted model. What such files cannot say is as in the fixture, because llama.cpp does
/// not compute it, or not for sizes that no published model has.
pub(super) fn model(name: &str) -> Result<LoadedModel, ModelError> {
    let source = ModelSource::Gguf(folder().join(format!("{name}.gguf")));
    let mut model = load(&source, &LoadOptions::default())?;
    restore(name, &mut model.config, &fixture::model(name).config);
    Ok(model)
}

fn restore(name: &str, config: &mut DecoderConfig, fixture: &DecoderConfig) {
    match name {
        // No windows, layers without a rotary embedding are every fourth, and windows are in all
        // layers but every fourth.
        "mistral" | "starcoder2" | "smollm3" | "cohere2" | "olmo3" | "exaone4" => {
            config.layers.clone_from(&fixture.layers);
        }
        // Two factors of YaRN that are not the same.
        "deepseek_v2" | "deepseek_v2_groups" | "deepseek_v3" => {
            config.ropes.clone_from(&fixture.ropes)
        }
        // The scale of attention of all models but the largest.
        "gemma2" | "gemma3" | "gemma3_270m" => config.layers.clone_from(&fixture.layers),
        // The epsilon of the norms of outputs, which is the same in all published models.
        "muse_glimmer" => config.norms.output_eps = fixture.norms.output_eps,
        // The limit of activations.
        "gpt_oss" => config.layers.clone_from(&fixture.layers),
        _ => {}
    }
}

/// The largest difference of logits from those of transformers, in standard deviations.
fn difference(name: &str) -> Result<f32, ModelError> {
    let expected = fixture::expected(name);
    let mut backend = fixture::backend(model(name)?, Setup::default());
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
    for name in names() {
        match difference(&name) {
            Ok(difference) if difference < 1e-3 => println!("{name}: {difference}"),
            Ok(difference) => wrong.push(format!("{name}: {difference} standard deviations")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
