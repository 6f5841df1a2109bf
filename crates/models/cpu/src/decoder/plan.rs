//! The plan of a step. For each row of a batch, it has the position, the slot of its keys and
//! values, and whether the row gets logits or its hidden state is returned.

use stolon_backend::{LogitRows, SequenceSlice, SliceImage, StepBatch, rotary_len};
use stolon_kernels::SlotMapping;
use stolon_kvcache::BlockId;

use super::rope::Rotation;

/// The rows of a batch, in the order of its tokens. The buffers are reused between steps.
///
/// At first, the residual stream has a row for each token. After the last layer that keeps data of
/// positions has read all rows, [`BatchRows::keep_outputs`] drops the rows without an output. Only
/// `BatchRows` knows whether that has happened. To read buffers that still have all rows, use
/// [`BatchRows::batch_row`]. For the number of rows that are left of a slice, use
/// [`BatchRows::count_in`].
#[derive(Debug, Default)]
pub(super) struct BatchRows {
    /// Position of each row of the residual stream.
    pub(super) positions: Vec<u32>,
    /// The rotation of each row of the residual stream.
    pub(super) rotations: Vec<Rotation>,
    /// The coordinates of the rows that have three: temporal position, row and column.
    pub(super) coordinates: Vec<[u32; 3]>,
    /// The slots of the keys and values of each row of the batch.
    pub(super) slots: SlotMapping,
    /// The slots of each row in windowed layers; empty if there are none.
    pub(super) window_slots: SlotMapping,
    /// Indices of the rows that get logits or whose hidden states are returned, in ascending order.
    pub(super) output_rows: Vec<usize>,
    /// For each of the output rows, whether its hidden state is returned.
    pub(super) hidden_rows: Vec<bool>,
    /// For each row that gets logits, whether the logits of bins of coordinates and sizes follow
    /// them.
    pub(super) region_rows: Vec<bool>,
    /// The first row of each slice in the batch, followed by the number of all rows.
    bounds: Vec<usize>,
    /// Whether the residual stream has only the output rows.
    only_outputs: bool,
}

/// The rows of a slice in the batch.
#[derive(Debug)]
pub(super) struct SliceRows<'a> {
    /// The first row.
    pub(super) first: usize,
    /// Number of rows, at least 1.
    pub(super) tokens: usize,
    /// Number of rows before the tokens that are only proposed, at least 1. The state is kept after
    /// them.
    pub(super) certain: usize,
    /// The checkpoints of the state: the number of the slice's tokens before each of them, in
    /// ascending order, and the blocks that it is written to.
    pub(super) checkpoints: Vec<(usize, &'a [BlockId])>,
}

impl BatchRows {
    /// Replaces the contents with the plan of `batch`. `windows` has the block tables of windowed
    /// layers, if there are any.
    pub(super) fn fill(&mut self, batch: &StepBatch, windows: &[Vec<BlockId>], block_size: usize) {
        self.positions.clear();
        self.rotations.clear();
        self.coordinates.clear();
        self.output_rows.clear();
        self.hidden_rows.clear();
        self.region_rows.clear();
        self.bounds.clear();
        self.bounds.push(0);
        self.only_outputs = false;
        for slice in &batch.sequences {
            let end = slice.start + slice.token_count;
            self.positions.extend(slice.start as u32..end as u32);
            self.add_rotations(slice);
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
        // Windows are not shared between sequences, so every position is written.
        self.window_slots.fill(batch.sequences.iter().zip(windows).flat_map(|(slice, table)| {
            let positions = slice.start..slice.start + slice.token_count;
            positions.map(|position| Some(slot_of(table, position, block_size)))
        }));
    }

    /// Adds the rotations of a slice's rows. The rotary position of a token is its position in the
    /// sequence, minus the positions that earlier images have skipped. A grid image advances the
    /// rotary position by the length of its longer edge. The rows and columns of a grid are counted
    /// from the rotary position of its start.
    fn add_rotations(&mut self, slice: &SequenceSlice) {
        let (mut lag, mut next) = (slice.rotary_lag, slice.start);
        let end = slice.start + slice.token_count;
        let grids = slice.images.iter().filter(|image| image.columns > 0);
        for image in grids {
            let SliceImage { start, len, columns, .. } = image;
            let begin = (start - lag) as u32;
            let text = next..(*start).max(next);
            self.rotations.extend(text.map(|at| Rotation::Position((at - lag) as u32)));
            next = image.positions().end.min(end);
            for at in slice.start.max(*start)..next {
                let [row, column] = [(at - start) / columns, (at - start) % columns];
                self.rotations.push(Rotation::Grid(self.coordinates.len() as u32));
                self.coordinates.push([begin, begin + row as u32, begin + column as u32]);
            }
            lag += len - rotary_len(*len, *columns);
        }
        self.rotations.extend((next..end).map(|at| Rotation::Position((at - lag) as u32)));
    }

    /// Rotates each row as one at the next position. All rows are tokens.
    pub(super) fn rotate_as_next(&mut self) {
        for rotation in &mut self.rotations {
            if let Rotation::Position(position) = rotation {
                *position += 1;
            }
        }
    }

    /// The rows of each slice of `batch`, for which the plan was filled.
    pub(super) fn slices<'a>(&self, batch: &'a StepBatch) -> Vec<SliceRows<'a>> {
        let rows = |(slice, first): (&'a SequenceSlice, &usize)| SliceRows {
            first: *first,
            tokens: slice.token_count,
            certain: slice.token_count - slice.state.as_ref().map_or(0, |state| state.proposed),
            checkpoints: slice
                .state
                .iter()
                .flat_map(|state| &state.checkpoints)
                .map(|checkpoint| (checkpoint.len - slice.start, &checkpoint.blocks[..]))
                .collect(),
        };
        batch.sequences.iter().zip(&self.bounds).map(rows).collect()
    }

    /// Number of rows of the residual stream.
    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether the residual stream still has all rows of the batch.
    pub(super) fn has_all(&self) -> bool {
        !self.only_outputs
    }

    /// Keeps only the output rows of the residual stream. The caller moves the rows of its buffers
    /// in the same way.
    pub(super) fn keep_outputs(&mut self) {
        assert!(!self.only_outputs, "rows are dropped once in a step");
        self.only_outputs = true;
        for (to, &from) in self.output_rows.iter().enumerate() {
            self.positions[to] = self.positions[from];
            self.rotations[to] = self.rotations[from];
        }
        self.positions.truncate(self.output_rows.len());
        self.rotations.truncate(self.output_rows.len());
    }

    /// The index in the batch of row `row` of the residual stream.
    pub(super) fn batch_row(&self, row: usize) -> usize {
        if self.only_outputs { self.output_rows[row] } else { row }
    }

    /// Number of rows of `slice` that are in the residual stream. These are its last rows: all of
    /// them, or only the ones with an output.
    pub(super) fn count_in(&self, slice: &SequenceSlice) -> usize {
        if self.only_outputs { output_count(slice) } else { slice.token_count }
    }

    /// The slice that contains row `row` of the batch: its first row, and the number of its rows.
    pub(super) fn slice_of(&self, row: usize) -> (usize, usize) {
        let end = self.bounds.partition_point(|bound| *bound <= row);
        (self.bounds[end - 1], self.bounds[end] - self.bounds[end - 1])
    }
}

/// Number of the slice's last rows that get logits or whose hidden states are returned.
pub(crate) fn output_count(slice: &SequenceSlice) -> usize {
    let (rows, count) = (slice.logit_rows, slice.token_count);
    rows.logits(count).len() + rows.hidden(count).len()
}

/// Slot of the keys and values of a position in the KV store; `None` if they are not written.
fn slot(slice: &SequenceSlice, position: usize, block_size: usize) -> Option<usize> {
    (position >= slice.write_from).then(|| slot_of(&slice.block_table, position, block_size))
}

/// Slot of a position in the KV store, for a sequence with this block table.
pub(crate) fn slot_of(block_table: &[BlockId], position: usize, block_size: usize) -> usize {
    block_table[position / block_size].0 as usize * block_size + position % block_size
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the plan has the right positions and output rows, and exactly the positions from
    /// `write_from` on have slots, in the blocks of their block table.
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
            plan.fill(&batch, &[], 4);
            assert_eq!(plan.positions, [2, 3, 4, 5, 6, 7, 8, 3]);
            assert_eq!(plan.output_rows, [6, 7]);
            assert_eq!(plan.hidden_rows, [false, true]);
            let slots = [0, 39, 20, 21, 22, 23, 28, 0].map(|slot| (slot > 0).then_some(slot));
            assert_eq!(plan.slots.as_slice(), slots);
        }
    }

    /// Goal: after the rows without an output are dropped, each remaining row has its position and
    /// its index in the batch, and slices have only their output rows.
    #[test]
    fn dropping_rows_leaves_the_outputs() {
        let slice = |block, token_count, start, logit_rows| SequenceSlice {
            token_count,
            start,
            block_table: vec![BlockId(block)],
            logit_rows,
            ..SequenceSlice::default()
        };
        let sequences = vec![
            slice(0, 5, 0, LogitRows::Last),
            slice(1, 3, 7, LogitRows::None),
            slice(2, 1, 9, LogitRows::Last),
            slice(3, 2, 4, LogitRows::AllHidden),
        ];
        let batch = StepBatch { tokens: vec![0; 11], sequences };
        let mut plan = BatchRows::default();
        for _ in 0..2 {
            plan.fill(&batch, &[], 16);
            let counts = |plan: &BatchRows| batch.sequences.iter().map(|s| plan.count_in(s)).sum();
            let all: usize = counts(&plan);
            assert!(plan.has_all() && plan.len() == 11 && all == 11);
            assert!((0..11).all(|row| plan.batch_row(row) == row));
            plan.keep_outputs();
            let left: usize = counts(&plan);
            assert!(!plan.has_all() && plan.len() == 4 && left == 4);
            assert_eq!([0, 1, 2, 3].map(|row| plan.batch_row(row)), [4, 8, 9, 10]);
            assert_eq!(plan.positions, [4, 9, 4, 5]);
            assert!(matches!(
                plan.rotations[..],
                [Rotation::Position(4), Rotation::Position(9), ..]
            ));
        }
    }

    /// Goal: the coordinates of an image's positions are counted from its start, the text after it
    /// continues after its longer edge, and a slice that begins inside an image has the same
    /// rotations.
    #[test]
    fn rotations_follow_from_the_images_before() {
        let image = |start, len, columns| SliceImage {
            start,
            len,
            full_attention: false,
            columns,
            embeddings: stolon_backend::ImageEmbeddings { values: [].into() },
        };
        let images = [image(2, 6, 3), image(9, 2, 0), image(12, 4, 1)];
        let slice = |start: usize, rotary_lag| SequenceSlice {
            start,
            token_count: 18 - start,
            block_table: vec![BlockId(0)],
            images: images.iter().filter(|image| image.positions().end > start).cloned().collect(),
            rotary_lag,
            ..SequenceSlice::default()
        };
        let rotations = |start, rotary_lag| {
            let mut plan = BatchRows::default();
            plan.fill(
                &StepBatch { tokens: vec![0; 18], sequences: vec![slice(start, rotary_lag)] },
                &[],
                32,
            );
            let coordinates = |rotation: &Rotation| match *rotation {
                Rotation::Position(position) => [position; 3],
                Rotation::Grid(index) => plan.coordinates[index as usize],
            };
            plan.rotations.iter().map(coordinates).collect::<Vec<_>>()
        };
        let whole = rotations(0, 0);
        let grid = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]];
        assert_eq!(whole[..2], [[0; 3], [1; 3]]);
        assert_eq!(whole[2..8], grid);
        assert_eq!(whole[8..12], [[5; 3], [6; 3], [7; 3], [8; 3]]);
        assert_eq!(whole[12..16], [[9; 3], [9, 10, 9], [9, 11, 9], [9, 12, 9]]);
        assert_eq!(whole[16..], [[13; 3], [14; 3]]);
        for (start, lag) in [(1, 0), (2, 0), (5, 0), (8, 3), (10, 3), (14, 3), (16, 3), (17, 3)] {
            assert_eq!(rotations(start, lag), whole[start..], "{start}");
        }
    }
}
