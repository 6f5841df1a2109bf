//! Where a step's time goes, stage by stage.

use std::time::{Duration, Instant};

/// A part of a step. Stages of layers count over all layers.
///
/// What is done to sums of a product before they leave the cache counts as the stage that it is, by the
/// threads' mean time, in steps of 64 rows or more; in smaller ones it counts as the product's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Row by row plan of the batch, embedding, first norm, rows that get no logits taken out.
    Batch,
    /// Products for queries, keys and values.
    Qkv,
    /// Biases, norms and rotation of heads; keys and values into the cache.
    Heads,
    /// Attention.
    Attention,
    /// Product after attention.
    Output,
    /// Products of gate and up.
    GateUp,
    /// Gate function.
    Gate,
    /// Product of down.
    Down,
    /// Both additions to the residual stream, and the norms after them.
    Residual,
    /// Product for logits.
    Logits,
}

impl Stage {
    /// All stages, in the order of a step.
    pub const ALL: [Self; 10] = [
        Self::Batch,
        Self::Qkv,
        Self::Heads,
        Self::Attention,
        Self::Output,
        Self::GateUp,
        Self::Gate,
        Self::Down,
        Self::Residual,
        Self::Logits,
    ];
}

/// Time taken by each stage of all steps so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes([Duration; Stage::ALL.len()]);

impl StageTimes {
    /// Of one stage.
    #[must_use]
    pub fn of(&self, stage: Stage) -> Duration {
        self.0[stage as usize]
    }

    /// Of all.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// What was added since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut times = self.0;
        for (time, before) in times.iter_mut().zip(earlier.0) {
            *time = time.saturating_sub(before);
        }
        Self(times)
    }
}

/// Adds up stage times. A mark costs one reading of the clock.
#[derive(Debug)]
pub(super) struct Profile {
    times: StageTimes,
    last: Instant,
}

impl Profile {
    pub(super) fn new() -> Self {
        Self { times: StageTimes::default(), last: Instant::now() }
    }

    /// A step begins.
    pub(super) fn begin(&mut self) {
        self.last = Instant::now();
    }

    /// What ran since the last mark was this stage's.
    pub(super) fn mark(&mut self, stage: Stage) {
        let now = Instant::now();
        self.times.0[stage as usize] += now - self.last;
        self.last = now;
    }

    /// What ran since the last mark was this stage's, but for `part` of it, which was another's.
    pub(super) fn mark_with(&mut self, stage: Stage, part: Duration, other: Stage) {
        self.mark(stage);
        let part = part.min(self.times.0[stage as usize]);
        self.times.0[stage as usize] -= part;
        self.times.0[other as usize] += part;
    }

    pub(super) fn times(&self) -> StageTimes {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every stage has its own place, and differences are of each stage.
    #[test]
    fn times_add_up() {
        let mut profile = Profile::new();
        let mut before = profile.times();
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
            std::thread::sleep(Duration::from_micros(50));
            profile.mark(stage);
            let added = profile.times().since(&before);
            assert!(added.of(stage) >= Duration::from_micros(50));
            assert_eq!(added.total(), added.of(stage));
            before = profile.times();
        }
    }
}
