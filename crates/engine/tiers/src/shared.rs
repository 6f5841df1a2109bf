//! The common parts of the disk tier and the object tier: counters, locks, a measured speed, and
//! pauses after failures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a tier is not used after a failure.
pub(crate) const PAUSE: Duration = Duration::from_secs(5);

/// Time after which a speed should be measured again.
const MEASURE_INTERVAL: Duration = Duration::from_secs(30);

/// A count. It guards no other memory, so all accesses are relaxed.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bytes per second of recent transfers.
#[derive(Debug)]
pub(crate) struct Speed(Mutex<Recent>);

#[derive(Debug)]
struct Recent {
    bytes_per_second: f64,
    measured: bool,
    /// When it was last measured, or when a caller was last asked to measure it.
    at: Option<Instant>,
}

impl Speed {
    /// The speed that is assumed before the first transfer.
    pub(crate) fn assumed(bytes_per_second: f64) -> Speed {
        Speed(Mutex::new(Recent { bytes_per_second, measured: false, at: None }))
    }

    /// Takes a transfer into account.
    pub(crate) fn note(&self, bytes: u64, time: Duration) {
        let now = bytes as f64 / time.as_secs_f64().max(1e-9);
        let mut recent = lock(&self.0);
        let before = if recent.measured { recent.bytes_per_second } else { now };
        let bytes_per_second = 0.7 * before + 0.3 * now;
        *recent = Recent { bytes_per_second, measured: true, at: Some(Instant::now()) };
    }

    /// Whether there was a transfer.
    #[cfg(feature = "object-store")]
    pub(crate) fn is_measured(&self) -> bool {
        lock(&self.0).measured
    }

    /// Whether the caller should transfer something only to measure the speed, because it was not
    /// measured for [`MEASURE_INTERVAL`]. True for at most one caller in that time.
    pub(crate) fn is_due(&self) -> bool {
        self.is_due_at(Instant::now())
    }

    fn is_due_at(&self, now: Instant) -> bool {
        let mut recent = lock(&self.0);
        let due = recent.at.is_none_or(|at| now.saturating_duration_since(at) > MEASURE_INTERVAL);
        if due {
            recent.at = Some(now);
        }
        due
    }

    /// The time that this many bytes take.
    pub(crate) fn time_of(&self, bytes: usize) -> Duration {
        let speed = lock(&self.0).bytes_per_second.max(1.0);
        Duration::from_secs_f64((bytes as f64 / speed).min(1e6))
    }
}

/// The time that recent requests took.
#[cfg(feature = "object-store")]
#[derive(Debug)]
pub(crate) struct Latency(Mutex<Duration>);

#[cfg(feature = "object-store")]
impl Latency {
    /// The time that is assumed before the first request.
    pub(crate) fn assumed(time: Duration) -> Latency {
        Latency(Mutex::new(time))
    }

    /// Takes a request into account.
    pub(crate) fn note(&self, time: Duration) {
        let mut recent = lock(&self.0);
        *recent = recent.mul_f64(0.7) + time.mul_f64(0.3);
    }

    pub(crate) fn get(&self) -> Duration {
        *lock(&self.0)
    }
}

/// Whether there was a failure within the last [`PAUSE`].
#[derive(Debug, Default)]
pub(crate) struct Pause(Mutex<Option<Instant>>);

impl Pause {
    pub(crate) fn begin(&self) {
        *lock(&self.0) = Some(Instant::now() + PAUSE);
    }

    pub(crate) fn is_on(&self) -> bool {
        lock(&self.0).is_some_and(|until| Instant::now() < until)
    }
}

/// Ignores poisoning: every change under the locks of this crate is complete or has not begun.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_is_measured_again_after_a_while() {
        let speed = Speed::assumed(50e6);
        let now = Instant::now();
        assert!(speed.is_due_at(now), "it was never measured");
        assert!(!speed.is_due_at(now + MEASURE_INTERVAL), "somebody measures it");
        speed.note(1_000, Duration::from_secs(1));
        assert_eq!(speed.time_of(500), Duration::from_millis(500));
        assert!(!speed.is_due_at(Instant::now()));
        let later = Instant::now() + 2 * MEASURE_INTERVAL;
        assert!(speed.is_due_at(later) && !speed.is_due_at(later));
    }
}
