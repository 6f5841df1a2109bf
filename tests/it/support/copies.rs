//! Copies of models whose files a test changes.

use std::path::Path;

/// Copies a directory with everything in it to `to`, which may exist.
pub(crate) fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a directory");
    for entry in std::fs::read_dir(from).expect("a directory") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy_all(&path, &target),
            false => drop(std::fs::copy(&path, &target).expect("a file")),
        }
    }
}
