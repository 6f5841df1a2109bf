//! Downloads one file of a commit to the cache.
//!
//! 1. A `HEAD` request returns the file's ETag and size. A blob with this ETag that is in the cache
//!    already is only linked.
//! 2. The file is written to `blobs/ETAG.incomplete`. If an interrupted download has left a part of
//!    it there, only the rest is requested.
//! 3. The size and the hash of the whole file are verified. A file with the wrong hash is removed.
//! 4. The file is renamed to `blobs/ETAG` and linked from the snapshot.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

use super::checksum::Checksum;
use super::client::{self, Answer, Failure};
use super::progress::Reporter;
use super::{Snapshot, WEIGHT_BYTES_MAX, bytes_max, cache};

/// The hub's description of a file before it is downloaded.
struct Expected<'a> {
    name: &'a str,
    etag: &'a str,
    /// Size in bytes; `None` if the hub has not sent it, which is allowed only for small files.
    size: Option<u64>,
}

impl Snapshot<'_> {
    /// Downloads the file `name` to `path`. An interrupted download is resumed.
    pub(super) fn download(&self, name: &str, path: &Path) -> Result<(), Failure> {
        let head = self.client.head(&self.url(name))?;
        let etag = head.etag.unwrap_or_default();
        let (Some(blob), Some(incomplete)) = (self.cache.blob(&etag), self.cache.incomplete(&etag))
        else {
            let text = format!("expected an ETag of letters and digits, got `{etag}`");
            return Err(Failure::answer(head.status, text));
        };
        let size = expected_size(name, head.status, head.size)?;
        incomplete.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(Failure::new)?;
        let file = OpenOptions::new().create(true).append(true).read(true).open(&incomplete);
        let mut file = file.map_err(Failure::new)?;
        // Another process may be downloading the same file. Some file systems do not support locks.
        if let Err(error) = file.lock() {
            tracing::debug!(%error, "cannot lock {}", incomplete.display());
        }
        // Another process or another commit may have stored the same content already.
        if blob.is_file() {
            let _ = std::fs::remove_file(&incomplete);
        } else {
            let expected = Expected { name, etag: &etag, size };
            self.complete(&expected, &mut file).inspect_err(|failure| {
                if failure.corrupt {
                    let _ = std::fs::remove_file(&incomplete);
                }
            })?;
            std::fs::rename(&incomplete, &blob).map_err(Failure::new)?;
        }
        cache::link(&blob, path, name.matches('/').count()).map_err(Failure::new)
    }

    /// Downloads the rest of a file whose beginning is in `file`, and verifies the whole file.
    fn complete(&self, expected: &Expected<'_>, file: &mut File) -> Result<(), Failure> {
        let mut have = file.metadata().map_err(Failure::new)?.len();
        if expected.size.is_none_or(|size| have > size) {
            file.set_len(0).map_err(Failure::new)?;
            have = 0;
        }
        let answer = match expected.size == Some(have) && have > 0 {
            true => None,
            false => Some(self.request(expected, file, &mut have)?),
        };
        let mut checksum = Checksum::start(expected.etag, expected.size);
        if checksum.is_none() {
            let name = expected.name;
            tracing::debug!("the hub sends no hash of {name}, so it is not verified");
        }
        hash_start(file, have, &mut checksum).map_err(Failure::new)?;
        let mut reporter = Reporter::new(self.options, self.model.id, expected.name, expected.size);
        reporter.report(have);
        let mut got = have;
        if let Some(answer) = answer {
            let limit = expected.size.unwrap_or(bytes_max(expected.name)).saturating_sub(have);
            let report = |copied| reporter.report(have + copied);
            let mut out = Hashed { file, checksum: &mut checksum };
            let window = self.client.window();
            let copied = client::copy(answer.body, &mut out, limit, window, report);
            got += copied.map_err(Failure::new)?;
        }
        if let Some(size) = expected.size
            && got != size
        {
            return Err(Failure::new(format!("expected {size} bytes, got {got}")));
        }
        checksum.map_or(Ok(()), Checksum::finish).map_err(Failure::corrupt)?;
        reporter.done();
        Ok(())
    }

    /// Requests the rest of a file whose first `have` bytes are in `file`. If the hub does not send
    /// the rest, `file` is truncated, `have` becomes 0, and the answer is the whole file.
    fn request(
        &self,
        expected: &Expected<'_>,
        file: &mut File,
        have: &mut u64,
    ) -> Result<Answer, Failure> {
        let url = self.url(expected.name);
        let check = |answer: Answer| match &answer.etag {
            Some(etag) if etag != expected.etag => {
                let text = format!("expected the ETag `{}`, got `{etag}`", expected.etag);
                Err(Failure::answer(answer.status, text))
            }
            _ => match (answer.size, expected.size) {
                (Some(got), Some(size)) if got != size => {
                    let text = format!("expected {size} bytes, got {got}");
                    Err(Failure::answer(answer.status, text))
                }
                _ => Ok(answer),
            },
        };
        if *have > 0 {
            match self.client.get(&url, *have) {
                Ok(answer) if answer.start == *have => return check(answer),
                // 416 means that the range is not satisfiable, because the file is shorter.
                Err(failure) if failure.status != Some(416) => return Err(failure),
                _ => file.set_len(0).map_err(Failure::new)?,
            }
            *have = 0;
        }
        let answer = self.client.get(&url, 0)?;
        match answer.start {
            0 => check(answer),
            start => {
                let text = format!("expected the file from its start, got it from byte {start}");
                Err(Failure::answer(answer.status, text))
            }
        }
    }

    pub(super) fn url(&self, name: &str) -> String {
        format!("/{}/resolve/{}/{name}", self.model.id, self.commit)
    }
}

/// Checks the size that the hub has sent for the file `name`. It is required for weights.
fn expected_size(name: &str, status: u16, size: Option<u64>) -> Result<Option<u64>, Failure> {
    let max = bytes_max(name);
    match size {
        Some(size) if size > max => {
            let text = format!("expected at most {max} bytes, got {size}");
            Err(Failure::answer(status, text))
        }
        None if max == WEIGHT_BYTES_MAX => {
            Err(Failure::answer(status, "expected a size, got none"))
        }
        size => Ok(size),
    }
}

/// Adds the first `bytes` bytes of `file` to `checksum`.
fn hash_start(file: &mut File, bytes: u64, checksum: &mut Option<Checksum>) -> std::io::Result<()> {
    let Some(checksum) = checksum else { return Ok(()) };
    let mut rest = file.take(bytes);
    let mut buffer = vec![0; 256 << 10];
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(()),
            count => checksum.update(&buffer[..count]),
        }
    }
}

/// Appends to a file, and adds the written bytes to its hash.
struct Hashed<'a> {
    file: &'a mut File,
    checksum: &'a mut Option<Checksum>,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.file.write(bytes)?;
        if let Some(checksum) = self.checksum {
            checksum.update(&bytes[..count]);
        }
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
