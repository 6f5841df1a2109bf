//! jina-embeddings-v5: Qwen3 or EuroBERT with a LoRA adapter for each task, in the format of PEFT, in
//! the directories `adapters/TASK`. Its files do not say how hidden states become an embedding; its
//! published code does, and it computes nothing without a task.
//!
//! Qwen3 uses the adapters as any others. Those of EuroBERT become matrices of its weights
//! ([`TasksConfig`]), so that texts of all tasks are computed in one batch.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stolon_backend::Pooling;

use super::embedding::{EmbeddingConfig, EmbeddingSizes};
use crate::adapter::{self, PeftSettings};
use crate::config::{Keys, LinearWeights, TensorRole, TensorSpec};
use crate::encoder::{
    EncoderConfig, EncoderMlpWeights, LayerTaskWeights, TASKS_MAX, TasksConfig, has_task_adapters,
};
use crate::error::ModelError;
use crate::files::read_json;
use crate::weights::Weights;

/// The names of the tasks in `config.json`.
const NAMES: &str = "task_names";
/// The directory with the adapters.
const DIRECTORY: &str = "adapters";
/// Maximum length of the name of a task.
const NAME_BYTES_MAX: usize = 64;

/// How the published code computes an embedding.
pub(crate) const EMBEDDING: EmbeddingConfig =
    EmbeddingConfig { pooling: Pooling::Last, normalize: true, sizes: EmbeddingSizes::Any };

/// The tasks of the model in `directory`, with the directories of their adapters; none if the model
/// has no adapters. The file `config.json`, which is called `file` in errors, has the content `config`.
///
/// # Errors
/// [`ModelError::InvalidKey`] for too many tasks, and for names that are not those of a directory.
pub(crate) fn of_directory(
    directory: &Path,
    (file, config): (&str, &Value),
) -> Result<Vec<(String, PathBuf)>, ModelError> {
    if !has_task_adapters(config) {
        return Ok(Vec::new());
    }
    let keys = Keys::root(file, config)?;
    let names = keys.texts(NAMES)?.unwrap_or_default();
    let is_plain = |name: &&str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_plain)
    };
    if !(1..=TASKS_MAX).contains(&names.len()) || !names.iter().all(is_plain) {
        let expected = format!(
            "1 to {TASKS_MAX} names of at most {NAME_BYTES_MAX} letters, digits, `-` and `_`"
        );
        return Err(keys.invalid(NAMES, &expected));
    }
    let adapters = directory.join(DIRECTORY);
    Ok(names.into_iter().map(|name| (name.to_owned(), adapters.join(name))).collect())
}

/// The names of the files of the adapters of the model with this `config.json`, in its directory:
/// those with settings, and those with matrices.
#[cfg(feature = "hub")]
pub(crate) fn files(config: &Value) -> Result<[Vec<String>; 2], ModelError> {
    let tasks = of_directory(Path::new(""), (super::directory::CONFIG, config))?;
    Ok([adapter::CONFIG, adapter::WEIGHTS]
        .map(|file| tasks.iter().map(|(name, _)| format!("{DIRECTORY}/{name}/{file}")).collect()))
}

/// Reads the adapters of an encoder and adds their matrices to its weights.
///
/// # Errors
/// The errors of adapters, and [`ModelError::Unsupported`] for a tensor that is not a matrix of a
/// projection of the encoder.
pub(crate) fn add(
    config: &mut EncoderConfig,
    weights: &mut Weights,
    tasks: Vec<(String, PathBuf)>,
) -> Result<(), ModelError> {
    let mut adapters = Vec::with_capacity(tasks.len());
    for (name, directory) in &tasks {
        let path = directory.join(adapter::CONFIG);
        let settings = PeftSettings::parse(&path.display().to_string(), &read_json(&path)?)?;
        let file = directory.join(adapter::WEIGHTS);
        // No name of the encoder has a space.
        let prefix = format!("task {name}");
        weights.add_module(&file, &prefix)?;
        adapters.push(TaskAdapter { file: file.display().to_string(), prefix, settings });
    }
    let rank = adapters.first().map_or(0, |adapter| adapter.settings.rank());
    let names = tasks.into_iter().map(|(name, _)| name).collect();
    // The scales are factors of the matrices `B`.
    config.tasks = Some(TasksConfig { names, rank, scale: 1.0, tables: false, required: true });
    config.check(weights.origin())?;
    for layer in config.weights().layers {
        let Some(LayerTaskWeights { qkv, output, up, down }) = layer.tasks else { continue };
        let EncoderMlpWeights::Dense { gate, up: inner, down: of_inner } = layer.mlp else {
            continue;
        };
        let inputs: Vec<_> = gate.into_iter().chain([inner]).collect();
        let sites = [
            (qkv, layer.qkv.into()),
            (output, vec![layer.output]),
            (up, inputs),
            (down, vec![of_inner]),
        ];
        for (joined, projections) in sites {
            let [mut first, mut second] = [const { Vec::new() }; 2];
            for adapter in &adapters {
                for projection in &projections {
                    let [a, b] = adapter.take(config, projection, weights)?;
                    first.extend(a);
                    second.extend(b);
                }
            }
            weights.add_floats(&joined.first, &first)?;
            weights.add_floats(&joined.second, &second)?;
        }
    }
    for TaskAdapter { file, prefix, .. } in &adapters {
        let start = format!("{prefix}.");
        if let Some(name) = weights.names().filter_map(|name| name.strip_prefix(&start)).min() {
            let expected = "only matrices of projections of attention and the MLP";
            return Err(ModelError::unsupported(file, name, expected, "this tensor"));
        }
    }
    Ok(())
}

/// The adapter of a task, whose tensors were added to the weights.
struct TaskAdapter {
    /// The file with the matrices.
    file: String,
    /// The names of its tensors begin with this and a dot.
    prefix: String,
    settings: PeftSettings,
}

impl TaskAdapter {
    /// The matrices `A`, `[rank, in]`, and `B`, `[out, rank]`, of a projection, the latter times the
    /// scale. Removes them from `weights`.
    fn take(
        &self,
        config: &EncoderConfig,
        projection: &LinearWeights,
        weights: &mut Weights,
    ) -> Result<[Vec<f32>; 2], ModelError> {
        let Self { file: _, prefix, settings } = self;
        let TensorSpec { name, shape, .. } = &projection.weight;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let module = module.strip_prefix(&config.prefix).unwrap_or(module);
        let rank = config.tasks.as_ref().map_or(0, |tasks| tasks.rank);
        let scale = settings.scale(module, rank)?;
        let mut matrix = |kind: &str, shape| {
            let name = format!("{prefix}.{}{module}.lora_{kind}.weight", adapter::PREFIX);
            let spec = TensorSpec { name, shape, role: TensorRole::Bias };
            let values = weights.floats(&spec)?;
            weights.remove(&spec.name);
            Ok::<_, ModelError>(values)
        };
        let first = matrix("A", vec![rank, shape[1]])?;
        let mut second = matrix("B", vec![shape[0], rank])?;
        second.iter_mut().for_each(|value| *value *= scale);
        Ok([first, second])
    }
}
