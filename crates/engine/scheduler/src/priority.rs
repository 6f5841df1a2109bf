//! The priority of threads whose work no step waits for.

/// Niceness of such a thread, which then gets about a tenth of a core while all cores are busy.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;

/// Lowers the priority of the calling thread, for work that no step waits for. The threads of a step
/// wait for each other, so a core that is taken from one of them delays all requests.
///
/// Does nothing where the system knows only the priority of whole processes, or refuses it: then
/// only speed is lost. An unprivileged thread cannot take its former priority back.
pub fn yield_to_computing() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, NICENESS);
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Goal: only the calling thread is concerned.
    #[test]
    fn one_thread_yields() {
        let niceness = || rustix::process::getpriority_process(None).expect("a priority");
        let before = niceness();
        let yielding = std::thread::spawn(move || {
            yield_to_computing();
            niceness()
        });
        assert_eq!(yielding.join().expect("no panic"), NICENESS);
        assert_eq!(niceness(), before);
    }
}
