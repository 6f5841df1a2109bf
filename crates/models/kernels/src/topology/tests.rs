//! Processors of well-known machines, described as Linux describes them.

use super::*;

/// A description of processors in a temporary folder.
struct Machine {
    folder: tempfile::TempDir,
    count: usize,
}

impl Machine {
    /// A machine with `count` processors. Processor `n` is on the core and in the socket that
    /// `place(n)` returns.
    fn new(count: usize, place: impl Fn(usize) -> (usize, usize)) -> Self {
        let machine = Self { folder: tempfile::tempdir().expect("a folder"), count };
        let core = |number: usize| place(number);
        for number in 0..count {
            let siblings: Vec<String> = (0..count)
                .filter(|&other| core(other) == core(number))
                .map(|other| other.to_string())
                .collect();
            let topology = format!("system/cpu/cpu{number}/topology");
            machine.write(&format!("{topology}/core_cpus_list"), &siblings.join(","));
            let socket = place(number).1.to_string();
            machine.write(&format!("{topology}/physical_package_id"), &socket);
        }
        machine
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.folder.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, format!("{text}\n")).expect("written");
    }

    fn node(self, node: usize, cpus: &str) -> Self {
        self.write(&format!("system/node/node{node}/cpulist"), cpus);
        self
    }

    /// The processors of a process that may use all of them.
    fn all(&self) -> Processors {
        self.of(&(0..self.count).collect::<Vec<_>>(), self.count)
    }

    fn of(&self, allowed: &[usize], quota: usize) -> Processors {
        Processors::described(self.folder.path(), allowed, quota)
    }
}

/// The processors that are used by default.
fn used(processors: &Processors) -> Vec<usize> {
    processors.for_threads(processors.default_count()).expect("as many").to_vec()
}

/// Goal: equal cores with one thread are all used, as far as the process may use them.
#[test]
fn cores_with_one_thread_are_all_used() {
    let machine = Machine::new(4, |number| (number, 0));
    assert_eq!(used(&machine.all()), [0, 1, 2, 3]);
    assert_eq!(used(&machine.of(&[1, 3], 2)), [1, 3]);
    assert_eq!(used(&machine.of(&[0, 1, 2, 3], 2)), [0, 1], "the quota of a container");
}

/// Goal: each core is used by one thread, also if the system numbers the threads of a core one after
/// the other; a machine with one core uses both of its threads.
#[test]
fn a_core_is_used_once() {
    let desktop = Machine::new(16, |number| (number % 8, 0));
    assert_eq!(used(&desktop.all()), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(desktop.all().for_threads(16).map(<[usize]>::len), Some(16));
    assert_eq!(desktop.all().for_threads(17), None);
    let cloud = Machine::new(8, |number| (number / 2, 0));
    assert_eq!(used(&cloud.all()), [0, 2, 4, 6]);
    assert_eq!(used(&cloud.of(&[0, 1, 2], 3)), [0, 2]);
    assert_eq!(used(&cloud.of(&[6, 7], 2)), [6, 7]);
}

/// Goal: efficiency cores are not used, whether the system names them or only says how fast they
/// are, unless a process may use no others.
#[test]
fn efficiency_cores_are_left_out() {
    // Six performance cores with two threads each, and four efficiency cores.
    let laptop = Machine::new(16, |number| (if number < 12 { number / 2 } else { number }, 0));
    laptop.write("cpu_atom/cpus", "12-15");
    assert_eq!(used(&laptop.all()), [0, 2, 4, 6, 8, 10]);
    assert_eq!(used(&laptop.of(&[12, 13, 14], 3)), [12, 13, 14]);
    let phone = Machine::new(8, |number| (number, 0));
    for (number, capacity) in [300, 300, 300, 300, 850, 850, 850, 1024].into_iter().enumerate() {
        phone.write(&format!("system/cpu/cpu{number}/cpu_capacity"), &capacity.to_string());
    }
    assert_eq!(used(&phone.all()), [4, 5, 6, 7]);
}

/// Goal: one socket is used, with all of its memory nodes: the one with the most cores that the
/// process may use.
#[test]
fn one_socket_is_used() {
    let place = |number: usize| (number % 64, number % 64 / 32);
    let server = || Machine::new(128, place).node(0, "0-31,64-95").node(1, "32-63,96-127");
    assert_eq!(used(&server().all()), (0..32).collect::<Vec<_>>());
    let second: Vec<usize> = (24..64).collect();
    assert_eq!(used(&server().of(&second, 40)), (32..64).collect::<Vec<_>>());
    // The cores of the other socket are used before a core is used twice.
    assert_eq!(server().all().for_threads(65).map(|all| all[63..].to_vec()), Some(vec![63, 64]));
    let divided = Machine::new(64, |number| (number, number / 32));
    let divided = (0..8).fold(divided, |machine, node| {
        machine.node(node, &format!("{}-{}", node * 8, node * 8 + 7))
    });
    assert_eq!(used(&divided.all()), (0..32).collect::<Vec<_>>());
    // Some virtual machines say that each of their cores is a socket.
    let virtual_machine = Machine::new(8, |number| (number, number)).node(0, "0-7");
    assert_eq!(used(&virtual_machine.all()), (0..8).collect::<Vec<_>>());
}

/// Goal: nothing and nonsense in place of the description count as equal cores.
#[test]
fn unknown_machines_use_all_processors() {
    let bare = Machine::new(0, |number| (number, 0));
    assert_eq!(used(&bare.of(&[0, 1, 2, 3], 4)), [0, 1, 2, 3]);
    let wrong = Machine::new(4, |number| (number, 0)).node(0, "3-0,x");
    for file in ["core_cpus_list", "thread_siblings_list", "physical_package_id"] {
        wrong.write(&format!("system/cpu/cpu1/topology/{file}"), "0-99999999999999999999");
    }
    wrong.write("cpu_atom/cpus", "0-4000000000");
    wrong.write("system/cpu/cpu2/cpu_capacity", "-1");
    assert_eq!(used(&wrong.all()), [0, 1, 2, 3]);
    assert_eq!(bare.of(&[], 1), Processors { numbers: Vec::new(), default_count: 1 });
}

/// Goal: a thread can be bound to a processor of this process, and to no other.
#[cfg(target_os = "linux")]
#[test]
fn threads_are_bound() {
    let processors = Processors::of_process();
    let count = processors.default_count();
    let mut mine = processors.for_threads(count).expect("as many").to_vec();
    mine.sort_unstable();
    std::thread::spawn(move || {
        assert!(bind(&mine));
        assert_eq!(allowed().as_ref(), Some(&mine));
        assert!(bind(&mine[..1]));
        assert_eq!(allowed(), Some(mine[..1].to_vec()));
        assert!(!bind(&[1 << 20]) && !bind(&[]));
    })
    .join()
    .expect("bound");
}
