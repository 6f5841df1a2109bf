//! [`Restarts`]: when a failed generation is replaced, and when the engine gives up.

use std::time::Duration;

/// Number of failures in a row, without a step that was completed in between, after which the
/// engine gives up.
const FAILURES_MAX: u32 = 10;
/// Pause before the second restart in a row. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Maximum pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The failures since the last step that was completed.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    failures: u32,
    /// Number of completed steps at the last failure, since the engine started.
    steps: u64,
}

impl Restarts {
    /// Notes that a generation has failed, after `steps` completed steps since the engine started.
    /// Returns the pause before the next generation, none after a single failure.
    ///
    /// # Errors
    /// The number of failures in a row if the engine gives up.
    pub(super) fn after_failure(&mut self, steps: u64) -> Result<Duration, u32> {
        if steps > self.steps {
            self.failures = 0;
        }
        self.steps = steps;
        self.failures += 1;
        match self.failures {
            failures if failures >= FAILURES_MAX => Err(failures),
            1 => Ok(Duration::ZERO),
            failures => Ok((FIRST_PAUSE * (1 << (failures - 2))).min(PAUSE_MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: pauses grow with failures in a row until the engine gives up, and a completed step
    /// ends the row.
    #[test]
    fn pauses_grow_until_a_step_is_completed() {
        let mut restarts = Restarts::default();
        let ms = |pause| Ok(Duration::from_millis(pause));
        let pauses = [0, 50, 100, 200, 400, 800, 1600, 3200, 5000].map(ms);
        assert_eq!(pauses.map(|_| restarts.after_failure(7)), pauses);
        assert_eq!(restarts.after_failure(8), ms(0), "a step was completed");
        assert_eq!([1; 8].map(|_| restarts.after_failure(8)), pauses[1..]);
        assert_eq!(restarts.after_failure(8), Err(10));
    }
}
