//! Runs the largest steps that are expected once, before the KV store gets the rest of the memory.
//! This measures the memory that a step needs in addition to the weights, and lets libraries
//! allocate the memory that they keep.

use candle_core::Result;
use stolon_backend::{Draw, LogitRows, SequenceSlice, StepBatch};
use stolon_kvcache::BlockId;

use crate::CandleOptions;
use crate::attention::Attention;
use crate::decoder::Decoder;
use crate::kv_store::{KvShape, KvStore};
use crate::memory;

/// The largest memory in bytes that a step needs in addition to the weights. If the device does not
/// report its memory, this returns `None` without running anything.
pub(crate) fn step_bytes(
    decoder: &mut Decoder,
    shape: &KvShape,
    attention: Attention,
    options: &CandleOptions,
) -> Result<Option<u64>> {
    let device = decoder.device().clone();
    // One step returns whole rows of logits, the other one only tokens.
    let [whole, drawn] = [LogitRows::Last, LogitRows::Drawn(Draw::GREEDY)]
        .map(|rows| largest_step(options, decoder.config().max_positions, rows));
    let shape = KvShape { block_count: block_count(&whole), ..*shape };
    let peak = memory::peak_of(&device, || {
        let mut kv = KvStore::new(shape, &device)?;
        decoder.forward(&whole, &mut kv, attention)?;
        decoder.forward(&drawn, &mut kv, attention).map(drop)
    })?;
    let kv_bytes = (shape.block_count * shape.block_bytes()) as u64;
    Ok(peak.map(|peak| peak.saturating_sub(kv_bytes)))
}

/// A step with as many decodes as sequences may run, and prefill chunks for the remaining tokens.
fn largest_step(options: &CandleOptions, max_positions: usize, logit_rows: LogitRows) -> StepBatch {
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
                let batch = largest_step(&options, max_positions, rows);
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
