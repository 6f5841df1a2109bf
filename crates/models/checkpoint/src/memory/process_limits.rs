//! Computes how much memory this process's own limits leave. `ulimit -v` and `ulimit -d` set them.

use std::fs::read_to_string;
use std::path::Path;

/// The limits in `/proc/self/limits`, each with the line of `/proc/self/status` that states the
/// memory in use: all mapped memory, and memory that is mapped for writing.
const LIMITS: [(&str, &str); 2] = [("Max address space", "VmSize:"), ("Max data size", "VmData:")];

/// The number of bytes that the process can still map for writing; `None` without a limit. `root`
/// is the root directory of the system's files, which is `/` except in tests.
pub(crate) fn room(root: &Path) -> Option<u64> {
    let limits = read_to_string(root.join("proc/self/limits")).ok()?;
    let status = read_to_string(root.join("proc/self/status")).ok()?;
    let rooms = LIMITS.iter().filter_map(|(limit, used)| {
        // The first number is the soft limit, which is in force. `unlimited` is not a number.
        let limit = first_number(&limits, limit)?;
        Some(limit.saturating_sub(first_number(&status, used)?.saturating_mul(1024)))
    });
    rooms.min()
}

/// The first word of the line that begins with `name`, if it is a number.
fn first_number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the tighter of the two limits applies, minus the memory in use.
    #[test]
    fn the_tighter_limit_counts() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(room(root.path()), None, "another system");
        let directory = root.path().join("proc/self");
        std::fs::create_dir_all(&directory).expect("created");
        let status = "VmPeak:\t 9 kB\nVmSize:\t    2000 kB\nVmData:\t     500 kB\n";
        std::fs::write(directory.join("status"), status).expect("written");
        for (address_space, data, expected) in [
            ("unlimited", "unlimited", None),
            ("3072000", "unlimited", Some(1000 << 10)),
            ("unlimited", "1024000", Some(500 << 10)),
            ("3072000", "1024000", Some(500 << 10)),
            ("1024", "1024000", Some(0)),
        ] {
            let limits = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max data size             {data:<20} unlimited            bytes     \n\
                 Max address space         {address_space:<20} 1                    bytes     \n"
            );
            std::fs::write(directory.join("limits"), limits).expect("written");
            assert_eq!(room(root.path()), expected, "{address_space} {data}");
        }
    }
}
