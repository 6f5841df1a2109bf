//! Opens and writes the files of the disk tier and of exported prefixes. Only regular files are
//! used: nothing waits for the other end of a pipe.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// Whether a path may be a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Links {
    /// The file that it leads to is opened, for a path that a user has named.
    Follow,
    /// It is refused, for files that a tier has made itself.
    Refuse,
}

/// Opens a regular file for reading.
///
/// # Errors
/// The errors of the file system, and if it is another kind of file.
pub(crate) fn open(path: &Path, links: Links) -> io::Result<File> {
    open_with(File::options().read(true), path, links)
}

/// Opens a regular file with these options, as [`open`].
pub(crate) fn open_with(options: &mut OpenOptions, path: &Path, links: Links) -> io::Result<File> {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        let mut flags = OFlags::NONBLOCK;
        flags.set(OFlags::NOFOLLOW, links == Links::Refuse);
        options.custom_flags(flags.bits().cast_signed());
    }
    #[cfg(not(unix))]
    let _ = links;
    let file = options.open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("expected a regular file")),
    }
}

/// Writes a file so that, even after a crash, either the old file or the whole new one is there:
/// the content goes to a temporary file in the same directory, which is synchronized and renamed.
///
/// # Errors
/// The errors of the file system and of `write`. After an error the temporary file is removed.
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected the name of a file"));
    };
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = create_new(&temporary).and_then(|mut file| {
        write(&mut file)?;
        file.flush()?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        // The first error says more than one of the removal.
        let _ = fs::remove_file(&temporary);
    }
    renamed
}

/// Makes a file. A file of any kind that is there already, from an earlier process, is replaced.
fn create_new(path: &Path) -> io::Result<File> {
    let create = || File::options().write(true).create_new(true).open(path);
    match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create()
        }
        created => created,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    fn pipe(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().expect("a command").success());
    }

    /// Goal: pipes and directories are refused at once, to read and to write, and links where they
    /// are not expected.
    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "text").expect("a file");
        symlink(&file, &link).expect("a link");
        assert!(open(&file, Links::Refuse).is_ok() && open(&link, Links::Follow).is_ok());
        assert!(open(&link, Links::Refuse).is_err());
        let fifo = folder.path().join("fifo");
        pipe(&fifo);
        for links in [Links::Follow, Links::Refuse] {
            assert!(open(&fifo, links).is_err() && open(folder.path(), links).is_err());
            assert!(open_with(File::options().read(true).write(true), &fifo, links).is_err());
        }
    }

    /// Goal: a file that exists at the path of the temporary file is neither waited for nor
    /// followed.
    #[test]
    fn temporary_files_are_new() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, other) = (folder.path().join("file"), folder.path().join("other"));
        let temporary = folder.path().join(format!("file.{}.tmp", std::process::id()));
        fs::write(&other, "other").expect("a file");
        let write = || write_atomically(&file, |file| file.write_all(b"new"));
        pipe(&temporary);
        write().expect("written");
        symlink(&other, &temporary).expect("a link");
        write().expect("written");
        assert_eq!(fs::read(&file).expect("a file"), b"new");
        assert_eq!(fs::read(&other).expect("a file"), b"other");
    }
}
