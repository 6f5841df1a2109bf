//! Steps of a backend, as an executor calls it, and comparisons of their logits.

use anyhow::ensure;
use stolon::Backend;
use stolon::backend::{
    Adapter, BackendSpec, BlockId, Draw, LogitRows, SequenceSlice, SliceState, StateCheckpoint,
    StepBatch,
};

/// Positions `from..to` of a sequence. All get logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    /// Token ids of the whole sequence.
    pub(super) tokens: &'a [u32],
    pub(super) from: usize,
    pub(super) to: usize,
    /// Keys and values of earlier positions are not written.
    pub(super) write_from: usize,
    pub(super) table: &'a [BlockId],
    /// The checkpoint from which the sequence resumes. This and the next field have an effect only
    /// for models with recurrent states.
    pub(super) resume: Option<usize>,
    /// A checkpoint that is written, and the number of positions that it covers.
    pub(super) checkpoint: Option<(usize, usize)>,
    /// The adapter of the sequence.
    pub(super) adapter: Option<&'a Adapter>,
}

impl<'a> Part<'a> {
    /// A part whose positions are all written.
    pub(super) fn new(tokens: &'a [u32], from: usize, to: usize, table: &'a [BlockId]) -> Self {
        let (resume, checkpoint, adapter) = (None, None, None);
        Self { tokens, from, to, write_from: from, table, resume, checkpoint, adapter }
    }

    /// The same part with an adapter.
    pub(super) fn with(self, adapter: Option<&'a Adapter>) -> Self {
        Self { adapter, ..self }
    }

    /// The same part, which resumes from checkpoint `index`.
    pub(super) fn resuming(self, index: usize) -> Self {
        Self { resume: Some(index), ..self }
    }

    /// The same part, which writes checkpoint `index` after the first `len` positions.
    pub(super) fn writing(self, index: usize, len: usize) -> Self {
        Self { checkpoint: Some((index, len)), ..self }
    }

    /// The recurrent state of the sequence, in the slot with the number of its first block.
    fn state(&self, spec: &BackendSpec) -> Option<SliceState> {
        spec.state?;
        let checkpoints = self.checkpoint.iter();
        let checkpoints = checkpoints
            .map(|&(index, len)| StateCheckpoint { len, blocks: checkpoint_blocks(spec, index) });
        Some(SliceState {
            slot: self.table.first().map_or(0, |block| block.0),
            resume: self.resume.map(|index| checkpoint_blocks(spec, index)),
            checkpoints: checkpoints.collect(),
            proposed: 0,
        })
    }
}

/// The blocks of checkpoint `index`, counted from the end of the KV store.
fn checkpoint_blocks(spec: &BackendSpec, index: usize) -> Vec<BlockId> {
    let count = spec.checkpoint_blocks();
    let end = spec.block_count.saturating_sub(index * count);
    (end.saturating_sub(count)..end).map(|block| BlockId(block as u32)).collect()
}

impl Part<'_> {
    /// The last position of a sequence whose prefix is cached. It is computed, but not written. The
    /// sequence resumes from checkpoint `index`.
    pub(super) fn cached(self, index: usize) -> Self {
        Self { write_from: self.to, ..self }.resuming(index)
    }
}

/// The consecutive blocks `first, first + 1, ..` for `positions` positions.
pub(super) fn table(first: usize, positions: usize, block_size: usize) -> Vec<BlockId> {
    (first as u32..).take(positions.div_ceil(block_size)).map(BlockId).collect()
}

/// The parts as one batch.
pub(super) fn batch(spec: &BackendSpec, parts: &[Part<'_>]) -> StepBatch {
    let slice = |part: &Part<'_>| SequenceSlice {
        token_count: part.to - part.from,
        start: part.from,
        write_from: part.write_from,
        block_table: part.table.to_vec(),
        logit_rows: LogitRows::All,
        state: part.state(spec),
        adapter: part.adapter.cloned(),
        ..SequenceSlice::default()
    };
    StepBatch {
        tokens: parts.iter().flat_map(|part| &part.tokens[part.from..part.to]).copied().collect(),
        sequences: parts.iter().map(slice).collect(),
    }
}

/// Runs the parts as one batch. Returns the rows of logits of each part.
pub(super) fn step(
    backend: &mut impl Backend,
    parts: &[Part<'_>],
) -> anyhow::Result<Vec<Vec<Vec<f32>>>> {
    let batch = batch(backend.spec(), parts);
    let logits = backend.step(&batch)?.logits;
    let vocab_size = backend.spec().vocab_size;
    let expected = batch.tokens.len() * vocab_size;
    ensure!(logits.len() == expected, "expected {expected} logits, got {}", logits.len());
    let mut rows = logits.chunks_exact(vocab_size).map(<[f32]>::to_vec);
    Ok(parts.iter().map(|part| rows.by_ref().take(part.to - part.from).collect()).collect())
}

/// Checks that the tokens which the backend draws itself are those that the engine draws from the
/// whole rows, for the last tokens of all sequences of a batch. Slices that continue from a state
/// cannot be computed twice, so they are not checked.
pub(super) fn check_draws(backend: &mut impl Backend, batch: &StepBatch) -> anyhow::Result<()> {
    let vocab_size = backend.spec().vocab_size;
    let continues = batch.sequences.iter().any(|slice| slice.start > 0 && slice.state.is_some());
    if !backend.spec().draws || continues {
        return Ok(());
    }
    let mut step = |rows: &dyn Fn(usize) -> LogitRows| {
        let mut batch = batch.clone();
        let slices = batch.sequences.iter_mut().enumerate();
        slices.for_each(|(index, slice)| slice.logit_rows = rows(index));
        backend.step(&batch)
    };
    let logits = step(&|_| LogitRows::Last)?.logits;
    let all = Draw { temperature: 0.8, ..Draw::GREEDY };
    for kind in [
        Draw::GREEDY,
        all,
        Draw { min_p: 0.05, ..all },
        Draw { top_k: Some(50), ..all },
        Draw { top_p: 0.9, ..all },
    ] {
        let draw = |index| Draw { uniform: (0.4 + 0.61 * index as f64).fract(), ..kind };
        let got = step(&|index| LogitRows::Drawn(draw(index)))?.drawn;
        ensure!(got.len() == batch.sequences.len(), "{kind:?}: got {} tokens", got.len());
        for (index, (row, got)) in logits.chunks_exact(vocab_size).zip(got).enumerate() {
            let (draw, expected) = (draw(index), draw(index).of(row));
            ensure!(got == expected, "{draw:?}: expected the token {expected:?}, got {got:?}");
        }
    }
    Ok(())
}

/// The rows of logits of `tokens` from the position `start` on, in chunks of `chunk` tokens.
pub(super) fn rows(
    backend: &mut impl Backend,
    tokens: &[u32],
    start: usize,
    chunk: usize,
    table: &[BlockId],
) -> anyhow::Result<Vec<Vec<f32>>> {
    rows_of(backend, Part::new(tokens, start, tokens.len(), table), chunk)
}

/// The same for the positions of `part`, of which all are written.
pub(super) fn rows_of(
    backend: &mut impl Backend,
    part: Part<'_>,
    chunk: usize,
) -> anyhow::Result<Vec<Vec<f32>>> {
    let mut rows = Vec::new();
    for from in (part.from..part.to).step_by(chunk) {
        let to = part.to.min(from + chunk);
        let own = Part {
            from,
            to,
            write_from: from,
            resume: part.resume.filter(|_| from == part.from),
            checkpoint: part.checkpoint.filter(|(_, len)| (from + 1..=to).contains(len)),
            ..part
        };
        rows.extend(step(backend, &[own])?.remove(0));
    }
    Ok(rows)
}

/// Maximum difference of the logits of two rows, in standard deviations of `expected`; infinite if
/// the rows cannot be compared.
pub(super) fn difference(got: &[f32], expected: &[f32]) -> f32 {
    let count = expected.len() as f32;
    let mean = expected.iter().sum::<f32>() / count;
    let variance = expected.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count;
    let is_finite = got.iter().chain(expected).all(|value| value.is_finite());
    if got.len() != expected.len() || !is_finite || variance == 0.0 {
        return f32::INFINITY;
    }
    let differences = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max) / variance.sqrt()
}

/// Number of rows in which a logit differs by a bit or more.
pub(super) fn rows_that_differ(got: &[Vec<f32>], expected: &[Vec<f32>]) -> usize {
    let is_same = |got: &[f32], expected: &[f32]| {
        got.len() == expected.len()
            && got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits())
    };
    got.iter().zip(expected).filter(|(got, expected)| !is_same(got, expected)).count()
}
