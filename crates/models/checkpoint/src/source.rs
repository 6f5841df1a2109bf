//! [`ModelSource`] says where a model comes from. It is parsed from the string that a user passes
//! (`--model`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::ModelError;

/// The origin of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelSource {
    /// A Hugging Face model directory, or a directory with a single GGUF model.
    Directory(PathBuf),
    /// A GGUF file. For a model in several files (`NAME-00001-of-00003.gguf`), any of them selects
    /// all.
    Gguf(PathBuf),
    /// A repository on the Hugging Face hub.
    Hub {
        /// `org/name`, or `name` for the few repositories without an owner.
        id: String,
        /// A branch, tag or commit; `main` by default.
        revision: String,
        /// Selects a GGUF model of the repository: the name of its file (of any of its parts), or a
        /// quantization such as `Q4_K_M`. With `None`, safetensors files are loaded. If there are
        /// none, the repository's only GGUF model is loaded, or the one in `Q4_K_M`.
        file: Option<String>,
    },
    /// The demo model that is embedded in the crate (feature `demo-model`).
    #[cfg(feature = "demo-model")]
    Demo,
    /// The demo model that reads images, which is embedded, too.
    #[cfg(feature = "demo-model")]
    DemoVision,
    /// A model with random weights and the shape of a real model, for benchmarks and tests. Its
    /// tokens are bytes.
    Random {
        /// Name of the shape, e.g. `100m`: one of [`PRESETS`](crate::random::PRESETS).
        preset: String,
        /// Seed of the weights. The same seed leads to the same weights.
        seed: u64,
    },
}

impl FromStr for ModelSource {
    type Err = ModelError;

    /// The strings `demo` and `demo-vision` are always the demo models; `./demo` is a directory.
    /// Otherwise, an existing directory or file is used; a file must be a GGUF file. If there is
    /// none, the string is `random:PRESET[@SEED]`, or a hub id `org/name[@revision][:file]`. A
    /// string that looks like a path (it starts with `.`, `/` or `~`, ends in `.gguf` without a
    /// `:`, or has more than one `/` before the `:`) is never parsed as a hub id.
    fn from_str(text: &str) -> Result<Self, ModelError> {
        let unknown =
            |reason: &str| ModelError::UnknownSource { given: text.into(), reason: reason.into() };
        if text.is_empty() {
            return Err(unknown("it is empty"));
        }
        if DEMOS.contains(&text) {
            return demo(text).ok_or_else(|| {
                unknown("this build does not include the demo models (feature `demo-model`)")
            });
        }
        let path = Path::new(text);
        let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if path.exists() && !is_gguf {
            return Err(unknown("it is a file, but not a .gguf file"));
        }
        let in_hub = hub(text).filter(|_| text.contains(':') && !path.exists());
        if is_gguf && in_hub.is_none() {
            return Ok(Self::Gguf(path.to_owned()));
        }
        if let Some(preset) = text.strip_prefix("random:") {
            return random(preset).ok_or_else(|| unknown("the seed is not an integer below 2^64"));
        }
        hub(text).ok_or_else(|| unknown("there is no such file or directory"))
    }
}

impl fmt::Display for ModelSource {
    /// Writes a string that parses to the same source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) if DEMOS.iter().any(|name| path.as_os_str() == *name) => {
                write!(f, "./{}", path.display())
            }
            Self::Directory(path) | Self::Gguf(path) => path.display().fmt(f),
            Self::Hub { id, revision, file } => {
                f.write_str(id)?;
                if revision != "main" {
                    write!(f, "@{revision}")?;
                }
                file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
            }
            #[cfg(feature = "demo-model")]
            Self::Demo => f.write_str(DEMOS[0]),
            #[cfg(feature = "demo-model")]
            Self::DemoVision => f.write_str(DEMOS[1]),
            Self::Random { preset, seed } => write!(f, "random:{preset}@{seed}"),
        }
    }
}

impl From<PathBuf> for ModelSource {
    /// The same as `From<&Path>`.
    fn from(path: PathBuf) -> Self {
        path.as_path().into()
    }
}

impl From<&Path> for ModelSource {
    /// A path that ends in `.gguf` is a GGUF file, any other path a directory. The file system is
    /// not accessed.
    fn from(path: &Path) -> Self {
        if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) {
            return Self::Gguf(path.to_owned());
        }
        Self::Directory(path.to_owned())
    }
}

/// The names of the demo models.
const DEMOS: [&str; 2] = ["demo", "demo-vision"];

/// The demo model with this name; `None` in a build without demo models.
#[cfg_attr(not(feature = "demo-model"), allow(unused_variables, reason = "there are none"))]
fn demo(name: &str) -> Option<ModelSource> {
    #[cfg(feature = "demo-model")]
    return Some(if name == DEMOS[0] { ModelSource::Demo } else { ModelSource::DemoVision });
    #[cfg(not(feature = "demo-model"))]
    None
}

/// Parses `PRESET[@SEED]`. The default seed is 0.
fn random(text: &str) -> Option<ModelSource> {
    let (preset, seed) = text.split_once('@').unwrap_or((text, "0"));
    Some(ModelSource::Random { preset: preset.into(), seed: seed.parse().ok()? })
}

/// Parses `[org/]name[@revision][:file]`.
fn hub(text: &str) -> Option<ModelSource> {
    let (text, file) = text.split_once(':').map_or((text, None), |(id, file)| (id, Some(file)));
    let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
    is_hub_id(id, revision, file).then(|| ModelSource::Hub {
        id: id.into(),
        revision: revision.into(),
        file: file.map(str::to_owned),
    })
}

/// Whether `id` is `[org/]name`, `revision` is a branch, tag or commit, and `file` is the name of a
/// file or of a quantization. All of them become parts of paths in the cache, and must not lead out
/// of it.
pub(crate) fn is_hub_id(id: &str, revision: &str, file: Option<&str>) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let revision_char = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    let revision_part = |part: &str| !matches!(part, "" | "." | "..");
    id.split('/').count() <= 2
        && id.split('/').all(part)
        && revision.bytes().all(revision_char)
        && revision.split('/').all(revision_part)
        && id.len() + revision.len() <= 250
        && file.is_none_or(|file| file.len() <= 250 && file.split('/').all(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelSource, ModelError> {
        text.parse()
    }

    fn hub(id: &str, revision: &str) -> ModelSource {
        ModelSource::Hub { id: id.into(), revision: revision.into(), file: None }
    }

    /// Goal: hub ids, with and without owner and revision, and presets are parsed.
    #[test]
    fn hub_ids_and_presets_are_parsed() {
        assert_eq!(parse("Qwen/Qwen3-0.6B").unwrap(), hub("Qwen/Qwen3-0.6B", "main"));
        assert_eq!(parse("org/name@refs/pr/3").unwrap(), hub("org/name", "refs/pr/3"));
        assert_eq!(parse("gpt2").unwrap(), hub("gpt2", "main"));
        let random = |preset: &str, seed| ModelSource::Random { preset: preset.into(), seed };
        assert_eq!(parse("random:100m").unwrap(), random("100m", 0));
        assert_eq!(parse("random:100m@9").unwrap(), random("100m", 9));
        let gguf = |text: &str, expected: &str| match parse(text).unwrap() {
            ModelSource::Hub { id, revision, file: Some(file) } => {
                assert_eq!(format!("{id} {revision} {file}"), expected);
            }
            other => panic!("{text}: {other:?}"),
        };
        gguf("org/name:Q4_K_M", "org/name main Q4_K_M");
        gguf("org/name@v1:dir/m.gguf", "org/name v1 dir/m.gguf");
        for text in [
            "org/name",
            "org/name@refs/pr/3",
            "random:tiny@7",
            "org/name:Q4_K_M",
            "org/name@v1:dir/m.gguf",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    /// Goal: existing directories and `.gguf` paths are recognized; other files are refused.
    #[test]
    fn paths_are_recognized() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(parse(path).unwrap(), ModelSource::Directory(path.into()));
        let missing = format!("{path}/model.gguf");
        assert_eq!(parse(&missing).unwrap(), ModelSource::Gguf(missing.into()));
        let file = dir.path().join("notes.txt");
        std::fs::write(&file, "x").unwrap();
        let error = parse(file.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("; it is a file, but not a .gguf file"), "{error}");
    }

    /// Goal: `demo` and `demo-vision` are never directories that happen to have these names;
    /// `./demo` is the directory.
    #[test]
    fn a_directory_named_demo_is_not_the_model() {
        for name in DEMOS {
            let directory = ModelSource::from(Path::new(name));
            assert_eq!(directory.to_string(), format!("./{name}"));
            match parse(name) {
                Ok(source) => assert_eq!(source.to_string(), name),
                Err(error) => assert!(error.to_string().contains("demo-model"), "{error}"),
            }
        }
    }

    /// Goal: mistyped paths, invalid seeds, and revisions that would lead out of the cache
    /// directory are errors instead of hub ids.
    #[test]
    fn invalid_sources_are_refused() {
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
            "org/name@a/./b",
            "org/name:",
            "org/name:../x.txt",
            "org/name:a//b",
        ] {
            let error = parse(text).expect_err(text);
            assert!(matches!(error, ModelError::UnknownSource { .. }), "{text}: {error}");
        }
    }
}
