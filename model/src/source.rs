//! Where a model comes from: the text a user gives (`--model`), parsed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::ModelError;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelSource {
    /// A Hugging Face model directory.
    Directory(PathBuf),
    /// One GGUF file.
    Gguf(PathBuf),
    /// A repository on the hub, at a branch, tag or commit.
    Hub {
        /// `org/name`, or `name` for the few repositories without an owner.
        id: String,
        /// `main` unless given.
        revision: String,
    },
    /// The model that ships with the crate, behind the feature `demo-model`.
    #[cfg(feature = "demo-model")]
    Demo,
    /// Random weights in a real model's shape, for benchmarks and tests; text is plain bytes.
    Random {
        /// Name of the shape, e.g. `100m`: one of [`PRESETS`](crate::random::PRESETS).
        preset: String,
        /// The same seed gives the same weights.
        seed: u64,
    },
}

impl FromStr for ModelSource {
    type Err = ModelError;

    /// What is there on the disk wins: an existing directory, an existing file (which must be a
    /// GGUF). Otherwise `demo`, `random:PRESET[@SEED]`, or a hub id `org/name[@revision]`.
    /// Text that looks like a path (it starts with `.`, `/` or `~`, ends in `.gguf`, or has
    /// more than one `/`) is never taken for a hub id.
    fn from_str(text: &str) -> Result<Self, ModelError> {
        let unknown =
            |reason: &str| ModelError::UnknownSource { given: text.into(), reason: reason.into() };
        if text.is_empty() {
            return Err(unknown("it is empty"));
        }
        let path = Path::new(text);
        let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if path.exists() && !is_gguf {
            return Err(unknown("it is a file that is no .gguf"));
        }
        if is_gguf {
            return Ok(Self::Gguf(path.to_owned()));
        }
        if text == "demo" {
            return demo().ok_or_else(|| {
                unknown("the demo model is not in this build (feature `demo-model`)")
            });
        }
        if let Some(preset) = text.strip_prefix("random:") {
            return random(preset).ok_or_else(|| unknown("the seed is no number below 2^64"));
        }
        hub(text).ok_or_else(|| unknown("there is no such file or directory"))
    }
}

impl fmt::Display for ModelSource {
    /// Text that parses back to the same source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) | Self::Gguf(path) => path.display().fmt(f),
            Self::Hub { id, revision } if revision == "main" => f.write_str(id),
            Self::Hub { id, revision } => write!(f, "{id}@{revision}"),
            #[cfg(feature = "demo-model")]
            Self::Demo => f.write_str("demo"),
            Self::Random { preset, seed } => write!(f, "random:{preset}@{seed}"),
        }
    }
}

impl From<&Path> for ModelSource {
    /// A `.gguf` file, or else a directory; nothing is looked up.
    fn from(path: &Path) -> Self {
        if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) {
            return Self::Gguf(path.to_owned());
        }
        Self::Directory(path.to_owned())
    }
}

fn demo() -> Option<ModelSource> {
    #[cfg(feature = "demo-model")]
    return Some(ModelSource::Demo);
    #[cfg(not(feature = "demo-model"))]
    None
}

/// `PRESET[@SEED]`; the seed is 0 unless given.
fn random(text: &str) -> Option<ModelSource> {
    let (preset, seed) = text.split_once('@').unwrap_or((text, "0"));
    Some(ModelSource::Random { preset: preset.into(), seed: seed.parse().ok()? })
}

/// `[org/]name[@revision]`.
fn hub(text: &str) -> Option<ModelSource> {
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let revision_char = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    let revision_fits = !revision.is_empty()
        && revision.bytes().all(revision_char)
        && !revision.starts_with('/')
        && !revision.split('/').any(|part| part.is_empty() || part == "..");
    let mut parts = id.split('/');
    let fits = parts.clone().count() <= 2 && parts.all(part) && revision_fits;
    fits.then(|| ModelSource::Hub { id: id.into(), revision: revision.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelSource, ModelError> {
        text.parse()
    }

    fn hub(id: &str, revision: &str) -> ModelSource {
        ModelSource::Hub { id: id.into(), revision: revision.into() }
    }

    /// Hub ids with and without an owner and a revision, and the presets.
    #[test]
    fn ids_and_presets() {
        assert_eq!(parse("Qwen/Qwen3-0.6B").unwrap(), hub("Qwen/Qwen3-0.6B", "main"));
        assert_eq!(parse("org/name@refs/pr/3").unwrap(), hub("org/name", "refs/pr/3"));
        assert_eq!(parse("gpt2").unwrap(), hub("gpt2", "main"));
        let random = |preset: &str, seed| ModelSource::Random { preset: preset.into(), seed };
        assert_eq!(parse("random:100m").unwrap(), random("100m", 0));
        assert_eq!(parse("random:100m@9").unwrap(), random("100m", 9));
        for text in ["org/name", "org/name@refs/pr/3", "random:tiny@7"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    /// What is on the disk wins over a hub id of the same name.
    #[test]
    fn paths() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(parse(path).unwrap(), ModelSource::Directory(path.into()));
        let missing = format!("{path}/model.gguf");
        assert_eq!(parse(&missing).unwrap(), ModelSource::Gguf(missing.into()));
        let file = dir.path().join("notes.txt");
        std::fs::write(&file, "x").unwrap();
        let error = parse(file.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("no .gguf"), "{error}");
    }

    /// Mistyped paths, bad seeds and revisions that would leave the cache are errors, not
    /// downloads.
    #[test]
    fn refused() {
        for text in [
            "",
            "/no/such/dir",
            "./model",
            "../x",
            "~/m",
            "a/b/c",
            "a//b",
            "a/",
            "a b/c",
            "random:100m@x",
            "org/name@",
            "org/name@../../x",
            "org/name@/x",
        ] {
            let error = parse(text).expect_err(text);
            assert!(matches!(error, ModelError::UnknownSource { .. }), "{text}: {error}");
        }
    }
}
