//! Types whose final form comes from the model crate.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How tokens are chosen from logits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k likeliest; `None` keeps all.
    pub top_k: Option<usize>,
    /// Keep the likeliest up to this mass; `None` keeps all.
    pub top_p: Option<f32>,
    /// Keep those at least this fraction as likely as the likeliest.
    pub min_p: Option<f32>,
    /// Divides positive logits of seen tokens.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from seen tokens.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence.
    pub frequency_penalty: f32,
    /// Added to logits.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Same seed, same text.
    pub seed: Option<u64>,
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl ChatMessage {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role: role.into(), content: content.into() }
    }
}

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelSource {
    /// A Hugging Face model directory.
    Directory(PathBuf),
    /// One GGUF file.
    Gguf(PathBuf),
    /// A repository on the hub.
    Hub {
        /// `org/name`.
        id: String,
        /// `main` unless given.
        revision: String,
    },
    /// The model that ships with the crate.
    #[cfg(feature = "demo-model")]
    Demo,
    /// Random weights.
    Random {
        /// Name of the shape.
        preset: String,
        /// The seed.
        seed: u64,
    },
}

impl std::str::FromStr for ModelSource {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<ModelSource, crate::Error> {
        Ok(ModelSource::Directory(text.into()))
    }
}
