//! A picture, with questions about it and their answers, for the demo model that reads images. It
//! was not part of the training data.

use serde::Deserialize;

use super::{Question, json};
use crate::error::ModelError;

/// A picture with questions about it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Picture {
    /// The picture as a PNG file.
    #[serde(skip)]
    pub png: &'static [u8],
    /// A description of the picture, for people who cannot see it.
    pub description: String,
    /// Questions about the picture.
    pub questions: Vec<Question>,
}

/// The picture that is embedded together with the model.
///
/// # Errors
/// [`ModelError::Malformed`] if the embedded file is malformed, which is a defect of the build.
pub fn picture() -> Result<Picture, ModelError> {
    let picture: Picture = json(stolon_demo_model::PICTURE_QUESTIONS)?;
    Ok(Picture { png: stolon_demo_model::PICTURE.1, ..picture })
}
