//! The description of a running engine.

use serde::Serialize;

use crate::{Drafting, EmbeddingInfo, Error, RegionBins, ScoreConfig, TextPrompts};

/// The model that an engine runs, and the sizes of the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Name of the model: its hub id, or the name of its directory or file.
    pub id: String,
    /// Size of the vocabulary. Every token id is below it.
    pub vocab_size: usize,
    /// Context length: the maximum number of positions of one request, prompt and generated tokens
    /// together.
    pub max_positions: usize,
    /// Positions per KV block.
    pub block_size: usize,
    /// Number of KV blocks.
    pub num_blocks: usize,
    /// Memory of all KV blocks, in bytes.
    pub kv_bytes: usize,
    /// Size of a copy of the recurrent state of a sequence, in bytes; 0 for models without one, unless
    /// [`window_kv`](crate::EngineBuilder::window_kv) makes the windows of layers a state. Running
    /// requests have one each, and the prefix cache keeps copies of it in KV blocks.
    pub state_bytes: usize,
    /// Token ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// Describes the model's embeddings; `None` if it is not meant for embeddings.
    pub embedding: Option<EmbeddingInfo>,
    /// Describes the scores that the model computes for texts or pairs of texts; `None` if it
    /// computes none.
    pub scores: Option<ScoreConfig>,
    /// The texts that the model expects before others, by their names. They are not added unless a
    /// program does it.
    pub prompts: TextPrompts,
    /// The tasks for which an embedding model has matrices of their own, or adapters
    /// ([`Request::task`](crate::Request::task)). Empty for most models.
    pub tasks: Vec<String>,
    /// Whether an embedding needs one of these tasks, as with jina-embeddings-v5.
    pub task_required: bool,
    /// Whether the model is a text encoder, which computes embeddings or scores only.
    pub is_encoder: bool,
    /// Whether the model generates text. Models for embeddings do, unless they have no output
    /// matrix.
    pub generates: bool,
    /// Whether the model takes images ([`Request::image`](crate::Request::image)).
    pub takes_images: bool,
    /// The tasks for which the model was trained with prompts of their own, as in
    /// [`Request::query`](crate::Request::query): `query`, `caption`, `point` and `detect`. Empty
    /// for most models.
    pub skills: Vec<&'static str>,
    /// Whether the model can reason before it answers a question
    /// ([`Request::reason_about`](crate::Request::reason_about)).
    pub reasons: bool,
    /// The bins of coordinates and sizes in answers of the last two skills and in reasoning.
    #[serde(skip)]
    pub regions: Option<RegionBins>,
    /// The token that has the place of an image in the text of a prompt; `None` if the model takes
    /// no images, or if a custom backend takes them.
    pub image_token_id: Option<u32>,
    /// What guesses tokens of answers, or could.
    pub drafting: Drafting,
    /// Whether computed prefixes are cached and shared.
    pub prefix_caching: bool,
}

impl ModelInfo {
    /// The error for a request that generates text.
    pub(crate) fn not_generating(&self) -> Error {
        let model = self.id.clone();
        match self.scores {
            Some(_) => Error::ScoresOnly { model },
            None => Error::EmbeddingsOnly { model },
        }
    }
}
