//! Which processors to compute on.
//!
//! A product uses the vector units of a core all the time, so a second thread on the same core adds
//! little, and an efficiency core makes the others wait. Memory of another socket is far away. So by
//! default there is one thread for each performance core of one socket, as far as the process may
//! use them. Only Linux says enough about processors; elsewhere all of them count.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

/// Where Linux describes the processors.
const SYSTEM: &str = "/sys/devices";
/// Largest number of a processor that is accepted in a list. This bounds the size of lists.
const CPU_MAX: usize = 1 << 16;
/// A core with less than this share of the capacity of the fastest one is an efficiency core.
const PERFORMANCE_SHARE: f64 = 0.75;

/// A logical processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cpu {
    /// Its number in the system.
    number: usize,
    /// The smallest number of the processors on the same core.
    core: usize,
    /// The smallest number of the memory nodes of the same socket.
    socket: usize,
    is_efficient: bool,
}

/// The processors that a process may use, the best first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Processors {
    /// Their numbers. Empty if the system does not tell.
    numbers: Vec<usize>,
    /// Number of processors to use if the caller does not ask for a number, at least 1.
    default_count: usize,
}

impl Processors {
    /// The processors of this process: those of its affinity mask, within the quota of its cgroup.
    pub(crate) fn of_process() -> Self {
        let quota = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match allowed() {
            Some(allowed) => Self::described(Path::new(SYSTEM), &allowed, quota),
            None => Self { numbers: Vec::new(), default_count: quota },
        }
    }

    /// The processors `allowed`, as `system` describes them. At most `quota` of them may be busy at
    /// a time.
    fn described(system: &Path, allowed: &[usize], quota: usize) -> Self {
        let mut cpus = read(system, allowed);
        let home = home(&cpus);
        let mut seen: HashMap<usize, usize> = HashMap::new();
        let mut ranks = HashMap::new();
        cpus.sort_by_key(|cpu| cpu.number);
        for cpu in &cpus {
            let sibling = seen.entry(cpu.core).or_default();
            ranks.insert(cpu.number, (cpu.is_efficient, *sibling, cpu.socket != home, cpu.socket));
            *sibling += 1;
        }
        cpus.sort_by_key(|cpu| (ranks[&cpu.number], cpu.number));
        let is_home = |cpu: &&Cpu| cpu.socket == home;
        let fast = cpus.iter().filter(is_home).filter(|cpu| !cpu.is_efficient).count();
        let of_home: Vec<&Cpu> =
            cpus.iter().filter(is_home).filter(|cpu| fast == 0 || !cpu.is_efficient).collect();
        let cores = of_home.iter().filter(|cpu| ranks[&cpu.number].1 == 0).count();
        // On a single core, the work that is not arithmetic can use the other thread.
        let count = if cores > 1 { cores } else { of_home.len() };
        let numbers = cpus.iter().map(|cpu| cpu.number).collect();
        Self { numbers, default_count: count.min(quota).max(1) }
    }

    pub(crate) fn default_count(&self) -> usize {
        self.default_count
    }

    /// A processor for each of `count` threads; `None` if there are not as many.
    pub(crate) fn for_threads(&self, count: usize) -> Option<&[usize]> {
        self.numbers.get(..count)
    }
}

/// The socket with the most performance cores.
fn home(cpus: &[Cpu]) -> usize {
    let mut cores: BTreeMap<usize, Vec<(bool, usize)>> = BTreeMap::new();
    for cpu in cpus {
        cores.entry(cpu.socket).or_default().push((!cpu.is_efficient, cpu.core));
    }
    let count = |cores: &mut Vec<(bool, usize)>| {
        cores.sort_unstable();
        cores.dedup();
        (cores.iter().filter(|(is_fast, _)| *is_fast).count(), cores.len())
    };
    let counts = cores.iter_mut().map(|(&socket, cores)| (count(cores), socket));
    // The first of equal ones.
    counts.rev().max_by_key(|&(count, _)| count).map_or(0, |(_, socket)| socket)
}

/// Reads the system's description of these processors. Where it says nothing, the machine is
/// assumed to have one socket with equal cores of one thread each.
fn read(system: &Path, allowed: &[usize]) -> Vec<Cpu> {
    let of_cpu = |number: usize| system.join(format!("system/cpu/cpu{number}"));
    let nodes = nodes(&system.join("system/node"));
    let node = |number: &usize| nodes.get(number).copied().unwrap_or(0);
    // A socket may have several nodes, and some virtual machines have many sockets in one node.
    let package = |number: &usize| -> Option<usize> {
        value(&of_cpu(*number).join("topology/physical_package_id"))
    };
    let mut first_node: HashMap<usize, usize> = HashMap::new();
    for number in allowed {
        if let Some(package) = package(number) {
            let first = first_node.entry(package).or_insert(usize::MAX);
            *first = node(number).min(*first);
        }
    }
    let efficient = list(&system.join("cpu_atom/cpus")).unwrap_or_default();
    let capacity = |number: &usize| value::<u32>(&of_cpu(*number).join("cpu_capacity"));
    let most = f64::from(allowed.iter().filter_map(capacity).max().unwrap_or(0));
    let cpu = |number: &usize| {
        let topology = of_cpu(*number).join("topology");
        let siblings = list(&topology.join("core_cpus_list"))
            .or_else(|| list(&topology.join("thread_siblings_list")));
        let is_slow = capacity(number).is_some_and(|own| f64::from(own) < PERFORMANCE_SHARE * most);
        Cpu {
            number: *number,
            core: siblings.and_then(|list| list.into_iter().min()).unwrap_or(*number),
            socket: package(number).map_or(node(number), |package| first_node[&package]),
            is_efficient: is_slow || efficient.contains(number),
        }
    };
    allowed.iter().map(cpu).collect()
}

/// The memory node of each processor.
fn nodes(folder: &Path) -> HashMap<usize, usize> {
    let mut nodes = HashMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let node = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
        let Some(node) = node else { continue };
        for number in list(&entry.path().join("cpulist")).unwrap_or_default() {
            nodes.insert(number, node);
        }
    }
    nodes
}

fn value<T: FromStr>(file: &Path) -> Option<T> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The numbers of a list such as `0-3,8`.
fn list(file: &Path) -> Option<Vec<usize>> {
    let text = fs::read_to_string(file).ok()?;
    let parts = text.trim().split(',').filter(|part| !part.is_empty());
    let range = |part: &str| -> Option<RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (last <= CPU_MAX).then_some(first..=last)
    };
    Some(parts.map(range).collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// The processors of this process's affinity mask; `None` if they are not known.
#[cfg(all(target_os = "linux", not(miri)))]
#[allow(unsafe_code, reason = "calls the operating system")]
fn allowed() -> Option<Vec<usize>> {
    // SAFETY: a set of zeros is empty. The call writes at most the size of the set to it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let failed = libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) != 0;
        (!failed).then_some(set)?
    };
    let count = 8 * size_of_val(&set);
    // SAFETY: the number is below the number of bits of the set.
    Some((0..count).filter(|&number| unsafe { libc::CPU_ISSET(number, &set) }).collect())
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn allowed() -> Option<Vec<usize>> {
    None
}

/// Lets the calling thread, and the threads that it starts, run only on these processors. Returns
/// whether the system has accepted this.
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "calls the operating system")]
pub(crate) fn bind(numbers: &[usize]) -> bool {
    if numbers.iter().any(|&number| number >= 8 * size_of::<libc::cpu_set_t>()) {
        return false;
    }
    // SAFETY: a set of zeros is empty. The numbers are below its number of bits. The call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        numbers.iter().for_each(|&number| libc::CPU_SET(number, &mut set));
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set) == 0
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn bind(_numbers: &[usize]) -> bool {
    false
}

#[cfg(all(test, not(loom)))]
mod tests;
