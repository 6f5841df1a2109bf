//! What a step uploads for recurrent layers: the slots of its sequences, the inputs of the short
//! convolution at each row, and the segments into which checkpoints divide the slices.

use candle_core::{Device, Result, Tensor};
use stolon_backend::{SequenceSlice, SliceState, StepBatch};

use crate::inputs::Selection;
use crate::plan::{indices, slot};

/// The inputs of recurrent layers in a step. All indices are u32.
#[derive(Debug)]
pub(crate) struct StateInputs {
    /// The slot of each slice, `[slices]`.
    pub(crate) slots: Tensor,
    /// The slots whose sequences begin with the step; `None` if there are none.
    pub(crate) new_slots: Option<Tensor>,
    /// The sequences that resume from checkpoints; `None` if there are none.
    pub(crate) resumed: Option<Resumed>,
    /// For each tap of the convolution, the oldest position first, the indices of the rows' inputs,
    /// `[rows]`. The inputs are those that the states of the slices have, `taps - 1` of each slice,
    /// followed by those of the rows.
    pub(crate) taps: Vec<Tensor>,
    /// The indices of the inputs that a state after each segment has, `[segments * (taps - 1)]`.
    pub(crate) kept_inputs: Tensor,
    /// The segments of the slices, as [`recur`](crate::recurrence::recur) reads them.
    pub(crate) segments: Tensor,
    /// The last segment of each slice.
    pub(crate) ends: Selection,
    /// The checkpoints that the step writes; `None` if there are none.
    pub(crate) checkpoints: Option<Checkpoints>,
}

/// Sequences that resume from checkpoints.
#[derive(Debug)]
pub(crate) struct Resumed {
    /// Number of sequences.
    pub(crate) count: usize,
    /// Their slots, `[count]`.
    pub(crate) slots: Tensor,
    /// The blocks of their checkpoints, one after the other.
    pub(crate) blocks: Tensor,
}

/// The checkpoints that a step writes.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    /// The segment that ends at each checkpoint.
    pub(crate) segments: Tensor,
    /// The blocks of the checkpoints, one after the other.
    pub(crate) blocks: Tensor,
}

impl StateInputs {
    /// Uploads the inputs for the slices of `batch`, which all have states. A convolution has
    /// `taps` taps.
    pub(crate) fn new(batch: &StepBatch, taps: usize, device: &Device) -> Result<Self> {
        let slices: Vec<(&SequenceSlice, &SliceState)> = batch
            .sequences
            .iter()
            .filter_map(|slice| Some((slice, slice.state.as_ref()?)))
            .collect();
        let kept = taps - 1;
        let first_row = slices.len() * kept;
        // Input `index` of a slice: first those of its state, then those of its rows.
        let input = |slice: usize, row: usize, index: usize| match index.checked_sub(kept) {
            Some(own) => (first_row + row + own) as u32,
            None => (slice * kept + index) as u32,
        };
        let mut tap_rows = vec![Vec::with_capacity(batch.tokens.len()); taps];
        let (mut starts, mut first_rows, mut kept_inputs) = (vec![0], Vec::new(), Vec::new());
        let (mut ends, mut at_checkpoints, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        let mut row = 0;
        for (index, (slice, state)) in slices.iter().enumerate() {
            for token in 0..slice.token_count {
                for (tap, rows) in tap_rows.iter_mut().enumerate() {
                    rows.push(input(index, row, token + tap));
                }
            }
            let end = slice.start + slice.token_count;
            let lens = state.checkpoints.iter().map(|checkpoint| checkpoint.len);
            let mut segment_ends: Vec<usize> = lens.chain([end]).collect();
            segment_ends.dedup();
            let mut start = slice.start;
            for segment_end in segment_ends {
                first_rows.push((row + start - slice.start) as u32);
                let tokens = segment_end - slice.start;
                kept_inputs.extend((tokens..tokens + kept).map(|at| input(index, row, at)));
                let at = state.checkpoints.iter().find(|checkpoint| checkpoint.len == segment_end);
                if let Some(checkpoint) = at {
                    at_checkpoints.push(first_rows.len() as u32 - 1);
                    blocks.extend(checkpoint.blocks.iter().map(|block| block.0));
                }
                start = segment_end;
            }
            ends.push(first_rows.len() as u32 - 1);
            starts.push(first_rows.len() as u32);
            row += slice.token_count;
        }
        let segment_count = first_rows.len();
        first_rows.push(row as u32);
        let slots: Vec<u32> = slices.iter().map(|(_, state)| state.slot).collect();
        let is_new = |(slice, state): &&(&SequenceSlice, &SliceState)| {
            slice.start == 0 && state.resume.is_none()
        };
        let new: Vec<u32> = slices.iter().filter(is_new).map(|(_, state)| state.slot).collect();
        let some = |values: &[u32]| match values {
            [] => Ok(None),
            values => indices(values, device).map(Some),
        };
        Ok(Self {
            slots: indices(&slots, device)?,
            new_slots: some(&new)?,
            resumed: Resumed::new(&slices, device)?,
            taps: tap_rows.iter().map(|rows| indices(rows, device)).collect::<Result<_>>()?,
            kept_inputs: indices(&kept_inputs, device)?,
            segments: indices(&[starts, first_rows].concat(), device)?,
            ends: Selection::new(&ends, segment_count, device)?,
            checkpoints: match some(&at_checkpoints)? {
                None => None,
                Some(segments) => Some(Checkpoints { segments, blocks: indices(&blocks, device)? }),
            },
        })
    }
}

impl Resumed {
    fn new(slices: &[(&SequenceSlice, &SliceState)], device: &Device) -> Result<Option<Self>> {
        let (mut slots, mut blocks) = (Vec::new(), Vec::new());
        for (_, state) in slices {
            if let Some(resume) = &state.resume {
                slots.push(state.slot);
                blocks.extend(resume.iter().map(|block| block.0));
            }
        }
        if slots.is_empty() {
            return Ok(None);
        }
        let count = slots.len();
        let (slots, blocks) = (indices(&slots, device)?, indices(&blocks, device)?);
        Ok(Some(Self { count, slots, blocks }))
    }
}

/// The positions that a tap of the convolutions in the KV store reads at each row.
#[derive(Debug)]
pub(crate) struct TapSlots {
    /// Their slots, `[rows]` in u32; 0 where the sequence has no such position.
    pub(crate) slots: Tensor,
    /// Whether the sequence has such a position, `[rows, 1]` in u8.
    pub(crate) exist: Tensor,
}

impl TapSlots {
    /// Uploads the slots of each of `taps` taps, the oldest position first.
    pub(crate) fn new(
        batch: &StepBatch,
        taps: usize,
        block_size: usize,
        device: &Device,
    ) -> Result<Vec<Self>> {
        let of_tap = |tap: usize| {
            let slots = batch.sequences.iter().flat_map(|slice| {
                (slice.start + 1..=slice.start + slice.token_count).map(move |end| {
                    let position = (end + tap).checked_sub(taps)?;
                    Some(slot(&slice.block_table, position, block_size))
                })
            });
            let slots: Vec<Option<u32>> = slots.collect();
            let exist: Vec<u8> = slots.iter().map(|slot| u8::from(slot.is_some())).collect();
            let slots: Vec<u32> = slots.into_iter().map(Option::unwrap_or_default).collect();
            let exist = Tensor::from_vec(exist, (slots.len(), 1), device)?;
            Ok(Self { slots: indices(&slots, device)?, exist })
        };
        (0..taps).map(of_tap).collect()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use stolon_backend::StateCheckpoint;
    use stolon_kvcache::BlockId;

    use super::*;

    fn numbers(tensor: &Tensor) -> Vec<u32> {
        tensor.to_dtype(DType::U32).and_then(|tensor| tensor.flatten_all()?.to_vec1()).expect("u32")
    }

    fn slice(start: usize, token_count: usize, state: SliceState) -> SequenceSlice {
        SequenceSlice { token_count, start, state: Some(state), ..SequenceSlice::default() }
    }

    /// Goal: checkpoints divide a slice into segments, also one at its end; each row and each
    /// segment has the right inputs, across the begin of the slice.
    #[test]
    fn checkpoints_divide_slices_into_segments() {
        let checkpoint = |len, block| StateCheckpoint { len, blocks: vec![BlockId(block)] };
        let batch = StepBatch {
            tokens: vec![0; 7],
            sequences: vec![
                slice(
                    0,
                    2,
                    SliceState { checkpoints: vec![checkpoint(2, 8)], ..SliceState::in_slot(5) },
                ),
                slice(
                    10,
                    5,
                    SliceState {
                        slot: 1,
                        resume: Some(vec![BlockId(3)]),
                        checkpoints: vec![checkpoint(11, 7), checkpoint(13, 6)],
                        proposed: 0,
                    },
                ),
            ],
        };
        let inputs = StateInputs::new(&batch, 3, &Device::Cpu).expect("uploaded");
        assert_eq!(numbers(&inputs.slots), [5, 1]);
        assert_eq!(inputs.new_slots.as_ref().map(numbers), Some(vec![5]));
        let resumed = inputs.resumed.expect("one sequence");
        assert_eq!((resumed.count, numbers(&resumed.slots)), (1, vec![1]));
        assert_eq!(numbers(&resumed.blocks), [3]);
        // Inputs 0 and 1 belong to the first state, 2 and 3 to the second, and 4 to 10 to the rows.
        let taps: Vec<_> = inputs.taps.iter().map(numbers).collect();
        assert_eq!(taps[0], [0, 1, 2, 3, 6, 7, 8]);
        assert_eq!(taps[1], [1, 4, 3, 6, 7, 8, 9]);
        assert_eq!(taps[2], [4, 5, 6, 7, 8, 9, 10]);
        // The first segment of each slice, then the first row of each segment.
        assert_eq!(numbers(&inputs.segments), [0, 1, 4, 0, 2, 3, 5, 7]);
        assert_eq!(numbers(&inputs.kept_inputs), [4, 5, 3, 6, 7, 8, 9, 10]);
        match &inputs.ends {
            Selection::Rows(rows) => assert_eq!(numbers(rows), [0, 3]),
            Selection::All => panic!("there are more segments than slices"),
        }
        let checkpoints = inputs.checkpoints.expect("three");
        assert_eq!(numbers(&checkpoints.segments), [0, 1, 2]);
        assert_eq!(numbers(&checkpoints.blocks), [8, 7, 6]);
    }

    /// Goal: a tap reads the slot of its position in the blocks of the sequence, and none before
    /// the start.
    #[test]
    fn taps_read_the_last_positions_of_the_same_sequence() {
        let slice = |start, token_count, table: &[u32]| SequenceSlice {
            token_count,
            start,
            block_table: table.iter().copied().map(BlockId).collect(),
            ..SequenceSlice::default()
        };
        let batch = StepBatch {
            tokens: vec![0; 4],
            sequences: vec![slice(0, 2, &[7]), slice(4, 2, &[5, 2])],
        };
        let taps = TapSlots::new(&batch, 3, 4, &Device::Cpu).expect("uploaded");
        let got: Vec<_> =
            taps.iter().map(|tap| (numbers(&tap.slots), numbers(&tap.exist))).collect();
        let expected = [
            (vec![0, 0, 22, 23], vec![0, 0, 1, 1]),
            (vec![0, 28, 23, 8], vec![0, 1, 1, 1]),
            (vec![28, 29, 8, 9], vec![1, 1, 1, 1]),
        ];
        assert_eq!(got, expected);
    }
}
