//! Helpers that call a backend as an executor does: block tables, chunks and batches.

use stolon_backend::{Backend, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_kvcache::BlockId;

/// One sequence's part of a step: its slice and its tokens.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) tokens: Vec<u32>,
    pub(crate) slice: SequenceSlice,
}

/// A block table of the consecutive blocks `first, first + 1, ..` for `positions` positions.
pub(crate) fn table(first: u32, positions: usize, block_size: usize) -> Vec<BlockId> {
    (first..).take(positions.div_ceil(block_size)).map(BlockId).collect()
}

/// The positions `start..end` of `tokens`. All are written and get logits.
pub(crate) fn part(tokens: &[u32], start: usize, end: usize, table: &[BlockId]) -> Part {
    Part {
        tokens: tokens[start..end].to_vec(),
        slice: SequenceSlice {
            token_count: end - start,
            start,
            write_from: start,
            block_table: table.to_vec(),
            logit_rows: LogitRows::All,
            ..SequenceSlice::default()
        },
    }
}

/// The part of a sequence whose recurrent state is in `slot`, if the backend has states.
pub(crate) fn in_slot(backend: &dyn Backend, slot: u32, mut part: Part) -> Part {
    if backend.spec().state.is_some() {
        part.slice.state = Some(SliceState::in_slot(slot));
    }
    part
}

/// The part of a sequence whose recurrent state is in `slot`, if the backend has states, and whose
/// last `proposed` tokens may be rejected.
pub(crate) fn proposing(backend: &dyn Backend, slot: u32, part: Part, proposed: usize) -> Part {
    let mut part = in_slot(backend, slot, part);
    part.slice.state.iter_mut().for_each(|state| state.proposed = proposed);
    part
}

/// The parts as one batch. If the backend has recurrent states, the slot of a part that has none is
/// the number of its first block.
pub(crate) fn batch(backend: &dyn Backend, parts: &[Part]) -> StepBatch {
    let slice = |part: &Part| match part.slice.state {
        Some(_) => part.slice.clone(),
        None => in_slot(backend, part.slice.block_table[0].0, part.clone()).slice,
    };
    StepBatch {
        tokens: parts.iter().flat_map(|part| part.tokens.clone()).collect(),
        sequences: parts.iter().map(slice).collect(),
    }
}

/// Runs the parts as one batch. Returns the rows of logits of each part.
pub(crate) fn step(backend: &mut dyn Backend, parts: &[Part]) -> Vec<Vec<Vec<f32>>> {
    let batch = batch(backend, parts);
    let logits = backend.step(&batch).expect("a good batch").logits;
    let mut rows = logits.chunks_exact(backend.spec().vocab_size).map(<[f32]>::to_vec);
    let counts = parts.iter().map(|part| part.slice.logit_rows.logits(part.tokens.len()).len());
    let rows = counts.map(|count| rows.by_ref().take(count).collect()).collect();
    assert_eq!(logits.len() % backend.spec().vocab_size, 0);
    rows
}

/// Runs the parts as one batch. Returns the hidden states of each part.
pub(crate) fn hidden(backend: &mut dyn Backend, parts: &[Part]) -> Vec<Vec<Vec<f32>>> {
    let batch = batch(backend, parts);
    let hidden = backend.step(&batch).expect("a good batch").hidden;
    let width = backend.spec().hidden_size.expect("a decoder has hidden states");
    let mut rows = hidden.chunks_exact(width).map(<[f32]>::to_vec);
    let counts = parts.iter().map(|part| part.slice.logit_rows.hidden(part.tokens.len()).len());
    let states = counts.map(|count| rows.by_ref().take(count).collect()).collect();
    assert!(rows.next().is_none() && hidden.len().is_multiple_of(width));
    states
}

/// The rows of logits of `tokens` from position `start` on, computed in chunks of `chunk` tokens.
pub(crate) fn rows(
    backend: &mut dyn Backend,
    tokens: &[u32],
    start: usize,
    chunk: usize,
    table: &[BlockId],
) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut from = start;
    while from < tokens.len() {
        let to = tokens.len().min(from + chunk);
        rows.extend(step(backend, &[part(tokens, from, to, table)]).remove(0));
        from = to;
    }
    rows
}

/// The index of the largest logit; the first one among equal logits.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best as u32
}

/// Generates `count` greedy tokens after `prompt`: one step for the prompt, then one per token.
pub(crate) fn greedy(backend: &mut dyn Backend, prompt: &[u32], count: usize) -> Vec<u32> {
    let block_size = backend.spec().block_size;
    let mut tokens = prompt.to_vec();
    let table = table(3, prompt.len() + count, block_size);
    let mut start = 0;
    for _ in 0..count {
        let mut part = part(&tokens, start, tokens.len(), &table);
        part.slice.logit_rows = LogitRows::Last;
        start = tokens.len();
        tokens.push(argmax(&step(backend, &[part])[0][0]));
    }
    tokens.split_off(prompt.len())
}
