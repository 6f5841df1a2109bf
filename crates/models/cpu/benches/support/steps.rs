//! The steps of the benchmarks: sequences of batches, and their times.

use std::time::{Duration, Instant};

use stolon_backend::{Backend, BackendSpec, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_cpu::CpuBackend;
use stolon_kvcache::BlockId;

/// Number of positions of a prompt, and of cached positions when decoding is measured.
pub(crate) const CONTEXT: usize = 512;

/// One sequence of a batch: `count` tokens from position `start` on, with its own blocks and, if the
/// model has recurrent layers, its own state.
pub(crate) fn slice(
    sequence: usize,
    start: usize,
    count: usize,
    spec: &BackendSpec,
) -> SequenceSlice {
    let blocks = (2 * CONTEXT).div_ceil(spec.block_size);
    let first = (sequence * blocks) as u32;
    SequenceSlice {
        token_count: count,
        start,
        write_from: start,
        block_table: (first..first + blocks as u32).map(BlockId).collect(),
        logit_rows: LogitRows::Last,
        state: spec.state.map(|_| SliceState::in_slot(sequence as u32)),
        ..SequenceSlice::default()
    }
}

/// The median times of the steps in seconds, measured by turns for about `time`.
pub(crate) fn step_times<const N: usize>(
    backend: &mut CpuBackend,
    batches: [&StepBatch; N],
    time: Duration,
) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    let start = Instant::now();
    loop {
        for (batch, times) in batches.into_iter().zip(&mut times) {
            let begun = Instant::now();
            let output = backend.step(batch).expect("a valid batch");
            times.push(begun.elapsed().as_secs_f64());
            assert!(!output.logits.is_empty());
        }
        if start.elapsed() >= time && times[0].len() > 2 {
            return times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
        }
    }
}
