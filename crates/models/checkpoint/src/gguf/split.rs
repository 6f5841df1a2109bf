//! Models that are split into several GGUF files, `NAME-00001-of-00003.gguf` and so on.
//!
//! Only the first part has the metadata of the model. Each part has the keys `split.no` (from 0),
//! `split.count` and `split.tensors.count` (the number of tensors of all parts), and a list of its
//! own tensors. Any part leads to all of them.

use std::path::{Path, PathBuf};

use super::{Header, TENSORS_MAX, Value, read_head};
use crate::error::ModelError;
use crate::mmap::Bytes;

/// Maximum number of parts. Known models have up to 100.
const PARTS_MAX: u32 = 1024;
/// Maximum number of entries of a directory that are searched for GGUF files.
const DIRECTORY_ENTRIES_MAX: usize = 10_000;
/// The quantization that is chosen if a repository has several, as in llama.cpp.
const DEFAULT_TAG: &str = "Q4_K_M";

/// The name of a part: `STEM-NUMBER-of-COUNT.gguf` with numbers of five digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartName<'a> {
    /// The part of the name before the numbers, without the last `-`.
    stem: &'a str,
    /// Number of the part, from 1 to `count`.
    number: u32,
    /// Number of all parts, from 1 to [`PARTS_MAX`].
    count: u32,
    /// The suffix `.gguf`, in upper or lower case.
    extension: &'a str,
}

impl<'a> PartName<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (stem, extension) = name.split_at_checked(name.len().checked_sub(5)?)?;
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = stem.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        if !extension.eq_ignore_ascii_case(".gguf") || !digits(number) || !digits(count) {
            return None;
        }
        let (number, count) = (number.parse().ok()?, count.parse().ok()?);
        let valid = (1..=count).contains(&number) && count <= PARTS_MAX;
        valid.then_some(Self { stem, number, count, extension })
    }

    /// The name of the part `number` of the same model.
    fn sibling(self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}{}", self.stem, self.count, self.extension)
    }
}

/// The names of all files of the model to which the file `name` belongs, in order.
pub(crate) fn parts(name: &str) -> Vec<String> {
    match PartName::parse(name) {
        Some(part) => (1..=part.count).map(|number| part.sibling(number)).collect(),
        None => vec![name.to_owned()],
    }
}

/// The first file of the model that `wanted` selects from the GGUF files `names`, which may be
/// paths with `/`. `wanted` is a file name or a quantization such as `Q4_K_M`. Without it, the only
/// model is selected, or the only one in [`DEFAULT_TAG`].
///
/// # Errors
/// The first files of all models, sorted, if `wanted` does not select exactly one.
pub(crate) fn choose<'a>(
    names: impl IntoIterator<Item = &'a str>,
    wanted: Option<&str>,
) -> Result<String, Vec<String>> {
    let first = |name: &str| PartName::parse(name).map_or(name.to_owned(), |part| part.sibling(1));
    let file_name = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    let is_model = |name: &&str| {
        let name = file_name(name).to_ascii_lowercase();
        // The projector of images is another model, and importance matrices are not models.
        name.ends_with(".gguf") && !name.starts_with("mmproj") && !name.contains("imatrix")
    };
    let mut models: Vec<String> = names.into_iter().filter(is_model).map(first).collect();
    models.sort();
    models.dedup();
    let only = |matches: &dyn Fn(&str) -> bool| {
        let mut matching = models.iter().filter(|name| matches(name));
        matching.next().filter(|_| matching.next().is_none()).cloned()
    };
    let chosen = match wanted {
        None => only(&|_| true).or_else(|| only(&|name| has_tag(name, DEFAULT_TAG))),
        Some(wanted) => {
            let exact = |name: &str| {
                parts(name).iter().any(|part| part == wanted || file_name(part) == wanted)
            };
            only(&exact).or_else(|| only(&|name| has_tag(name, wanted)))
        }
    };
    chosen.ok_or(models)
}

/// Whether `name` contains `tag` between separators, in upper or lower case.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let is_end = |text: Option<char>| text.is_none_or(|c| "-./".contains(c));
    name.match_indices(&tag).any(|(at, _)| {
        is_end(name[..at].chars().next_back()) && is_end(name[at + tag.len()..].chars().next())
    })
}

/// The only GGUF model in `directory`; `None` if it has no GGUF file.
///
/// # Errors
/// [`ModelError::Io`], and [`ModelError::UnknownSource`] if there are several models.
pub(crate) fn find(directory: &Path) -> Result<Option<PathBuf>, ModelError> {
    let io = |error| ModelError::Io { path: directory.to_owned(), error };
    let entries = std::fs::read_dir(directory).map_err(io)?.take(DIRECTORY_ENTRIES_MAX);
    let names: Vec<_> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    match choose(names.iter().map(String::as_str), None) {
        Ok(name) => Ok(Some(directory.join(name))),
        Err(models) if models.is_empty() => Ok(None),
        Err(models) => Err(ModelError::UnknownSource {
            given: directory.display().to_string(),
            reason: format!("it has several GGUF models, give one of them: {}", models.join(", ")),
        }),
    }
}

/// Maps the file `path`, or all parts of the model if it is one of several parts. Returns the
/// joined header and the content of each part.
pub(crate) fn open(path: &Path) -> Result<(Header, Vec<Bytes>), ModelError> {
    let bytes = Bytes::map(path)?;
    let file = path.display().to_string();
    let header = read_head(&file, &bytes, bytes.file_bytes())?;
    let count = header.metadata.get("split.count").map_or(Some(1), Value::as_u64);
    if count.is_some_and(|count| count <= 1) {
        return Ok((header, vec![bytes]));
    }
    let name = path.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
    let Some(part) = PartName::parse(name).filter(|part| count == Some(u64::from(part.count)))
    else {
        let got = header.metadata.get("split.count").map(Value::shown).unwrap_or_default();
        let expected = format!(
            "the number of parts in the file's name, as in NAME-00001-of-00003.gguf, at most \
             {PARTS_MAX}"
        );
        return Err(ModelError::key(&file, "split.count", expected, got));
    };
    drop((header, bytes));
    let directory = path.parent().unwrap_or(Path::new(""));
    let sibling = |number| directory.join(part.sibling(number));
    let paths: Vec<_> = (1..=part.count).map(sibling).collect();
    check_present(directory, part, &paths)?;
    let files = paths.iter().map(|path| Ok((path.display().to_string(), Bytes::map(path)?)));
    join(paths.len(), files)
}

/// Checks that all parts exist, before any of them is read.
fn check_present(
    directory: &Path,
    part: PartName<'_>,
    paths: &[PathBuf],
) -> Result<(), ModelError> {
    let missing: Vec<_> = (1..=part.count).zip(paths).filter(|(_, path)| !path.exists()).collect();
    let Some((number, _)) = missing.first() else { return Ok(()) };
    let more = match missing.len() {
        1 => String::new(),
        count => format!(", and {} other parts", count - 1),
    };
    Err(ModelError::MissingFile {
        directory: directory.to_owned(),
        expected: format!("{} (a part of the model){more}", part.sibling(*number)),
    })
}

/// Joins the headers of the parts. `files` has the names and contents of the parts in order, and
/// `count` is their number. A single file does not have to be a part.
pub(crate) fn join(
    count: usize,
    files: impl Iterator<Item = Result<(String, Bytes), ModelError>>,
) -> Result<(Header, Vec<Bytes>), ModelError> {
    let mut joined: Option<Header> = None;
    let mut contents = Vec::with_capacity(count);
    for (index, part) in files.enumerate() {
        let (file, bytes) = part?;
        let header = read_head(&file, &bytes, bytes.file_bytes())?;
        contents.push(bytes);
        if count == 1 && !header.metadata.contains_key("split.count") {
            return Ok((header, contents));
        }
        check_key(&header, "split.no", index as u64)?;
        check_key(&header, "split.count", count as u64)?;
        match &mut joined {
            None => joined = Some(header),
            Some(joined) => joined.add(header)?,
        }
    }
    let joined = joined.unwrap_or_default();
    check_key(&joined, "split.tensors.count", joined.tensors.len() as u64)?;
    Ok((joined, contents))
}

/// Checks that `key` has the value `expected`.
fn check_key(header: &Header, key: &str, expected: u64) -> Result<(), ModelError> {
    let value = header.metadata.get(key);
    if value.and_then(Value::as_u64) == Some(expected) {
        return Ok(());
    }
    let got = value.map_or_else(|| "nothing".to_owned(), Value::shown);
    Err(ModelError::key(&header.file, key, expected, got))
}

impl Header {
    /// Adds the tensors of the next part.
    fn add(&mut self, part: Header) -> Result<(), ModelError> {
        let index = self.files.len();
        if (self.tensors.len() + part.tensors.len()) as u64 > TENSORS_MAX {
            let reason = format!("expected at most {TENSORS_MAX} tensors in all parts, got more");
            return Err(ModelError::malformed(&part.file, reason));
        }
        check_key(&part, "split.tensors.count", self.tensor_count())?;
        for (name, mut info) in part.tensors {
            info.part = index;
            if let Some(other) = self.tensors.get(&name) {
                let other = &self.files[other.part];
                let reason = format!("duplicate tensor `{name}`, which is also in {other}");
                return Err(ModelError::malformed(&part.file, reason));
            }
            self.tensors.insert(name, info);
        }
        self.files.push(part.file);
        Ok(())
    }

    /// The number of tensors of all parts, according to the metadata.
    fn tensor_count(&self) -> u64 {
        self.metadata.get("split.tensors.count").and_then(Value::as_u64).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names of parts are recognized, and lead to the names of all parts.
    #[test]
    fn parts_are_recognized_by_their_names() {
        assert_eq!(
            parts("a/m-Q4-00002-of-00003.gguf"),
            [1, 2, 3].map(|n| format!("a/m-Q4-0000{n}-of-00003.gguf"))
        );
        for single in [
            "m.gguf",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-1-of-3.gguf",
            "m-00001-of-09999.gguf",
            "m-00001-of-00003.bin",
            "m-+0001-of-00003.gguf",
            "é.gguf",
            "",
        ] {
            assert_eq!(parts(single), [single], "{single}");
        }
    }

    /// Goal: a model is selected by its file, one of its parts or its quantization. Without a
    /// selection, the only model or the usual quantization is selected.
    #[test]
    fn models_are_chosen_by_file_or_quantization() {
        let names = [
            "m-Q4_K_M.gguf",
            "m-q8_0.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
            "m-f16.gguf",
            "mmproj-m-f16.gguf",
            "README.md",
        ];
        let chosen = |wanted| choose(names, wanted).ok();
        assert_eq!(chosen(None).as_deref(), Some("m-Q4_K_M.gguf"));
        assert_eq!(chosen(Some("Q8_0")).as_deref(), Some("m-q8_0.gguf"));
        assert_eq!(chosen(Some("f16")).as_deref(), Some("m-f16.gguf"));
        for part in ["bf16", "m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf"] {
            assert_eq!(chosen(Some(part)).as_deref(), Some("BF16/m-BF16-00001-of-00002.gguf"));
        }
        assert_eq!(choose(names, Some("Q6_K")).unwrap_err().len(), 4);
        assert_eq!(choose(["a.gguf", "b.gguf"], None).unwrap_err(), ["a.gguf", "b.gguf"]);
        assert_eq!(choose(["README.md"], None), Err(vec![]));
    }
}
