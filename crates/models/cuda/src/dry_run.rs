//! Runs the largest steps that are expected once, before the KV store gets the rest of the memory.
//! This measures the memory that a step needs in addition to the weights, and lets libraries
//! allocate the memory that they keep.

use candle_core::Result;
use stolon_backend::{Draw, LogitRows, SequenceSlice, SliceState, StepBatch};
use stolon_kvcache::BlockId;

use crate::CandleOptions;
use crate::attention::Attentions;
use crate::decoder::Decoder;
use crate::kv_store::StoreShape;
use crate::memory;
use crate::state_store::{StateShape, Stores};

/// The largest memory in bytes that a step needs in addition to the weights. If the device does not
/// report its memory, this returns `None` without running anything.
pub(crate) fn step_bytes(
    decoder: &mut Decoder,
    shape: &StoreShape,
    attentions: &Attentions,
    options: &CandleOptions,
) -> Result<Option<u64>> {
    let device = decoder.device().clone();
    // One step returns whole rows of logits, the other one only tokens.
    let states = StateShape::of(decoder.config());
    let has_states = states.bytes() > 0;
    let [whole, drawn] = [LogitRows::Last, LogitRows::Drawn(Draw::GREEDY)]
        .map(|rows| largest_step(options, decoder.config().max_positions, (rows, has_states)));
    let slots = whole.sequences.len();
    let shape = shape.with_blocks(block_count(&whole));
    let store_bytes = shape.block_count * shape.block_bytes() + slots * states.bytes();
    let peak = memory::peak_of(&device, || {
        let mut stores = Stores::new(shape, (states, slots), &device)?;
        decoder.forward(&whole, &mut stores, attentions)?;
        decoder.forward(&drawn, &mut stores, attentions).map(drop)
    })?;
    Ok(peak.map(|peak| peak.saturating_sub(store_bytes as u64)))
}

/// A step with as many decodes as sequences may run, and prefill chunks for the remaining tokens.
/// If sequences have states, each has a slot of its own.
fn largest_step(
    options: &CandleOptions,
    max_positions: usize,
    (logit_rows, has_states): (LogitRows, bool),
) -> StepBatch {
    let decodes = options.step_sequences.min(options.step_tokens);
    // All decodes read the first block and write nothing.
    let decode = SequenceSlice {
        token_count: 1,
        start: 0,
        write_from: 1,
        block_table: vec![BlockId(0)],
        logit_rows,
        ..SequenceSlice::default()
    };
    let mut sequences = vec![decode; decodes];
    let (mut block, mut left) = (1, options.step_tokens - decodes);
    while left > 0 {
        let token_count = left.min(max_positions);
        let end = block + token_count.div_ceil(options.block_size) as u32;
        sequences.push(SequenceSlice {
            token_count,
            start: 0,
            write_from: 0,
            block_table: (block..end).map(BlockId).collect(),
            logit_rows: LogitRows::None,
            ..SequenceSlice::default()
        });
        (block, left) = (end, left - token_count);
    }
    if has_states {
        for (slot, slice) in (0..).zip(&mut sequences) {
            slice.state = Some(SliceState::in_slot(slot));
        }
    }
    StepBatch { tokens: vec![0; options.step_tokens], sequences }
}

/// The number of blocks that a step needs.
fn block_count(batch: &StepBatch) -> usize {
    let blocks = batch.sequences.iter().flat_map(|slice| &slice.block_table);
    blocks.max().map_or(0, |last| last.0 as usize + 1)
}

#[cfg(test)]
mod tests {
    use stolon_backend::{BackendSpec, BatchChecker};

    use super::*;

    /// Goal: the largest step has as many tokens and sequences as the options say, and the batch
    /// checker accepts it.
    #[test]
    fn the_largest_step_is_valid() {
        for (step_tokens, step_sequences, max_positions) in
            [(2048, 32, 512), (100, 1, 4096), (16, 64, 32), (7, 7, 1), (33, 5, 10)]
        {
            let options = CandleOptions { step_tokens, step_sequences, ..CandleOptions::default() };
            for rows in [LogitRows::Last, LogitRows::Drawn(Draw::GREEDY)] {
                let batch = largest_step(&options, max_positions, (rows, false));
                assert_eq!(batch.tokens.len(), step_tokens);
                let decodes = batch.sequences.iter().filter(|slice| slice.logit_rows == rows);
                assert_eq!(decodes.count(), step_sequences.min(step_tokens));
                let spec = BackendSpec {
                    vocab_size: 1,
                    max_positions,
                    block_size: options.block_size,
                    block_count: block_count(&batch),
                    block_bytes: 1,
                    hidden_size: None,
                    draws: true,
                    ..BackendSpec::default()
                };
                BatchChecker::new(spec.block_count).check(&batch, &spec).expect("a valid batch");
            }
        }
    }
}
