//! The recurrence of Gated DeltaNet over the tokens of all slices, and the copies of states that
//! become checkpoints.

use stolon_kernels::{Buffer, Path, Recurrence, Rule, StridedRows};

use super::prepare::copy_inputs;
use super::{DeltaNet, DeltaNetBuffers};
use crate::config::DeltaNetConfig;
use crate::decoder::plan::SliceRows;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// One value head of one slice.
struct HeadTask<'a> {
    slice: &'a SliceRows<'a>,
    head: usize,
    /// The state of the head.
    state: &'a mut [f32],
    /// `[tokens, value_dim]`.
    outputs: &'a mut [f32],
    /// Where the state is copied to at each checkpoint of the slice.
    copies: Vec<&'a mut [f32]>,
}

impl DeltaNet {
    /// Computes the recurrence of all slices: their outputs, and the states after them. States at
    /// checkpoints are copied to `copies`.
    pub(super) fn recur(
        &self,
        path: Path,
        buffers: &mut DeltaNetBuffers,
        slices: &[SliceRows<'_>],
        (states, copies): (&mut [&mut [f32]], &mut StateCopies<'_>),
        workers: &Workers,
    ) {
        let config = &self.config;
        let DeltaNetBuffers { convolved, factors, outputs, .. } = buffers;
        let mut tasks = Vec::with_capacity(slices.len() * config.value_heads);
        let mut outputs = &mut outputs[..];
        let mut copies = copies.values.slice_mut::<f32>().chunks_exact_mut(config.state_len());
        for (slice, state) in slices.iter().zip(states) {
            let (own, rest) = outputs.split_at_mut(slice.tokens * config.value_width());
            outputs = rest;
            let heads = state[config.inputs_len()..].chunks_exact_mut(config.head_len());
            let parts = heads.zip(own.chunks_exact_mut(slice.tokens * config.value_dim));
            let first_task = tasks.len();
            tasks.extend(parts.enumerate().map(|(head, (state, outputs))| HeadTask {
                slice,
                head,
                state,
                outputs,
                copies: Vec::new(),
            }));
            for copy in copies.by_ref().take(slice.checkpoints.len()) {
                let heads = copy[config.inputs_len()..].chunks_exact_mut(config.head_len());
                let tasks = tasks[first_task..].iter_mut();
                tasks.zip(heads).for_each(|(task, copy)| task.copies.push(copy));
            }
        }
        let work = slices.iter().map(|slice| slice.tokens).sum::<usize>();
        let work = 4 * work * config.value_heads * config.head_len();
        let (convolved, factors) = (&convolved[..], &factors[..]);
        workers.run_work(tasks.into_iter(), work, |task| {
            recur_head(path, config, (convolved, factors), task);
        });
    }
}

/// Computes one task, in parts that end at checkpoints. `inputs` are the rows of all slices,
/// `[rows, channels]` and `[rows, 2, value_heads]`.
fn recur_head(
    path: Path,
    config: &DeltaNetConfig,
    (convolved, factors): (&[f32], &[f32]),
    task: HeadTask<'_>,
) {
    let HeadTask { slice, head, state, mut outputs, copies } = task;
    let (channels, heads) = (config.channels(), config.value_heads);
    let key = config.key_head(head) * config.key_dim;
    let value = 2 * config.key_width() + head * config.value_dim;
    let mut copies = copies.into_iter();
    let ends = slice.checkpoints.iter().map(|(tokens, _)| *tokens).chain([slice.tokens]);
    let mut start = 0;
    for end in ends {
        let tokens = end - start;
        if tokens > 0 {
            let row = slice.first + start;
            let rows = |at: usize| StridedRows {
                values: &convolved[row * channels + at..],
                stride: channels,
            };
            let of_head = |at: usize| StridedRows {
                values: &factors[row * 2 * heads + at..],
                stride: 2 * heads,
            };
            let (own, rest) = outputs.split_at_mut(tokens * config.value_dim);
            outputs = rest;
            let recurrence = Recurrence {
                path,
                rule: Rule::Delta,
                tokens,
                key_dim: config.key_dim,
                value_dim: config.value_dim,
                queries: rows(key),
                keys: rows(config.key_width() + key),
                values: rows(value),
                decays: of_head(head),
                strengths: of_head(heads + head),
            };
            recurrence.run(state, own);
        }
        if let Some(copy) = copies.next() {
            copy.copy_from_slice(state);
        }
        start = end;
    }
}

/// The states of one layer at all checkpoints of a step.
#[derive(Debug)]
pub(super) struct StateCopies<'a> {
    /// `[checkpoints, state_len]`: the checkpoints of the first slice, then those of the next one.
    values: Buffer,
    /// Number of values of a layer's state.
    state_len: usize,
    slices: &'a [SliceRows<'a>],
}

impl<'a> StateCopies<'a> {
    /// Memory for the checkpoints of `slices`.
    pub(super) fn new(slices: &'a [SliceRows<'a>], state_len: usize) -> Self {
        let count: usize = slices.iter().map(|slice| slice.checkpoints.len()).sum();
        Self { values: Buffer::zeroed::<f32>(count * state_len), state_len, slices }
    }

    /// Copies the last inputs of the convolution at each checkpoint. `states` are those before the
    /// slices.
    pub(super) fn copy_inputs(
        &mut self,
        config: &DeltaNetConfig,
        buffers: &DeltaNetBuffers,
        slices: &[SliceRows<'_>],
        states: &[&mut [f32]],
    ) {
        let mut copies = self.values.slice_mut::<f32>().chunks_exact_mut(self.state_len);
        for (slice, state) in slices.iter().zip(states) {
            for ((tokens, _), copy) in slice.checkpoints.iter().zip(copies.by_ref()) {
                let to = &mut copy[..config.inputs_len()];
                copy_inputs(config, (state, &buffers.projected), (slice.first, *tokens), to);
            }
        }
    }

    /// Writes the copies to the blocks of their checkpoints, from byte `offset` on.
    pub(super) fn write(&self, kv: &mut KvStore, offset: usize) {
        let copies = self.values.slice::<u8>();
        let checkpoints = self.slices.iter().flat_map(|slice| &slice.checkpoints);
        let len = self.state_len * size_of::<f32>();
        for ((_, blocks), copy) in checkpoints.zip(copies.chunks_exact(len)) {
            kv.write_bytes(blocks, offset, copy);
        }
    }
}
