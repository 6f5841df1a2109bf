//! Measures the time that steps spend in each stage.

use std::time::{Duration, Instant};

/// A stage of a step. The time of a layer's stage is the sum over all layers.
///
/// In steps of 64 rows or more, the time of an operation that is fused into a GEMM is measured as
/// the mean over the threads and counts for the operation's stage. In smaller steps it counts for
/// the GEMM's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Plan of the step, embedding, first norm, and removal of the rows without logits.
    Batch,
    /// GEMMs of queries, keys and values.
    Qkv,
    /// Biases, norms and rotary embedding of the heads, and writing to the KV store.
    Heads,
    /// Attention, and convolutions in its place.
    Attention,
    /// With recurrent layers: their convolution, the recurrence and the gates of its outputs, and
    /// the copies of states to checkpoints.
    Recurrence,
    /// GEMM of the output projection after attention.
    Output,
    /// With experts: the norm and GEMM of the router, the choice of experts, and packing of the
    /// rows of each expert.
    Route,
    /// GEMMs of the gate and up projections.
    GateUp,
    /// Gate function.
    Gate,
    /// GEMM of the down projection.
    Down,
    /// With per-layer embeddings: the gated projections of all layers.
    PerLayer,
    /// Both additions to the residual stream, and the norms after them.
    Residual,
    /// GEMM of the logits.
    Logits,
}

impl Stage {
    /// All stages, in the order of a step.
    pub const ALL: [Self; 13] = [
        Self::Batch,
        Self::Qkv,
        Self::Heads,
        Self::Attention,
        Self::Recurrence,
        Self::Output,
        Self::Route,
        Self::GateUp,
        Self::Gate,
        Self::Down,
        Self::PerLayer,
        Self::Residual,
        Self::Logits,
    ];
}

/// The total time that steps have spent in each stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTimes([Duration; Stage::ALL.len()]);

impl StageTimes {
    /// The time of one stage.
    #[must_use]
    pub fn of(&self, stage: Stage) -> Duration {
        self.0[stage as usize]
    }

    /// The sum of the times of all stages.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// The difference to `earlier`, stage by stage.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut times = self.0;
        for (time, before) in times.iter_mut().zip(earlier.0) {
            *time = time.saturating_sub(before);
        }
        Self(times)
    }
}

/// Adds up the times of stages. Each mark reads the clock once.
#[derive(Debug)]
pub(super) struct Profile {
    times: StageTimes,
    last: Instant,
}

impl Profile {
    pub(super) fn new() -> Self {
        Self { times: StageTimes::default(), last: Instant::now() }
    }

    /// Starts the clock at the start of a step.
    pub(super) fn begin(&mut self) {
        self.last = Instant::now();
    }

    /// Adds the time since the last mark to `stage`.
    pub(super) fn mark(&mut self, stage: Stage) {
        let now = Instant::now();
        self.times.0[stage as usize] += now - self.last;
        self.last = now;
    }

    /// Adds the time since the last mark to `stage`, except for `part` of it, which is added to
    /// `other`.
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

    /// Goal: each stage has its own time, and a difference contains only what was added.
    #[test]
    fn times_are_added_to_their_stage() {
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
