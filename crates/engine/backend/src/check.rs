//! Checks a batch against the contract of [`StepBatch`] before anything is written.
//!
//! Every backend calls [`BatchChecker::check`] first, so that all backends refuse the same batches
//! with the same messages. The checker keeps one word per block between calls, so that checking
//! does not allocate.

mod images;

use stolon_kvcache::BlockId;

use crate::{
    BackendError, BackendSpec, LogitRows, SequenceSlice, SliceState, StateSpec, StepBatch,
};
use images::check_images;

/// Finds violations of the contract of [`StepBatch`]. A backend keeps one for its KV store.
#[derive(Debug)]
pub struct BatchChecker {
    /// `[block_count]`: 1 + the index of the slice that writes the block in the batch being
    /// checked, or 0 if no slice writes it. All zeros between calls.
    writers: Vec<u32>,
    /// Whether slices may have adapters.
    adapters: bool,
}

impl BatchChecker {
    /// Creates a checker for a KV store of `block_count` blocks.
    #[must_use]
    pub fn new(block_count: usize) -> Self {
        Self { writers: vec![0; block_count], adapters: false }
    }

    /// A checker that accepts slices with adapters. The backend has to check that each is its own.
    #[must_use]
    pub fn with_adapters(self) -> Self {
        Self { adapters: true, ..self }
    }

    /// Checks `batch` against `spec` and returns the number of logit rows that it requests.
    ///
    /// # Errors
    /// [`BackendError::MalformedBatch`] with the index of the slice, the expected and the actual
    /// value.
    ///
    /// # Panics
    /// If `spec.block_count` is larger than the count that the checker was created with and the
    /// batch names such a block.
    pub fn check(&mut self, batch: &StepBatch, spec: &BackendSpec) -> Result<usize, BackendError> {
        let rows = check_slices(batch, spec)?;
        let adapted = batch.sequences.iter().position(|slice| slice.adapter.is_some());
        if let Some(index) = adapted.filter(|_| !self.adapters) {
            return Err(malformed(index, format_args!("this backend does not support adapters")));
        }
        let outcome = self.claim_written(batch, spec.block_size);
        self.release_written(batch, spec.block_size);
        outcome.map(|()| rows)
    }

    /// Marks every written block with its slice, and returns an error if a written block occurs
    /// anywhere else in the batch.
    fn claim_written(&mut self, batch: &StepBatch, block_size: usize) -> Result<(), BackendError> {
        for (index, slice) in batch.sequences.iter().enumerate() {
            for block in written_blocks(slice, block_size) {
                let writer = &mut self.writers[block.0 as usize];
                if *writer != 0 {
                    let other = *writer - 1;
                    return Err(malformed(
                        index,
                        format_args!("block {} is also written by slice {other}", block.0),
                    ));
                }
                *writer = index as u32 + 1;
            }
        }
        for (index, slice) in batch.sequences.iter().enumerate() {
            let written = written_table(slice, block_size);
            for (table_index, block) in slice.block_table.iter().enumerate() {
                let writer = self.writers[block.0 as usize];
                let is_own_write = writer as usize == index + 1 && written.contains(&table_index);
                if writer != 0 && !is_own_write {
                    let other = writer - 1;
                    return Err(malformed(
                        index,
                        format_args!(
                            "block_table[{table_index}] is block {}, which slice {other} writes",
                            block.0
                        ),
                    ));
                }
            }
            let resumed = slice.state.iter().flat_map(|state| &state.resume).flatten();
            for block in resumed {
                let writer = self.writers[block.0 as usize];
                if let Some(other) = writer.checked_sub(1) {
                    let reason =
                        format_args!("resumes from block {}, which slice {other} writes", block.0);
                    return Err(malformed(index, reason));
                }
            }
        }
        Ok(())
    }

    fn release_written(&mut self, batch: &StepBatch, block_size: usize) {
        for slice in &batch.sequences {
            for block in written_blocks(slice, block_size) {
                self.writers[block.0 as usize] = 0;
            }
        }
    }
}

/// Checks each slice on its own and returns the number of logit rows.
fn check_slices(batch: &StepBatch, spec: &BackendSpec) -> Result<usize, BackendError> {
    let mut rows = 0;
    let mut rest = batch.tokens.as_slice();
    check_slots(batch, spec)?;
    for (index, slice) in batch.sequences.iter().enumerate() {
        let count = slice.token_count;
        if count == 0 || count > rest.len() {
            return Err(malformed(
                index,
                format_args!(
                    "expected 1 to {} tokens (the rest of the batch), got {count}",
                    rest.len()
                ),
            ));
        }
        let (tokens, others) = rest.split_at(count);
        rest = others;
        check_positions(index, slice, spec)?;
        check_images(index, slice, spec)?;
        check_tokens(index, slice, tokens, spec)?;
        check_state(index, slice, spec)?;
        if spec.hidden_size.is_none() && !slice.logit_rows.hidden(count).is_empty() {
            let rows = slice.logit_rows;
            return Err(malformed(index, format_args!("expected rows of logits, got {rows:?}")));
        }
        if !spec.draws && slice.logit_rows.draw().is_some() {
            let rows = slice.logit_rows;
            return Err(malformed(index, format_args!("expected whole rows, got {rows:?}")));
        }
        if spec.regions.is_none() && slice.logit_rows == LogitRows::Regions {
            return Err(malformed(index, format_args!("this backend has no regions")));
        }
        rows += slice.logit_rows.logits(count).len();
    }
    if !rest.is_empty() {
        return Err(BackendError::MalformedBatch(format!(
            "expected the slices to cover all {} tokens, got slices of {} tokens",
            batch.tokens.len(),
            batch.tokens.len() - rest.len()
        )));
    }
    Ok(rows)
}

/// Checks one slice's positions and block table.
fn check_positions(
    index: usize,
    slice: &SequenceSlice,
    spec: &BackendSpec,
) -> Result<(), BackendError> {
    let end = slice.start.saturating_add(slice.token_count);
    if end > spec.max_positions {
        return Err(malformed(
            index,
            format_args!("expected at most {} positions, got {end}", spec.max_positions),
        ));
    }
    if slice.write_from < slice.start || slice.write_from > end {
        return Err(malformed(
            index,
            format_args!(
                "expected write_from in {}..={end}, got {}",
                slice.start, slice.write_from
            ),
        ));
    }
    let needed = end.div_ceil(spec.block_size);
    if slice.block_table.len() < needed {
        return Err(malformed(
            index,
            format_args!(
                "expected at least {needed} blocks for {end} positions, got {}",
                slice.block_table.len()
            ),
        ));
    }
    if let Some(block) = slice.block_table.iter().find(|b| b.0 as usize >= spec.block_count) {
        return Err(malformed(
            index,
            format_args!("expected block ids below {}, got {}", spec.block_count, block.0),
        ));
    }
    Ok(())
}

/// Checks that the tokens of a slice, except at the positions of images, are in the vocabulary, or
/// coordinates and sizes that the backend has.
fn check_tokens(
    index: usize,
    slice: &SequenceSlice,
    tokens: &[u32],
    spec: &BackendSpec,
) -> Result<(), BackendError> {
    let is_outside = |(_, token): &(usize, &u32)| !spec.has_token(**token);
    let in_image = |offset: usize| {
        slice.images.iter().any(|image| image.positions().contains(&(slice.start + offset)))
    };
    match tokens.iter().enumerate().filter(is_outside).find(|(offset, _)| !in_image(*offset)) {
        None => Ok(()),
        Some((_, token)) => {
            let reason = format_args!("expected token ids below {}, got {token}", spec.vocab_size);
            Err(malformed(index, reason))
        }
    }
}

/// Checks that each slot of states exists and is used by one slice.
fn check_slots(batch: &StepBatch, spec: &BackendSpec) -> Result<(), BackendError> {
    let Some(StateSpec { slots, .. }) = spec.state else { return Ok(()) };
    let mut used = vec![false; slots];
    for (index, slice) in batch.sequences.iter().enumerate() {
        let Some(state) = &slice.state else {
            return Err(malformed(index, format_args!("expected a slot for its state, got none")));
        };
        match used.get_mut(state.slot as usize) {
            Some(used) if !*used => *used = true,
            found => {
                let problem = if found.is_some() { "which another slice has" } else { "too large" };
                let reason = format_args!(
                    "expected a slot of its own below {slots}, got {}, {problem}",
                    state.slot
                );
                return Err(malformed(index, reason));
            }
        }
    }
    Ok(())
}

/// Checks the checkpoints that a slice resumes from and writes.
fn check_state(
    index: usize,
    slice: &SequenceSlice,
    spec: &BackendSpec,
) -> Result<(), BackendError> {
    let Some(SliceState { resume, checkpoints, proposed, .. }) = &slice.state else {
        return Ok(());
    };
    if spec.state.is_none() {
        return Err(malformed(index, format_args!("expected no state, which this model has not")));
    }
    let proposed_max = if spec.proposals { slice.token_count - 1 } else { 0 };
    if *proposed > proposed_max {
        let reason =
            format_args!("expected at most {proposed_max} proposed tokens, got {proposed}");
        return Err(malformed(index, reason));
    }
    if resume.is_some() && slice.start == 0 {
        return Err(malformed(index, format_args!("resumes from a checkpoint at position 0")));
    }
    let mut before = slice.start;
    for checkpoint in checkpoints {
        let end = slice.start + slice.token_count - proposed;
        if checkpoint.len <= before || checkpoint.len > end {
            let reason = format_args!(
                "expected a checkpoint in {}..={end}, got {}",
                before + 1,
                checkpoint.len
            );
            return Err(malformed(index, reason));
        }
        before = checkpoint.len;
    }
    let needed = spec.checkpoint_blocks();
    for blocks in resume.iter().chain(checkpoints.iter().map(|checkpoint| &checkpoint.blocks)) {
        if blocks.len() != needed {
            let reason =
                format_args!("expected checkpoints of {needed} blocks, got {}", blocks.len());
            return Err(malformed(index, reason));
        }
        if let Some(block) = blocks.iter().find(|block| block.0 as usize >= spec.block_count) {
            let reason =
                format_args!("expected block ids below {}, got {}", spec.block_count, block.0);
            return Err(malformed(index, reason));
        }
    }
    Ok(())
}

/// Checks the arguments of [`Backend::write_blocks`](crate::Backend::write_blocks): block ids, and
/// the number of buffers and their sizes in bytes.
///
/// # Errors
/// [`BackendError::MalformedBatch`] with the expected and the actual value.
pub fn check_write(
    spec: &BackendSpec,
    blocks: &[BlockId],
    from: &[&[u8]],
) -> Result<(), BackendError> {
    check_read(spec, blocks, from.iter().map(|bytes| bytes.len()).sum())?;
    let wrong = from.iter().find(|bytes| bytes.len() != spec.block_bytes);
    if from.len() == blocks.len() && wrong.is_none() {
        return Ok(());
    }
    Err(BackendError::MalformedBatch(format!(
        "copy of {} KV blocks: expected as many buffers of {} bytes, got {} of different sizes",
        blocks.len(),
        spec.block_bytes,
        from.len()
    )))
}

/// Checks the arguments of [`Backend::read_blocks`](crate::Backend::read_blocks): block ids, and
/// the size of the buffer in bytes.
///
/// # Errors
/// [`BackendError::MalformedBatch`] with the expected and the actual value.
pub fn check_read(
    spec: &BackendSpec,
    blocks: &[BlockId],
    buffer_len: usize,
) -> Result<(), BackendError> {
    if let Some(block) = blocks.iter().find(|block| block.0 as usize >= spec.block_count) {
        return Err(BackendError::MalformedBatch(format!(
            "copy of KV blocks: expected block ids below {}, got {}",
            spec.block_count, block.0
        )));
    }
    let expected = blocks.len().checked_mul(spec.block_bytes);
    if expected != Some(buffer_len) {
        return Err(BackendError::MalformedBatch(format!(
            "copy of {} KV blocks: expected a buffer of {} bytes each, got {buffer_len} bytes",
            blocks.len(),
            spec.block_bytes
        )));
    }
    Ok(())
}

/// The blocks that the step writes for a slice: keys and values, and checkpoints.
fn written_blocks(slice: &SequenceSlice, block_size: usize) -> impl Iterator<Item = &BlockId> {
    let checkpoints = slice.state.iter().flat_map(|state| &state.checkpoints);
    let checkpoints = checkpoints.flat_map(|checkpoint| &checkpoint.blocks);
    slice.block_table[written_table(slice, block_size)].iter().chain(checkpoints)
}

/// Indices into the slice's block table of the blocks that the step writes.
fn written_table(slice: &SequenceSlice, block_size: usize) -> std::ops::Range<usize> {
    let end = slice.start + slice.token_count;
    if slice.write_from == end {
        return 0..0;
    }
    slice.write_from / block_size..end.div_ceil(block_size)
}

fn malformed(slice: usize, reason: std::fmt::Arguments<'_>) -> BackendError {
    BackendError::MalformedBatch(format!("slice {slice}: {reason}"))
}

#[cfg(test)]
mod tests;
