//! The files of a disk tier.

use std::path::{Path, PathBuf};

/// The files of all records in a directory.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(directory.join("v1")).expect("a folder");
    let folders = folders.map(|folder| folder.expect("readable").path());
    let folders = folders.filter(|folder| folder.is_dir());
    let files = folders.flat_map(|folder| std::fs::read_dir(folder).expect("readable"));
    files.map(|file| file.expect("readable").path()).collect()
}
