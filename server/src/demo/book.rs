//! The handbook that the demonstration asks about, and the questions with their answers.

use serde::Deserialize;

/// A handbook with questions about it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Handbook {
    /// Its text: the system prompt.
    pub(super) system: String,
    /// What is asked about it.
    #[serde(rename = "qa")]
    pub(super) questions: Vec<Question>,
}

/// One question with the one right answer.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Question {
    /// The question.
    #[serde(rename = "q")]
    pub(super) question: String,
    /// The answer, word for word.
    #[serde(rename = "a")]
    pub(super) answer: String,
}

/// The handbook that is shown: one that the model has not seen in training.
pub(super) fn handbook() -> anyhow::Result<Handbook> {
    let line = include_str!("../../../model/demo/heldout.jsonl").lines().next().unwrap_or("");
    Ok(serde_json::from_str(line)?)
}
