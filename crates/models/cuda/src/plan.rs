//! The rows of a batch: their positions, their slots in the KV store, and the rows that are
//! returned.

use candle_core::{Device, Result, Tensor};
use stolon_backend::{Draw, LogitRows, SequenceSlice, StepBatch};
use stolon_kvcache::BlockId;

/// The rows of one step, in the order of the batch's tokens.
#[derive(Debug)]
pub(crate) struct BatchRows {
    /// Position of each row.
    pub(crate) positions: Vec<u32>,
    /// The rows whose keys and values are written, in ascending order.
    pub(crate) written_rows: Vec<u32>,
    /// For each written row, its slot: the index of its position in the KV store.
    pub(crate) slots: Vec<u32>,
    /// The rows that get logits or whose hidden states are returned, in ascending order.
    pub(crate) output_rows: Vec<u32>,
    /// Indices into `output_rows` of the rows that get logits.
    pub(crate) logit_rows: Vec<u32>,
    /// Indices into `output_rows` of the rows from which tokens are drawn.
    pub(crate) drawn_rows: Vec<u32>,
    /// The parameters of the draw of each row in `drawn_rows`.
    pub(crate) draws: Vec<Draw>,
    /// Indices into `output_rows` of the rows whose hidden states are returned.
    pub(crate) hidden_rows: Vec<u32>,
}

/// The queries of one sequence: consecutive rows of the tensor of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuerySpan<'a> {
    /// Position of the first query.
    pub(crate) start: usize,
    /// Number of queries, at least 1.
    pub(crate) count: usize,
    pub(crate) block_table: &'a [BlockId],
}

impl QuerySpan<'_> {
    /// Number of positions that the last query attends to if there is no window.
    pub(crate) fn context(&self) -> usize {
        self.start + self.count
    }
}

impl BatchRows {
    /// Computes the rows of `batch`, which the batch checker has accepted, so all indices are in
    /// range.
    pub(crate) fn new(batch: &StepBatch, block_size: usize) -> Self {
        let rows = batch.tokens.len();
        let mut plan = Self {
            positions: Vec::with_capacity(rows),
            written_rows: Vec::with_capacity(rows),
            slots: Vec::with_capacity(rows),
            output_rows: Vec::new(),
            logit_rows: Vec::new(),
            drawn_rows: Vec::new(),
            draws: Vec::new(),
            hidden_rows: Vec::new(),
        };
        for slice in &batch.sequences {
            for position in slice.start..slice.start + slice.token_count {
                if position >= slice.write_from {
                    plan.written_rows.push(plan.positions.len() as u32);
                    plan.slots.push(slot(&slice.block_table, position, block_size));
                }
                plan.positions.push(position as u32);
            }
            let end = plan.positions.len();
            let rows = match slice.logit_rows {
                LogitRows::Drawn(draw) => {
                    plan.draws.push(draw);
                    &mut plan.drawn_rows
                }
                LogitRows::LastHidden | LogitRows::AllHidden => &mut plan.hidden_rows,
                // The batch checker refuses regions, because this backend does not support them.
                LogitRows::None | LogitRows::Last | LogitRows::All | LogitRows::Regions => {
                    &mut plan.logit_rows
                }
            };
            for row in end - output_count(slice)..end {
                let output = plan.output_rows.len() as u32;
                plan.output_rows.push(row as u32);
                rows.push(output);
            }
        }
        plan
    }

    /// Number of positions that the rotary tables must have.
    pub(crate) fn position_count(&self) -> usize {
        self.positions.iter().max().map_or(0, |last| *last as usize + 1)
    }
}

/// The spans of all rows of all slices.
pub(crate) fn all_spans(batch: &StepBatch) -> Vec<QuerySpan<'_>> {
    let spans = batch.sequences.iter().map(|slice| span(slice, slice.token_count));
    spans.collect()
}

/// The spans of the rows that are returned.
pub(crate) fn output_spans(batch: &StepBatch) -> Vec<QuerySpan<'_>> {
    let spans = batch.sequences.iter().map(|slice| span(slice, output_count(slice)));
    spans.filter(|span| span.count > 0).collect()
}

/// The span of the last `count` rows of a slice.
fn span(slice: &SequenceSlice, count: usize) -> QuerySpan<'_> {
    let start = slice.start + slice.token_count - count;
    QuerySpan { start, count, block_table: &slice.block_table }
}

/// Number of the slice's last rows that are returned.
fn output_count(slice: &SequenceSlice) -> usize {
    let (rows, count) = (slice.logit_rows, slice.token_count);
    rows.logits(count).len() + rows.hidden(count).len() + usize::from(rows.draw().is_some())
}

/// Divides `spans` into spans of one query each, in the order of the rows.
pub(crate) fn single_queries<'a>(spans: &[QuerySpan<'a>]) -> Vec<QuerySpan<'a>> {
    let queries = |span: &QuerySpan<'a>| {
        let QuerySpan { start, count, block_table } = *span;
        (start..start + count).map(move |start| QuerySpan { start, count: 1, block_table })
    };
    spans.iter().flat_map(queries).collect()
}

/// Number of blocks of the longest block table in `spans`.
pub(crate) fn longest_table(spans: &[QuerySpan<'_>]) -> usize {
    spans.iter().map(|span| span.block_table.len()).max().unwrap_or(0)
}

/// The block tables of `spans`, `[spans, blocks]` in u32. `blocks` is the length of the longest
/// table, but at least `least`. Shorter tables are padded with block 0, and the padding is not
/// read.
pub(crate) fn block_tables(
    spans: &[QuerySpan<'_>],
    least: usize,
    device: &Device,
) -> Result<Tensor> {
    let blocks = longest_table(spans).max(least);
    let mut tables = Vec::with_capacity(spans.len() * blocks);
    for span in spans {
        tables.extend(span.block_table.iter().map(|block| block.0));
        tables.resize(tables.len() + blocks - span.block_table.len(), 0);
    }
    Tensor::from_vec(tables, (spans.len(), blocks), device)
}

/// Slot of a position of a sequence: its index in the KV store.
pub(crate) fn slot(block_table: &[BlockId], position: usize, block_size: usize) -> u32 {
    block_table[position / block_size].0 * block_size as u32 + (position % block_size) as u32
}

/// Copies indices to a tensor on the device.
pub(crate) fn indices(values: &[u32], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(values, values.len(), device)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the plan has the right positions and output rows, and exactly the positions from
    /// `write_from` on are written, to the slots of their block table.
    #[test]
    fn a_plan_describes_each_row_of_the_batch() {
        let slice = |token_count, start, write_from, table: &[u32], logit_rows| SequenceSlice {
            token_count,
            start,
            write_from,
            block_table: table.iter().copied().map(BlockId).collect(),
            logit_rows,
            ..SequenceSlice::default()
        };
        let batch = StepBatch {
            tokens: vec![0; 11],
            sequences: vec![
                slice(6, 2, 3, &[9, 5], LogitRows::Last),
                slice(1, 3, 4, &[1], LogitRows::None),
                slice(3, 0, 0, &[2], LogitRows::AllHidden),
                slice(1, 0, 0, &[3], LogitRows::Drawn(Draw::GREEDY)),
            ],
        };
        let plan = BatchRows::new(&batch, 4);
        assert_eq!(plan.positions, [2, 3, 4, 5, 6, 7, 3, 0, 1, 2, 0]);
        assert_eq!(plan.written_rows, [1, 2, 3, 4, 5, 7, 8, 9, 10]);
        assert_eq!(plan.slots, [39, 20, 21, 22, 23, 8, 9, 10, 12]);
        assert_eq!(plan.output_rows, [5, 7, 8, 9, 10]);
        assert_eq!((plan.logit_rows, plan.hidden_rows), (vec![0], vec![1, 2, 3]));
        assert_eq!((plan.drawn_rows, plan.draws), (vec![4], vec![Draw::GREEDY]));
        let shape = |spans: Vec<QuerySpan<'_>>| -> Vec<_> {
            spans.iter().map(|span| (span.start, span.count, span.context())).collect()
        };
        assert_eq!(shape(all_spans(&batch)), [(2, 6, 8), (3, 1, 4), (0, 3, 3), (0, 1, 1)]);
        assert_eq!(shape(output_spans(&batch)), [(7, 1, 8), (0, 3, 3), (0, 1, 1)]);
    }
}
