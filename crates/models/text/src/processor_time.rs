//! The processor time of a thread: [`OwnTime`] of the calling one, [`ProcessorTime`] of any. Limits on
//! work are limits on this time, because the time by the clock depends on the other load of the machine.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::time::{Duration, Instant};

/// The file in which Linux reports the processor time of the thread that opens it, in nanoseconds.
const STATISTICS: &str = "/proc/thread-self/schedstat";

/// Processor time of the calling thread since it began to measure. This is exact, and takes less than a
/// microsecond.
#[cfg(feature = "grammar")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnTime(Duration);

#[cfg(feature = "grammar")]
impl OwnTime {
    /// Begins to measure the calling thread.
    pub(crate) fn start() -> Self {
        Self(own_time())
    }

    /// Processor time since the measurement began, on the thread that began it. Where the system does
    /// not report it, the time that has passed.
    pub(crate) fn spent(self) -> Duration {
        own_time().saturating_sub(self.0)
    }
}

/// Processor time of the calling thread so far.
#[cfg(all(unix, feature = "grammar"))]
fn own_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Where the clock of a thread is not known: the time since the first call.
#[cfg(all(not(unix), feature = "grammar"))]
fn own_time() -> Duration {
    static FIRST: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}

/// Measures the processor time of one thread, also from other threads.
#[derive(Debug)]
pub(crate) struct ProcessorTime {
    /// [`STATISTICS`]; `None` if the system does not have it.
    statistics: Option<File>,
    /// When the measurement began.
    begun: Instant,
    /// Processor time of the thread when the measurement began.
    before: Duration,
}

impl ProcessorTime {
    /// Begins to measure the calling thread.
    pub(crate) fn of_this_thread() -> Self {
        let statistics = File::open(STATISTICS).ok();
        let before = statistics.as_ref().and_then(read).unwrap_or_default();
        Self { statistics, begun: Instant::now(), before }
    }

    /// Processor time of the thread since the measurement began, some milliseconds behind. If the
    /// system does not report it, or reports 0, the time that has passed.
    pub(crate) fn spent(&self) -> Duration {
        let passed = self.begun.elapsed();
        let now = self.statistics.as_ref().and_then(read).filter(|now| !now.is_zero());
        now.map_or(passed, |now| now.saturating_sub(self.before))
    }
}

/// The first number of the file. `None` after the thread has ended.
fn read(mut file: &File) -> Option<Duration> {
    let mut text = [0; 64];
    file.seek(SeekFrom::Start(0)).ok()?;
    let len = file.read(&mut text).ok()?;
    let number = text[..len].split(|byte| !byte.is_ascii_digit()).next()?;
    Some(Duration::from_nanos(std::str::from_utf8(number).ok()?.parse().ok()?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Goal: seen from another thread, the processor time of a thread that computes increases, and
    /// that of a thread that waits does not.
    #[test]
    fn only_work_counts() {
        #[cfg(feature = "grammar")]
        {
            let own = OwnTime::start();
            thread::sleep(Duration::from_millis(50));
            assert!(own.spent() < Duration::from_millis(25), "{:?}", own.spent());
            while own.spent() < Duration::from_millis(30) {}
        }
        let (working_sender, working) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            let _ = working_sender.send(ProcessorTime::of_this_thread());
            while ended.try_recv() == Err(mpsc::TryRecvError::Empty) {}
        });
        let (waiting_sender, waiting) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let waiter = thread::spawn(move || {
            let _ = waiting_sender.send(ProcessorTime::of_this_thread());
            let _ = released.recv();
        });
        let (working, waiting) =
            (working.recv().expect("a clock"), waiting.recv().expect("a clock"));
        let spent = Duration::from_millis(300);
        while working.spent() < spent {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(waiting.spent() < spent / 3, "{:?}", waiting.spent());
        drop((end, release));
        worker.join().expect("no panic");
        waiter.join().expect("no panic");
    }
}
