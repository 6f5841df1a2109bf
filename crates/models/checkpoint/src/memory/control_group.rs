//! Computes how much memory Linux control groups leave for this process.
//!
//! A process is in one group of each hierarchy, and the limit of each ancestor of the group applies
//! to all processes below that ancestor together. `/proc/self/cgroup` names the group, and
//! `/proc/self/mountinfo` says where its directory is. In a container, the mount often begins at
//! the container's own group. A system may have both versions of control groups.

use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

/// The number of bytes that the process can allocate before one of its groups reaches its limit;
/// `None` if no limit is known. Cached files count as free. `root` is the root directory of the
/// system's files, which is `/` except in tests.
pub(crate) fn room(root: &Path) -> Option<u64> {
    let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let mounts = mounts.lines().filter_map(Mount::parse);
    mounts.flat_map(|mount| mount.rooms(root, &groups)).min()
}

/// The version of a hierarchy of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A mounted hierarchy that may limit memory.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group whose directory is mounted, as a path in the format of `/proc/self/cgroup`.
    group: PathBuf,
    /// The mount point, relative to the root of the system's files.
    point: PathBuf,
}

impl Mount {
    /// Parses a line of `/proc/self/mountinfo`; `None` for all other file systems.
    fn parse(line: &str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        // The fields are the type of file system, the source, and the options, which list the
        // controllers.
        let mut fields = file_system.split(' ');
        let version = match (fields.next()?, fields.nth(1)?) {
            ("cgroup2", _) => Version::Two,
            ("cgroup", options) if has_memory(options) => Version::One,
            _ => return None,
        };
        let mut fields = mount.split(' ').skip(3).map(unescaped);
        let (group, point) = (fields.next()?, fields.next()?);
        let point = point.trim_start_matches('/').into();
        Some(Self { version, group: group.into(), point })
    }

    /// The memory in bytes that is left by each of the process's group and its ancestors whose
    /// directories are mounted.
    fn rooms(&self, root: &Path, groups: &str) -> Vec<u64> {
        let Some(group) = self.version.group(groups) else { return Vec::new() };
        // A group that is not below the mounted one has no directory here. The mounted group is
        // then the best guess, because it is the group of the container.
        let is_normal = |path: &&Path| path.components().all(|c| matches!(c, Component::Normal(_)));
        let below = Path::new(group).strip_prefix(&self.group).ok().filter(is_normal);
        let point = root.join(&self.point);
        let directories = below.unwrap_or(Path::new("")).ancestors().map(|below| point.join(below));
        let counting = directories.enumerate().take_while(|(distance, directory)| {
            *distance == 0 || self.version.counts_children(directory)
        });
        counting.filter_map(|(_, directory)| self.version.room(&directory)).collect()
    }
}

impl Version {
    /// The process's group, from the lines `id:controllers:group` of `/proc/self/cgroup`.
    fn group(self, groups: &str) -> Option<&str> {
        groups.lines().find_map(|line| {
            let (id, rest) = line.split_once(':')?;
            let (controllers, group) = rest.split_once(':')?;
            let is_own = match self {
                Self::One => has_memory(controllers),
                Self::Two => id == "0" && controllers.is_empty(),
            };
            is_own.then_some(group)
        })
    }

    /// Whether the limit of a group applies to the groups below it.
    fn counts_children(self, directory: &Path) -> bool {
        match self {
            // In older kernels, this can be switched off.
            Self::One => number(&directory.join("memory.use_hierarchy")) != Some(0),
            Self::Two => true,
        }
    }

    /// The limit of a group minus the memory that its processes use; `None` without a limit.
    fn room(self, directory: &Path) -> Option<u64> {
        let number = |name: &str| number(&directory.join(name));
        let (limit, used, cached) = match self {
            Self::One => (
                number("memory.limit_in_bytes"),
                number("memory.usage_in_bytes"),
                &["total_active_file", "total_inactive_file"][..],
            ),
            // Above `high`, processes are not killed, but throttled until they make almost no
            // progress.
            Self::Two => (
                [number("memory.max"), number("memory.high")].into_iter().flatten().min(),
                number("memory.current"),
                &["active_file", "inactive_file", "slab_reclaimable"][..],
            ),
        };
        let statistics = read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let entries = statistics.lines().filter_map(|line| line.split_once(' '));
        let cached = entries.filter(|(name, _)| cached.contains(name));
        let cached: u64 = cached.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum();
        Some(limit?.saturating_sub(used.unwrap_or_default().saturating_sub(cached)))
    }
}

/// Whether a list of controllers includes the memory controller.
fn has_memory(controllers: &str) -> bool {
    controllers.split(',').any(|controller| controller == "memory")
}

/// The number in a file; `None` if it has another value, such as `max`, which means no limit.
fn number(file: &Path) -> Option<u64> {
    read_to_string(file).ok()?.trim().parse().ok()
}

/// Unescapes a path of `/proc/self/mountinfo`, which has white space and `\` as octal numbers.
fn unescaped(field: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(field.to_owned(), |path, (escaped, character)| path.replace(escaped, character))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;
    const V2: &str = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    const V1: &str = "31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    /// Checks the result for a system with the files `groups` and `mounts` in `/proc/self`, and
    /// with `files` below `/sys/fs/cgroup`.
    fn check(groups: &str, mounts: &str, files: &[(&str, String)], expected: Option<u64>) {
        let root = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().expect("a directory")).expect("created");
            fs::write(file, text).expect("written");
        };
        let mounts = format!("22 1 254:0 / / rw - ext4 /dev/vda rw\n{mounts}");
        write("proc/self/cgroup", groups);
        write("proc/self/mountinfo", &mounts);
        files.iter().for_each(|(path, text)| write(&format!("sys/fs/cgroup/{path}"), text));
        assert_eq!(room(root.path()), expected, "{groups} {mounts} {files:?}");
    }

    /// A file with a number of MiB, in the format of the kernel.
    fn mib(path: &str, number: u64) -> (&str, String) {
        (path, format!("{}\n", number * MIB))
    }

    /// Goal: the process's own group and each of its ancestors limit it, and no other group does.
    #[test]
    fn every_ancestor_limits_a_process() {
        let group = "0::/user.slice/service/worker\n";
        let unlimited = ("user.slice/service/worker/memory.max", "max\n".to_owned());
        let other = mib("user.slice/other/memory.max", 1);
        check(group, V2, &[unlimited.clone(), other.clone()], None);
        for ancestor in ["user.slice/service/worker", "user.slice/service", "user.slice"] {
            let limit = format!("{ancestor}/memory.max");
            let files = [unlimited.clone(), other.clone(), mib(&limit, 400)];
            check(group, V2, &files, Some(400 * MIB));
            let used = format!("{ancestor}/memory.current");
            check(group, V2, &[mib(&limit, 400), mib(&used, 150)], Some(250 * MIB));
        }
        // The result is the least memory that is left, which does not have to be the least limit.
        let files = [
            mib("user.slice/memory.max", 900),
            mib("user.slice/memory.current", 800),
            mib("user.slice/service/memory.max", 400),
            mib("user.slice/service/memory.current", 10),
            mib("user.slice/service/worker/memory.high", 300),
        ];
        check(group, V2, &files, Some(100 * MIB));
        check(group, V2, &files[2..], Some(300 * MIB));
    }

    /// Goal: groups of version 1 are found in the hierarchy of the memory controller, and an
    /// ancestor that does not count its children does not limit them.
    #[test]
    fn groups_of_version_1_limit_a_process() {
        let groups = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/ab\n0::/\n";
        let files = [
            mib("memory/memory.limit_in_bytes", 1 << 43),
            mib("memory/docker/memory.limit_in_bytes", 500),
            mib("memory/docker/ab/memory.limit_in_bytes", 700),
            mib("cpu/elsewhere/memory.limit_in_bytes", 1),
            ("memory/docker/memory.use_hierarchy", "0\n".to_owned()),
        ];
        check(groups, V1, &files[..4], Some(500 * MIB));
        check(groups, V1, &files, Some(700 * MIB));
        check(groups, &format!("{V1}{V2}"), &files[..4], Some(500 * MIB));
        check("4:cpu:/docker/ab\n", V1, &files, None);
        let used = mib("memory/docker/ab/memory.usage_in_bytes", 650);
        check(groups, V1, &[files[2].clone(), used], Some(50 * MIB));
    }

    /// Goal: in a container, where the group's own directory is mounted or names are relative to
    /// it, the limit of the container's group is found.
    #[test]
    fn groups_of_containers_limit_a_process() {
        let limit = mib("memory.max", 400);
        let of_container = V2.replace("0:26 / ", "0:26 /docker/a\\040b ");
        for (groups, mounts) in [
            ("0::/\n", V2),
            ("0::/docker/a b\n", of_container.as_str()),
            // A process that another container's program has started is in none of the mounted
            // groups.
            ("0::/../other\n", V2),
            ("0::/other\n", &of_container),
        ] {
            check(groups, mounts, std::slice::from_ref(&limit), Some(400 * MIB));
        }
        let files = [limit, mib("docker/a b/memory.max", 1), mib("inner/memory.max", 300)];
        check("0::/docker/a b/inner\n", &of_container, &files, Some(300 * MIB));
    }

    /// Goal: cached files count as free. Without statistics, nothing counts as free.
    #[test]
    fn cached_files_count_as_free() {
        let statistics = |prefix: &str| {
            let of = |name: &str, mib: u64| format!("{prefix}{name} {}\n", mib * MIB);
            of("anon", 100) + &of("active_file", 40) + &of("inactive_file", 60)
        };
        let two = [mib("a/memory.max", 400), mib("a/memory.current", 250)];
        let stat = ("a/memory.stat", format!("{}slab_reclaimable {MIB}\n", statistics("")));
        check("0::/a\n", V2, &two, Some(150 * MIB));
        check("0::/a\n", V2, &[&two[..], &[stat]].concat(), Some(251 * MIB));
        let one = [
            mib("memory/a/memory.limit_in_bytes", 400),
            mib("memory/a/memory.usage_in_bytes", 250),
            ("memory/a/memory.stat", statistics("total_")),
        ];
        check("4:memory:/a\n", V1, &one, Some(250 * MIB));
        // The limit was lowered below the memory in use.
        check("0::/a\n", V2, &[mib("a/memory.max", 4), two[1].clone()], Some(0));
    }

    /// Goal: a system without control groups, or with files that cannot be parsed, has no limit.
    #[test]
    fn what_is_not_understood_is_no_limit() {
        check("", V2, &[mib("memory.max", 4)], None);
        check("0::/a\n", "", &[mib("a/memory.max", 4)], None);
        check("nonsense\n0\n::\n", V2, &[mib("memory.max", 4)], None);
        check("0::/a\n", "1 - cgroup2\nx - cgroup2 a b\n", &[mib("a/memory.max", 4)], None);
        check("0::/a\n", V2, &[("a/memory.max", "many\n".to_owned())], None);
        assert_eq!(room(Path::new("/nowhere")), None);
    }
}
