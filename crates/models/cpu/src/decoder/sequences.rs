//! The input of the attention kernel for the rows of a step.

use std::ops::Range;

use stolon_backend::{SequenceSlice, StepBatch};
use stolon_kernels::AttentionSequence;
use stolon_kvcache::BlockId;

use super::plan::BatchRows;

/// The rows of a step as sequences of the attention kernel.
#[derive(Debug)]
pub(super) struct Sequences<'a> {
    /// The sequences with the block tables of the step.
    pub(super) blocks: Vec<AttentionSequence<'a>>,
    /// The same sequences with the block tables of windowed layers; empty if there are none.
    pub(super) windows: Vec<AttentionSequence<'a>>,
}

impl<'a> Sequences<'a> {
    /// The sequences of the rows of `batch` that are in the residual stream according to `rows`.
    /// `windows` has the block tables of windowed layers, if there are any.
    pub(super) fn of(batch: &'a StepBatch, windows: &'a [Vec<BlockId>], rows: &BatchRows) -> Self {
        let of_tables = |tables: &mut dyn Iterator<Item = &'a Vec<BlockId>>| {
            let mut sequences = Vec::with_capacity(batch.sequences.len());
            for (slice, table) in batch.sequences.iter().zip(tables) {
                let end = slice.start + slice.token_count;
                divide_at_images(slice, table, end - rows.count_in(slice)..end, &mut sequences);
            }
            sequences
        };
        let mut tables = batch.sequences.iter().map(|slice| &slice.block_table);
        Self { blocks: of_tables(&mut tables), windows: of_tables(&mut windows.iter()) }
    }
}

/// Divides the positions of a slice into images with full attention and the causal parts between
/// them. `positions` contains either all positions of such an image or none.
fn divide_at_images<'a>(
    slice: &SequenceSlice,
    block_table: &'a [BlockId],
    positions: Range<usize>,
    sequences: &mut Vec<AttentionSequence<'a>>,
) {
    let mut push = |positions: Range<usize>, full| {
        let (start, count) = (positions.start, positions.len());
        if count > 0 {
            sequences.push(AttentionSequence { start, count, full, block_table });
        }
    };
    let mut next = positions.start;
    for image in slice.images.iter().filter(|image| image.full_attention) {
        let image = image.positions();
        if image.start >= positions.start {
            push(next..image.start, false);
            next = image.end;
            push(image, true);
        }
    }
    push(next..positions.end, false);
}
