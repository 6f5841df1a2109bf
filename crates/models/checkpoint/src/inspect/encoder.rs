//! Describes text encoders. They are loaded for it, which reads the headers of their weights only.

use serde_json::Value;

use super::memory::table_bytes;
use super::{InspectOptions, Inspection, MemoryNeeded, summaries};
use crate::encoder::{EncoderConfig, EncoderFamily, ScoreConfig};
use crate::error::{ModelError, quoted};
use crate::load::{EncoderTask, LoadedEncoder, directory, encoder};
use crate::memory::packed_bytes;

impl Inspection {
    /// Adds the description of an encoder that can be loaded, or the reason why it cannot.
    pub(super) fn add_text_encoder(
        &mut self,
        loaded: Result<LoadedEncoder, ModelError>,
        options: &InspectOptions,
    ) {
        let LoadedEncoder { config, weights, text, head, task, .. } = match loaded {
            Ok(loaded) => loaded,
            Err(error) => return self.refuse(error),
        };
        self.set_sizes(&config);
        let tasks = config.tasks.iter().flat_map(|tasks| &tasks.names);
        self.tasks = tasks.map(|task| quoted(task)).collect();
        let tensors = || config.tensors().into_iter().chain(head.tensors());
        let elements = |shape: &[usize]| shape.iter().map(|size| *size as u64).product::<u64>();
        self.parameters = tensors().map(|tensor| elements(&tensor.shape)).sum();
        self.files = weights.files().map(|(name, bytes)| super::file(name, bytes)).collect();
        self.tensors = summaries(&weights);
        self.memory = Some(MemoryNeeded {
            weights: packed_bytes(tensors(), &weights, options.weight_type),
            tables: table_bytes(tensors().collect(), &weights, options.weight_type),
            kv_per_token: 0,
            windows: 0,
            kv_of_context: 0,
        });
        match task {
            EncoderTask::Embed(config) => self.embedding = Some(config),
            EncoderTask::Score(_, config) => self.set_scores(config),
        }
        self.text = Some(text);
    }

    /// Adds the encoder in `directory`, whose `config.json` has the content `value`.
    pub(super) fn add_text_encoder_of(
        &mut self,
        directory: &std::path::Path,
        value: &Value,
        family: EncoderFamily,
        options: &InspectOptions,
    ) {
        let is_here = directory::has_weights(directory);
        match is_here {
            true => {
                let loaded = encoder::load(directory, self.id.clone(), value, family);
                self.add_text_encoder(loaded, options);
            }
            // Only the small files of a repository were downloaded.
            false => self.notes.push(
                "a text encoder is described further when its files are in the cache".to_owned(),
            ),
        }
    }

    /// Adds the labels of a model that computes scores.
    pub(super) fn set_scores(&mut self, config: ScoreConfig) {
        let labels = config.labels.iter().map(|label| quoted(label)).collect();
        self.scores = Some(ScoreConfig { labels, ..config });
    }

    fn set_sizes(&mut self, config: &EncoderConfig) {
        let size = |size: usize| Some(size as u64);
        self.outline.context_length = size(config.max_positions);
        self.outline.layers = size(config.layers.len());
        self.outline.hidden_size = size(config.hidden_size);
        self.outline.heads = size(config.heads);
        self.outline.head_dim = size(config.head_dim);
        self.outline.vocab_size = size(config.vocab_size);
    }
}
