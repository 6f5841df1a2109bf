//! A handbook, with questions about it and their answers, for conversations with the demo model. It
//! was not part of the training data, so the model can answer correctly only from its context.

use serde::Deserialize;

use super::{Question, json};
use crate::error::ModelError;

/// A handbook with questions about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Handbook {
    /// The text of the handbook, which is used as the system prompt. It has more than 1,024 tokens.
    pub system: String,
    /// Questions about the handbook.
    pub questions: Vec<Question>,
}

/// The handbook that is embedded together with the model.
///
/// # Errors
/// [`ModelError::Malformed`] if the embedded file is malformed, which is a defect of the build.
pub fn handbook() -> Result<Handbook, ModelError> {
    json(stolon_demo_model::HANDBOOK)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the embedded file is a handbook, and its text contains the last word of each answer.
    #[test]
    fn the_handbook_contains_the_answers() {
        let book = handbook().expect("a handbook");
        assert!(book.questions.len() >= 4);
        for Question { question, answer } in &book.questions {
            let last = answer.trim_end_matches('.').rsplit(' ').next().expect("a word");
            assert!(book.system.contains(last), "{question} {answer}");
        }
    }
}
