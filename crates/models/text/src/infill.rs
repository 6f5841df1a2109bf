//! Prompts for filling in the middle: the text before and after a gap, which the model fills.
//!
//! Models that were trained for it have special tokens around the two texts. [`InfillTokens`] finds
//! them in a tokenizer.

#[cfg(feature = "tokenizer")]
mod tokens;

#[cfg(feature = "tokenizer")]
pub use tokens::InfillTokens;

/// A gap in a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Infill {
    /// The text before the gap.
    pub prefix: String,
    /// The text after the gap.
    pub suffix: String,
    /// Other texts that the model sees before this one, the most important one last. Those that do
    /// not fit are left out, from the first one on.
    pub files: Vec<InfillFile>,
}

/// A text next to the one with the gap, such as another file of a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfillFile {
    /// Its name, which the model sees.
    pub name: String,
    /// Its content, or a part of it.
    pub text: String,
}

impl Infill {
    /// Size in bytes of all texts.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        let files = self.files.iter().map(|file| file.name.len() + file.text.len());
        self.prefix.len() + self.suffix.len() + files.sum::<usize>()
    }
}
