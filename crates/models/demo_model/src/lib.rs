//! The files of the two small demo models, embedded in the binary.
//!
//! `stolon-checkpoint` reads them as it reads a directory, in place and without a copy.
#![forbid(unsafe_code)]

/// The name of a file, for error messages, and its content.
pub type File = (&'static str, &'static [u8]);

/// The files of a model's directory.
#[derive(Clone, Copy, Debug)]
pub struct Files {
    /// `config.json`.
    pub config: File,
    /// `generation_config.json`.
    pub generation: File,
    /// `model.safetensors`.
    pub weights: File,
    /// `tokenizer.json`.
    pub tokenizer: File,
    /// `tokenizer_config.json`.
    pub tokenizer_config: File,
    /// `preprocessor_config.json`, if the model takes images.
    pub preprocessor: Option<File>,
}

/// Embeds a file of this crate.
macro_rules! file {
    ($name:expr) => {
        ($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $name)).as_slice())
    };
}

/// Embeds the files of a directory of this crate.
macro_rules! files {
    ($directory:literal, $preprocessor:expr) => {
        Files {
            config: file!(concat!($directory, "/config.json")),
            generation: file!(concat!($directory, "/generation_config.json")),
            weights: file!(concat!($directory, "/model.safetensors")),
            tokenizer: file!(concat!($directory, "/tokenizer.json")),
            tokenizer_config: file!(concat!($directory, "/tokenizer_config.json")),
            preprocessor: $preprocessor,
        }
    };
}

/// A small Llama that answers questions about a handbook in its prompt.
pub static TEXT: Files = files!("text", None);

/// A model with the structure of SmolVLM that answers questions about a picture of a few shapes.
pub static VISION: Files = files!("vision", Some(file!("vision/preprocessor_config.json")));

/// The handbook, with questions about it and their answers.
pub static HANDBOOK: File = file!("text/handbook.json");

/// Questions about the picture, and their answers.
pub static PICTURE_QUESTIONS: File = file!("vision/picture.json");

/// The picture, in PNG.
pub static PICTURE: File = file!("vision/picture.png");
