//! The plan of a step: for each row of a batch its position, where its keys and values are written,
//! and whether it gets logits.

use stolon_backend::{LogitRows, SequenceSlice, StepBatch};
use stolon_kernels::SlotMapping;

/// The rows of a batch, in the order of its tokens. The buffers are reused between steps.
#[derive(Debug, Default)]
pub(super) struct StepPlan {
    /// Position of each row.
    pub(super) positions: Vec<u32>,
    /// Where the keys and values of each row are written.
    pub(super) slots: SlotMapping,
    /// Indices of the rows that get logits, in ascending order.
    pub(super) output_rows: Vec<usize>,
}

impl StepPlan {
    /// Replaces the contents by the plan of `batch`.
    pub(super) fn fill(&mut self, batch: &StepBatch, block_size: usize) {
        self.positions.clear();
        self.output_rows.clear();
        for slice in &batch.sequences {
            let end = slice.start + slice.token_count;
            self.positions.extend(slice.start as u32..end as u32);
            let output_count = match slice.logit_rows {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => slice.token_count,
            };
            let end_row = self.positions.len();
            self.output_rows.extend(end_row - output_count..end_row);
        }
        let slots = batch.sequences.iter().flat_map(|slice| {
            let positions = slice.start..slice.start + slice.token_count;
            positions.map(|position| slot(slice, position, block_size))
        });
        self.slots.fill(slots);
    }
}

/// Index in the KV store of the keys and values of a position; `None` if they are not written.
fn slot(slice: &SequenceSlice, position: usize, block_size: usize) -> Option<usize> {
    let block = || slice.block_table[position / block_size].0 as usize;
    (position >= slice.write_from).then(|| block() * block_size + position % block_size)
}

#[cfg(test)]
mod tests {
    use stolon_kvcache::BlockId;

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
                },
                SequenceSlice {
                    token_count: 1,
                    start: 3,
                    write_from: 4,
                    block_table: vec![BlockId(1)],
                    logit_rows: LogitRows::All,
                },
            ],
        };
        let mut plan = StepPlan::default();
        for _ in 0..2 {
            plan.fill(&batch, 4);
            assert_eq!(plan.positions, [2, 3, 4, 5, 6, 7, 8, 3]);
            assert_eq!(plan.output_rows, [6, 7]);
            let slots = [0, 39, 20, 21, 22, 23, 28, 0].map(|slot| (slot > 0).then_some(slot));
            assert_eq!(plan.slots.as_slice(), slots);
        }
    }
}
