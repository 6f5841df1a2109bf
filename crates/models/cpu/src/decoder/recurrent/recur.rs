//! The recurrence over the tokens of all slices, and the copies of states that become checkpoints.

use stolon_checkpoint::config::RecurrentShape;
use stolon_kernels::{Buffer, Path, Recurrence, StridedRows};

use super::prepare::copy_inputs;
use super::{HeadInputs, Recurrent, RecurrentBuffers};
use crate::decoder::plan::SliceRows;
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The recurrence of one head over one slice.
struct HeadTask<'a> {
    slice: &'a SliceRows<'a>,
    head: usize,
    /// The state of the head.
    state: &'a mut [f32],
    /// The outputs, `[tokens, value_dim]`.
    outputs: &'a mut [f32],
    /// The destination of the state at each checkpoint of the slice.
    copies: Vec<&'a mut [f32]>,
}

impl Recurrent {
    /// Computes the recurrence of all slices: their outputs, and the states after their certain
    /// tokens. States at checkpoints are copied to `copies`.
    pub(super) fn recur(
        &self,
        path: Path,
        buffers: &mut RecurrentBuffers,
        slices: &[SliceRows<'_>],
        (states, copies): (&mut [&mut [f32]], &mut StateCopies<'_>),
        workers: &Workers,
    ) {
        let shape = &self.shape;
        let RecurrentBuffers { convolved, factors, outputs, .. } = buffers;
        let mut tasks = Vec::with_capacity(slices.len() * shape.heads);
        let mut outputs = &mut outputs[..];
        let mut copies = copies.values.slice_mut::<f32>().chunks_exact_mut(shape.state_len());
        for (slice, state) in slices.iter().zip(states) {
            let (own, rest) = outputs.split_at_mut(slice.tokens * shape.value_width());
            outputs = rest;
            let heads = state[shape.inputs_len()..].chunks_exact_mut(shape.head_len());
            let parts = heads.zip(own.chunks_exact_mut(slice.tokens * shape.value_dim));
            let first_task = tasks.len();
            tasks.extend(parts.enumerate().map(|(head, (state, outputs))| HeadTask {
                slice,
                head,
                state,
                outputs,
                copies: Vec::new(),
            }));
            for copy in copies.by_ref().take(slice.checkpoints.len()) {
                let heads = copy[shape.inputs_len()..].chunks_exact_mut(shape.head_len());
                let tasks = tasks[first_task..].iter_mut();
                tasks.zip(heads).for_each(|(task, copy)| task.copies.push(copy));
            }
        }
        let work = slices.iter().map(|slice| slice.tokens).sum::<usize>();
        let work = 4 * work * shape.heads * shape.head_len();
        let (convolved, factors) = (&convolved[..], &factors[..]);
        workers.run_work(tasks.into_iter(), work, |task| {
            self.recur_head(path, (convolved, factors), task);
        });
    }

    /// Computes one task, in parts that end at checkpoints. Proposed tokens change only a copy of
    /// the state. `convolved`, `[rows, channels]`, and `factors`, `[rows, heads * decays + heads]`,
    /// have the rows of all slices.
    fn recur_head(&self, path: Path, inputs: (&[f32], &[f32]), task: HeadTask<'_>) {
        let HeadTask { slice, head, state, mut outputs, copies } = task;
        let mut copies = copies.into_iter();
        let ends = slice.checkpoints.iter().map(|(tokens, _)| *tokens).chain([slice.certain]);
        let mut start = 0;
        for end in ends {
            let (own, rest) = outputs.split_at_mut((end - start) * self.shape.value_dim);
            self.recur_rows(path, inputs, (head, slice.first + start), state, own);
            outputs = rest;
            if let Some(copy) = copies.next() {
                copy.copy_from_slice(state);
            }
            start = end;
        }
        if start < slice.tokens {
            let mut state = state.to_vec();
            self.recur_rows(path, inputs, (head, slice.first + start), &mut state, outputs);
        }
    }

    /// Computes the recurrence of a head over the rows from `row` on, as many as there are
    /// `outputs`, `[tokens, value_dim]`.
    fn recur_rows(
        &self,
        path: Path,
        (convolved, factors): (&[f32], &[f32]),
        (head, row): (usize, usize),
        state: &mut [f32],
        outputs: &mut [f32],
    ) {
        let RecurrentShape { key_dim, value_dim, rule, channels, .. } = self.shape;
        let tokens = outputs.len() / value_dim;
        if tokens == 0 {
            return;
        }
        let stride = self.shape.factor_width();
        let HeadInputs { query, key, value } = self.heads[head];
        let rows =
            |at: usize| StridedRows { values: &convolved[row * channels + at..], stride: channels };
        let of_head = |at: usize| StridedRows { values: &factors[row * stride + at..], stride };
        let recurrence = Recurrence {
            path,
            rule,
            tokens,
            key_dim,
            value_dim,
            queries: rows(query),
            keys: rows(key),
            values: rows(value),
            decays: of_head(head * self.shape.decays()),
            strengths: of_head(self.shape.decay_width() + head),
        };
        recurrence.run(state, outputs);
    }
}

/// The states of one layer at all checkpoints of a step.
#[derive(Debug)]
pub(super) struct StateCopies<'a> {
    /// `[checkpoints, state_len]`: the checkpoints of the first slice, followed by the checkpoints
    /// of the next one.
    values: Buffer,
    /// Number of values of a layer's state.
    state_len: usize,
    slices: &'a [SliceRows<'a>],
}

impl<'a> StateCopies<'a> {
    /// Reserves memory for the checkpoints of `slices`.
    pub(super) fn new(slices: &'a [SliceRows<'a>], state_len: usize) -> Self {
        let count: usize = slices.iter().map(|slice| slice.checkpoints.len()).sum();
        Self { values: Buffer::zeroed::<f32>(count * state_len), state_len, slices }
    }

    /// Copies the last inputs of the convolution at each checkpoint. `states` are the states before
    /// the slices.
    pub(super) fn copy_inputs(
        &mut self,
        shape: &RecurrentShape,
        buffers: &RecurrentBuffers,
        states: &[&mut [f32]],
    ) {
        let mut copies = self.values.slice_mut::<f32>().chunks_exact_mut(self.state_len);
        for (slice, state) in self.slices.iter().zip(states) {
            for ((tokens, _), copy) in slice.checkpoints.iter().zip(copies.by_ref()) {
                let to = &mut copy[..shape.inputs_len()];
                copy_inputs(shape, (state, &buffers.projected), (slice.first, *tokens), to);
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
