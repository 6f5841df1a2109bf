//! The plan of a step: for each row of a batch its position, where its keys and values are written,
//! and whether it gets logits or its hidden state is returned.

use stolon_backend::{LogitRows, SequenceSlice, StepBatch};
use stolon_kernels::SlotMapping;
use stolon_kvcache::BlockId;

/// The rows of a batch, in the order of its tokens. The buffers are reused between steps.
#[derive(Debug, Default)]
pub(super) struct BatchRows {
    /// Position of each row.
    pub(super) positions: Vec<u32>,
    /// Where the keys and values of each row are written.
    pub(super) slots: SlotMapping,
    /// Indices of the rows that get logits or whose hidden states are returned, in ascending order.
    pub(super) output_rows: Vec<usize>,
    /// For each of the output rows, whether its hidden state is returned.
    pub(super) hidden_rows: Vec<bool>,
    /// For each row that gets logits, whether those of bins of coordinates and sizes follow.
    pub(super) region_rows: Vec<bool>,
    /// The first row of each slice, and the number of all rows.
    bounds: Vec<usize>,
}

/// The rows of a slice in the batch.
#[derive(Debug)]
pub(super) struct SliceRows<'a> {
    /// The first row.
    pub(super) first: usize,
    /// Number of rows, at least 1.
    pub(super) tokens: usize,
    /// The checkpoints of the recurrent state: after how many of the slice's tokens, in ascending
    /// order, and the blocks.
    pub(super) checkpoints: Vec<(usize, &'a [BlockId])>,
}

impl BatchRows {
    /// Replaces the contents by the plan of `batch`.
    pub(super) fn fill(&mut self, batch: &StepBatch, block_size: usize) {
        self.positions.clear();
        self.output_rows.clear();
        self.hidden_rows.clear();
        self.region_rows.clear();
        self.bounds.clear();
        self.bounds.push(0);
        for slice in &batch.sequences {
            let end = slice.start + slice.token_count;
            self.positions.extend(slice.start as u32..end as u32);
            let (output_count, end_row) = (output_count(slice), self.positions.len());
            self.output_rows.extend(end_row - output_count..end_row);
            let is_hidden = !slice.logit_rows.hidden(slice.token_count).is_empty();
            self.hidden_rows.resize(self.output_rows.len(), is_hidden);
            let logits = slice.logit_rows.logits(slice.token_count).len();
            let has_regions = slice.logit_rows == LogitRows::Regions;
            self.region_rows.resize(self.region_rows.len() + logits, has_regions);
            self.bounds.push(end_row);
        }
        let slots = batch.sequences.iter().flat_map(|slice| {
            let positions = slice.start..slice.start + slice.token_count;
            positions.map(|position| slot(slice, position, block_size))
        });
        self.slots.fill(slots);
    }

    /// The rows of all slices of the batch that the plan is filled for.
    pub(super) fn slices<'a>(&self, batch: &'a StepBatch) -> Vec<SliceRows<'a>> {
        let rows = |(slice, first): (&'a SequenceSlice, &usize)| SliceRows {
            first: *first,
            tokens: slice.token_count,
            checkpoints: slice
                .state
                .iter()
                .flat_map(|state| &state.checkpoints)
                .map(|checkpoint| (checkpoint.len - slice.start, &checkpoint.blocks[..]))
                .collect(),
        };
        batch.sequences.iter().zip(&self.bounds).map(rows).collect()
    }

    /// The slice that row `row` belongs to: its first row, and the number of its rows.
    pub(super) fn slice_of(&self, row: usize) -> (usize, usize) {
        let end = self.bounds.partition_point(|bound| *bound <= row);
        (self.bounds[end - 1], self.bounds[end] - self.bounds[end - 1])
    }
}

/// Number of the slice's last rows that get logits or whose hidden states are returned.
pub(super) fn output_count(slice: &SequenceSlice) -> usize {
    let (rows, count) = (slice.logit_rows, slice.token_count);
    rows.logits(count).len() + rows.hidden(count).len()
}

/// Index in the KV store of the keys and values of a position; `None` if they are not written.
fn slot(slice: &SequenceSlice, position: usize, block_size: usize) -> Option<usize> {
    (position >= slice.write_from).then(|| slot_of(&slice.block_table, position, block_size))
}

/// Index in the KV store of a position of the sequence with this block table.
pub(super) fn slot_of(block_table: &[BlockId], position: usize, block_size: usize) -> usize {
    block_table[position / block_size].0 as usize * block_size + position % block_size
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the plan has the right positions and output rows, and exactly the positions from
    /// `write_from` on have slots, in the blocks of their table.
    #[test]
    fn a_plan_describes_each_row_of_the_batch() {
        let batch = StepBatch {
            tokens: vec![0; 8],
            sequences: vec![
                SequenceSlice {
                    token_count: 7,
                    start: 2,
                    write_from: 3,
                    block_table: vec![BlockId(9), BlockId(5), BlockId(7)],
                    logit_rows: LogitRows::Last,
                    ..SequenceSlice::default()
                },
                SequenceSlice {
                    token_count: 1,
                    start: 3,
                    write_from: 4,
                    block_table: vec![BlockId(1)],
                    logit_rows: LogitRows::AllHidden,
                    ..SequenceSlice::default()
                },
            ],
        };
        let mut plan = BatchRows::default();
        for _ in 0..2 {
            plan.fill(&batch, 4);
            assert_eq!(plan.positions, [2, 3, 4, 5, 6, 7, 8, 3]);
            assert_eq!(plan.output_rows, [6, 7]);
            assert_eq!(plan.hidden_rows, [false, true]);
            let slots = [0, 39, 20, 21, 22, 23, 28, 0].map(|slot| (slot > 0).then_some(slot));
            assert_eq!(plan.slots.as_slice(), slots);
        }
    }
}
