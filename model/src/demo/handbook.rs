//! A handbook for the demo model to be asked about, with questions and their answers. The model
//! has not seen it in training, so an answer can only be right if it was read in the context.

use serde::Deserialize;

use crate::error::ModelError;

/// A handbook with questions about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Handbook {
    /// Its text, more than 1,024 tokens: the system prompt of a conversation.
    pub system: String,
    /// What can be asked about it.
    pub questions: Vec<Question>,
}

/// One question and its one right answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Question {
    /// The question: the user's turn.
    #[serde(rename = "q")]
    pub question: String,
    /// The answer, word for word as the model learned to give it.
    #[serde(rename = "a")]
    pub answer: String,
}

/// The handbook that is embedded beside the model.
///
/// # Errors
/// [`ModelError::Malformed`] when the file is not what it should be: a broken build.
pub fn handbook() -> Result<Handbook, ModelError> {
    let json = include_str!("../../demo/handbook.json");
    serde_json::from_str(json).map_err(|e| ModelError::malformed("demo/handbook.json", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the embedded file is a handbook, and each answer's last word stands in its text.
    #[test]
    fn the_handbook_holds_its_answers() {
        let book = handbook().expect("a handbook");
        assert!(book.questions.len() >= 4);
        for Question { question, answer } in &book.questions {
            let last = answer.trim_end_matches('.').rsplit(' ').next().expect("a word");
            assert!(book.system.contains(last), "{question} {answer}");
        }
    }
}
