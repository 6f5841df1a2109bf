//! The cache on disk, in the layout of Hugging Face's own tools: `blobs/ETAG` is the content of a
//! file, `snapshots/COMMIT/NAME` links to it, and `refs/REVISION` contains a commit.
//!
//! Commits, ETags and file names come from the hub's answers. Each becomes part of a path only
//! after [`plain`] has accepted it, so nothing is written outside the repository's directory.

use std::path::{Path, PathBuf};

use crate::files;

/// Maximum size in bytes of a file in `refs/`.
const REF_BYTES_MAX: u64 = 1024;
/// Maximum number of components of a file's name in a repository.
const DEPTH_MAX: usize = 4;
/// Maximum number of files of a snapshot that are listed.
const FILES_MAX: usize = 10_000;

/// Whether a name that the hub has sent can be used as one component of a path: 1 to 200 ASCII
/// letters, digits, `-`, `_` and `.`, without a dot at the start.
pub(super) fn plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (1..=200).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

/// Whether a name that the hub has sent can be used as a relative path: at most four [`plain`]
/// names between `/`.
pub(super) fn plain_path(name: &str) -> bool {
    name.split('/').count() <= DEPTH_MAX && name.split('/').all(plain)
}

/// The names of the files in a snapshot's directory and in its subdirectories.
pub(super) fn files_in(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut waiting = vec![String::new()];
    while let Some(parent) = waiting.pop() {
        let entries = std::fs::read_dir(directory.join(&parent)).into_iter().flatten().flatten();
        for entry in entries.take(FILES_MAX.saturating_sub(names.len())) {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let name = if parent.is_empty() { name } else { format!("{parent}/{name}") };
            // Files are symbolic links, and links to directories are not followed.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && plain_path(&name) => waiting.push(name),
                _ => names.push(name),
            }
        }
    }
    names
}

/// The cached files of one repository.
#[derive(Debug)]
pub(super) struct RepoCache {
    directory: PathBuf,
}

impl RepoCache {
    /// The files of the repository `id`, which is a valid hub id, in the cache `cache`.
    pub(super) fn new(cache: &Path, id: &str) -> Self {
        Self { directory: cache.join(format!("models--{}", id.replace('/', "--"))) }
    }

    /// The directory with the files of a commit. `None` if `commit` is not a [`plain`] name.
    pub(super) fn snapshot(&self, commit: &str) -> Option<PathBuf> {
        plain(commit).then(|| self.directory.join("snapshots").join(commit))
    }

    /// The commit that was recorded for a revision, if there is one.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        let bytes = files::read(&self.directory.join("refs").join(revision), REF_BYTES_MAX).ok()?;
        Some(String::from_utf8(bytes).ok()?.trim().to_owned())
    }

    /// Records the commit of a revision, so that it is found offline.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> std::io::Result<()> {
        let path = self.directory.join("refs").join(revision);
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(path, commit)
    }

    /// The path of the content with the ETag `etag`. `None` if it is not a [`plain`] name.
    pub(super) fn blob(&self, etag: &str) -> Option<PathBuf> {
        plain(etag).then(|| self.blobs().join(etag))
    }

    /// The path at which the content with the ETag `etag` is stored until its download is complete,
    /// as in Hugging Face's tools. `None` if it is not a [`plain`] name.
    pub(super) fn incomplete(&self, etag: &str) -> Option<PathBuf> {
        plain(etag).then(|| self.blobs().join(format!("{etag}.incomplete")))
    }

    fn blobs(&self) -> PathBuf {
        self.directory.join("blobs")
    }
}

/// Makes `blob` available as the file `file` of a snapshot, by a relative symbolic link, or by
/// moving it if the system does not allow links. `depth` is the number of the snapshot's
/// subdirectories in the path of `file`.
pub(super) fn link(blob: &Path, file: &Path, depth: usize) -> std::io::Result<()> {
    file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    #[cfg(unix)]
    let linked = {
        let name = blob.file_name().unwrap_or_default();
        let blobs = PathBuf::from("../".repeat(depth) + "../../blobs");
        std::os::unix::fs::symlink(blobs.join(name), file)
    };
    #[cfg(not(unix))]
    let _ = depth;
    #[cfg(not(unix))]
    let linked = std::fs::hard_link(blob, file);
    match linked {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && file.exists() => Ok(()),
        Err(_) => std::fs::rename(blob, file),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: only names that stay inside a directory become components of a path.
    #[test]
    fn names_that_leave_a_directory_are_not_plain() {
        for name in ["0123abc", "model-1-of-2.safetensors", "a_b", &"f".repeat(64)] {
            assert!(plain(name), "{name}");
        }
        let long = "a".repeat(201);
        for name in
            ["", ".", "..", "../../x", "/etc/passwd", "a/b", "a\\b", "C:x", "a b", "a\0", &long]
        {
            assert!(!plain(name), "{name}");
        }
        assert!(plain_path("BF16/m-BF16-00001-of-00002.gguf"));
        for name in ["", "/a", "a/", "a//b", "a/../b", "./a", "a/b/c/d/e", "a\\b/c"] {
            assert!(!plain_path(name), "{name}");
        }
    }
}
