//! Checks a batch against the contract of [`StepBatch`] before anything is written.
//!
//! Every backend calls it first, so that they all refuse the same batches with the same words.
//! It keeps a mark a block between calls, so that checking allocates nothing.

use crate::{BackendError, BackendSpec, LogitRows, SequenceSlice, StepBatch};

/// Finds contract violations of a batch.
#[derive(Debug)]
pub struct BatchChecker {
    /// For each block of the store: 1 + the index of the slice that writes it in the batch being
    /// checked, 0 for none. All zeros between calls.
    writers: Vec<u32>,
}

impl BatchChecker {
    /// A checker for a store of `block_count` blocks.
    #[must_use]
    pub fn new(block_count: usize) -> Self {
        Self { writers: vec![0; block_count] }
    }

    /// Checks `batch` against `spec` and returns the number of logit rows it asks for.
    ///
    /// # Errors
    /// [`BackendError::MalformedBatch`] naming the slice, what was expected and what came.
    pub fn check(&mut self, batch: &StepBatch, spec: &BackendSpec) -> Result<usize, BackendError> {
        let rows = check_slices(batch, spec)?;
        let outcome = self.claim_written(batch, spec.block_size);
        self.release_written(batch, spec.block_size);
        outcome.map(|()| rows)
    }

    /// Marks every written block with its slice and finds blocks that anyone else holds too.
    fn claim_written(&mut self, batch: &StepBatch, block_size: usize) -> Result<(), BackendError> {
        for (index, slice) in batch.sequences.iter().enumerate() {
            for block in &slice.block_table[written_blocks(slice, block_size)] {
                let writer = &mut self.writers[block.0 as usize];
                if *writer != 0 {
                    let other = *writer - 1;
                    return Err(malformed(
                        index,
                        format_args!("it writes block {}, which slice {other} writes too", block.0),
                    ));
                }
                *writer = index as u32 + 1;
            }
        }
        for (index, slice) in batch.sequences.iter().enumerate() {
            let written = written_blocks(slice, block_size);
            for (place, block) in slice.block_table.iter().enumerate() {
                let writer = self.writers[block.0 as usize];
                if writer != 0 && !(writer as usize == index + 1 && written.contains(&place)) {
                    let other = writer - 1;
                    return Err(malformed(
                        index,
                        format_args!(
                            "place {place} of its table is block {}, which slice {other} writes",
                            block.0
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn release_written(&mut self, batch: &StepBatch, block_size: usize) {
        for slice in &batch.sequences {
            for block in &slice.block_table[written_blocks(slice, block_size)] {
                self.writers[block.0 as usize] = 0;
            }
        }
    }
}

/// Checks every slice by itself; returns the number of logit rows.
fn check_slices(batch: &StepBatch, spec: &BackendSpec) -> Result<usize, BackendError> {
    let mut rows = 0;
    let mut rest = batch.tokens.as_slice();
    for (index, slice) in batch.sequences.iter().enumerate() {
        let count = slice.token_count;
        if count == 0 || count > rest.len() {
            return Err(malformed(
                index,
                format_args!("expected 1 to {} tokens (what the batch has left), got {count}", {
                    rest.len()
                }),
            ));
        }
        let (tokens, others) = rest.split_at(count);
        rest = others;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= spec.vocab_size) {
            return Err(malformed(
                index,
                format_args!("expected token ids below {}, got {token}", spec.vocab_size),
            ));
        }
        check_places(index, slice, spec)?;
        rows += match slice.logit_rows {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => count,
        };
    }
    if !rest.is_empty() {
        return Err(BackendError::MalformedBatch(format!(
            "expected the slices to cover all {} tokens, got {} tokens more",
            batch.tokens.len(),
            rest.len()
        )));
    }
    Ok(rows)
}

/// Checks one slice's positions and block table.
fn check_places(
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

/// Places in the slice's block table that the step writes.
fn written_blocks(slice: &SequenceSlice, block_size: usize) -> std::ops::Range<usize> {
    let end = slice.start + slice.token_count;
    if slice.write_from == end {
        return 0..0;
    }
    slice.write_from / block_size..end.div_ceil(block_size)
}

fn malformed(slice: usize, what: std::fmt::Arguments<'_>) -> BackendError {
    BackendError::MalformedBatch(format!("slice {slice}: {what}"))
}

#[cfg(test)]
mod tests;
