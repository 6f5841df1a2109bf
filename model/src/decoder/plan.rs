//! What a batch means row by row: positions, where rows are written, which rows get logits.

use crate::backend::{LogitRows, SequenceSlice, StepBatch};

/// Successive rows that are written to successive places of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WriteRun {
    /// The first row.
    pub(super) row: usize,
    /// How many.
    pub(super) count: usize,
    /// The block.
    pub(super) block: usize,
    /// Place of the first row in it.
    pub(super) offset: usize,
}

/// A batch row by row; reused between steps.
#[derive(Debug, Default)]
pub(super) struct StepPlan {
    /// Position of each row.
    pub(super) positions: Vec<u32>,
    /// Where keys and values go.
    pub(super) writes: Vec<WriteRun>,
    /// Rows that get logits, ascending.
    pub(super) output_rows: Vec<usize>,
}

impl StepPlan {
    /// Describes `batch`, forgetting the one before.
    pub(super) fn fill(&mut self, batch: &StepBatch, block_size: usize) {
        self.positions.clear();
        self.writes.clear();
        self.output_rows.clear();
        for slice in &batch.sequences {
            let first_row = self.positions.len();
            let end = slice.start + slice.token_count;
            self.positions.extend(slice.start as u32..end as u32);
            self.plan_writes(slice, first_row, block_size);
            let output_count = match slice.logit_rows {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => slice.token_count,
            };
            let end_row = self.positions.len();
            self.output_rows.extend(end_row - output_count..end_row);
        }
    }

    fn plan_writes(&mut self, slice: &SequenceSlice, first_row: usize, block_size: usize) {
        let end = slice.start + slice.token_count;
        let mut position = slice.write_from;
        while position < end {
            let offset = position % block_size;
            let count = (block_size - offset).min(end - position);
            self.writes.push(WriteRun {
                row: first_row + position - slice.start,
                count,
                block: slice.block_table[position / block_size].0 as usize,
                offset,
            });
            position += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use stolon_kvcache::BlockId;

    use super::*;

    /// Goal: writes cover exactly the positions from `write_from` on, cut at block borders.
    #[test]
    fn a_batch_row_by_row() {
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
            let run = |row, count, block, offset| WriteRun { row, count, block, offset };
            assert_eq!(plan.writes, [run(1, 1, 9, 3), run(2, 4, 5, 0), run(6, 1, 7, 0)]);
        }
    }
}
