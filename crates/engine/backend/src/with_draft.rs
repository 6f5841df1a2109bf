//! [`WithDraft`]: a model with a smaller one that guesses its tokens.
//!
//! Both have a KV store with the same number and size of blocks in positions. A block id means
//! the same positions in both, so one prefix tree, one allocator and one accounting serve both.
//!
//! The model computes steps as it does alone. The draft model computes nothing in them. Its keys and
//! values are computed when tokens are guessed: first those of all tokens of the sequence that it
//! does not have yet, then one forward pass for each guessed token. So a request for which nothing
//! is guessed costs nothing, and a prefix that another request has already drafted with is not
//! computed again.
//!
//! [`Written`] has the token for which the draft model has written each position. The positions of a
//! sequence up to the first one with another token are known. This covers everything that can
//! happen: positions of rejected tokens, blocks that were released and reserved again, prefixes that
//! other requests have computed, and blocks that were read from another tier.
//!
//! Guessed tokens are verified by the model, so no content of the draft model's KV store changes an
//! answer.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stolon_kvcache::BlockId;

use crate::{
    AdapterLoader, Backend, BackendError, BackendSpec, DraftOutput, DraftTask, ImageEmbeddings,
    ImageInput, KvFormat, LogitRows, SequenceSlice, StateSpec, StepBatch, StepOutput, check_drafts,
    check_read, check_write,
};

#[cfg(test)]
mod tests;

/// Why a backend cannot guess the tokens of another one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DraftError {
    /// The model's backend cannot verify guessed tokens ([`BackendSpec::proposals`]).
    #[error("expected a model whose backend takes proposed tokens, got one that does not")]
    Model,
    /// The draft model has a recurrent state, or keeps windows in states.
    #[error(
        "expected a draft model without recurrent states, got one with states of {bytes} bytes"
    )]
    State {
        /// Size of its state.
        bytes: usize,
    },
    /// The draft model cannot continue after a rejected token, or computes whole prompts only.
    #[error("expected a draft model that generates text token by token, got another one")]
    Draft,
    /// The KV stores differ.
    #[error(
        "expected a draft model with {} KV blocks of {} positions, got {} of {}",
        expected.0, expected.1, got.0, got.1
    )]
    Blocks {
        /// Number of blocks of the model, and positions per block.
        expected: (usize, usize),
        /// The same of the draft model.
        got: (usize, usize),
    },
}

/// A model with a draft model, which guesses tokens for it ([`Backend::draft`]).
pub struct WithDraft {
    spec: BackendSpec,
    model: Box<dyn Backend>,
    draft: Box<dyn Backend>,
    written: Written,
}

impl std::fmt::Debug for WithDraft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WithDraft").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl WithDraft {
    /// Combines a model and a draft model, whose token ids must mean the same.
    ///
    /// # Errors
    /// [`DraftError`] if the draft model cannot be used for the model.
    pub fn new(model: Box<dyn Backend>, draft: Box<dyn Backend>) -> Result<Self, DraftError> {
        let (own, other) = (model.spec(), draft.spec());
        if !own.proposals {
            return Err(DraftError::Model);
        }
        if let Some(StateSpec { bytes, .. }) = other.state {
            return Err(DraftError::State { bytes });
        }
        if !other.proposals || other.whole_prompts {
            return Err(DraftError::Draft);
        }
        let blocks = |spec: &BackendSpec| (spec.block_count, spec.block_size);
        if blocks(own) != blocks(other) {
            return Err(DraftError::Blocks { expected: blocks(own), got: blocks(other) });
        }
        let written = Written::new(own.block_count, own.block_size);
        let block_bytes =
            own.block_bytes + Self::added_block_bytes(own.block_size, other.block_bytes);
        // A checkpoint takes as many blocks as it does without a draft model.
        let state = own
            .state
            .map(|state| StateSpec { bytes: own.checkpoint_blocks() * block_bytes, ..state });
        let spec = BackendSpec { block_bytes, state, draft_model: true, ..own.clone() };
        Ok(Self { spec, model, draft, written })
    }

    /// By how many bytes a draft model makes each block larger: its own part of
    /// `draft_block_bytes`, and the tokens for which it was computed.
    #[must_use]
    pub fn added_block_bytes(block_size: usize, draft_block_bytes: usize) -> usize {
        draft_block_bytes + block_size * TOKEN_BYTES
    }

    /// Number of bytes of a block in the model's KV store.
    fn model_bytes(&self) -> usize {
        self.model.spec().block_bytes
    }

    /// Number of bytes of a block in the KV stores of both.
    fn both_bytes(&self) -> usize {
        self.model_bytes() + self.draft.spec().block_bytes
    }

    /// The positions of a task in the first forward pass, at most `left`, and the number of leading
    /// positions that the draft model has. `None` if the task takes no part.
    fn first_positions(&self, task: &DraftTask, left: usize) -> Option<(Range<usize>, usize)> {
        let DraftTask { tokens, block_table, count, missing_max } = task;
        let spec = self.draft.spec();
        if *count == 0 || tokens.len() > spec.max_positions {
            return None;
        }
        let known = self.written.known(block_table, tokens);
        // The last token is computed in any case, because its logits are needed.
        let start = known.min(tokens.len() - 1);
        let missing = tokens.len() - start;
        let is_foreign = |token: &u32| *token as usize >= spec.vocab_size;
        if missing > *missing_max || left == 0 || tokens[start..].iter().any(is_foreign) {
            return None;
        }
        Some((start..start + missing.min(left), known))
    }

    /// Adds a slice of the draft model to `batch`.
    fn add_slice(
        &self,
        batch: &mut StepBatch,
        (tokens, start, write_from): (&[u32], usize, usize),
        block_table: &[BlockId],
        logit_rows: LogitRows,
    ) {
        let blocks = (start + tokens.len()).div_ceil(self.spec.block_size);
        batch.tokens.extend_from_slice(tokens);
        batch.sequences.push(SequenceSlice {
            token_count: tokens.len(),
            start,
            write_from,
            block_table: block_table[..blocks].to_vec(),
            logit_rows,
            ..SequenceSlice::default()
        });
    }

    /// The first forward pass: the missing tokens of each task, at most `budget` together. Returns
    /// the tasks from which tokens can be guessed, with a row of logits for each.
    fn first_pass(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        output: &mut DraftOutput,
    ) -> Result<(Vec<usize>, Vec<f32>), BackendError> {
        let begun = Instant::now();
        let mut batch = StepBatch::default();
        let (mut parts, mut complete) = (Vec::new(), Vec::new());
        // A prefix that several sequences share is computed for one of them.
        let mut claimed: HashSet<BlockId> = HashSet::new();
        for (index, task) in tasks.iter().enumerate() {
            let left = budget - batch.tokens.len();
            let Some((positions, known)) = self.first_positions(task, left) else { continue };
            let Range { start, end } = positions;
            let size = self.spec.block_size;
            let blocks = &task.block_table[start / size..end.div_ceil(size)];
            if blocks.iter().any(|block| claimed.contains(block)) {
                continue;
            }
            let is_complete = end == task.tokens.len();
            if known < end {
                claimed.extend(blocks);
            }
            complete.extend(is_complete.then_some(index));
            let rows = if is_complete { LogitRows::Last } else { LogitRows::None };
            let slice = (&task.tokens[start..end], start, known.min(end).max(start));
            self.add_slice(&mut batch, slice, &task.block_table, rows);
            parts.push((index, known, end));
        }
        if batch.sequences.is_empty() {
            return Ok((complete, Vec::new()));
        }
        // If the pass fails, they are not known.
        for (index, known, _) in &parts {
            self.written.forget_from(&tasks[*index].block_table, *known);
        }
        let logits = self.draft.step(&batch)?.logits;
        for (index, known, end) in parts {
            let DraftTask { tokens, block_table, .. } = &tasks[index];
            if known < end {
                self.written.note(block_table, known, &tokens[known..end]);
            }
        }
        (output.first_tokens, output.first) = (batch.tokens.len(), begun.elapsed());
        Ok((complete, logits))
    }
}

impl Backend for WithDraft {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn adapters(&self) -> Option<Arc<dyn AdapterLoader>> {
        self.model.adapters()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        self.model.step(batch)
    }

    fn draft(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        choose: &mut dyn FnMut(usize, &mut [f32]) -> Option<u32>,
    ) -> Result<DraftOutput, BackendError> {
        check_drafts(tasks, &self.spec)?;
        let mut output = DraftOutput::default();
        output.tokens.resize(tasks.len(), Vec::new());
        let (mut active, mut rows) = self.first_pass(tasks, budget, &mut output)?;
        let begun = Instant::now();
        let (width, vocab_size) = (self.draft.spec().vocab_size, self.spec.vocab_size);
        let max_positions = self.draft.spec().max_positions;
        loop {
            let mut batch = StepBatch::default();
            let mut next = Vec::new();
            for (row, index) in rows.chunks_exact_mut(width.max(1)).zip(active) {
                let row = &mut row[..width.min(vocab_size)];
                let Some(token) = choose(index, row) else { continue };
                let DraftTask { tokens, block_table, count, .. } = &tasks[index];
                output.tokens[index].push(token);
                let position = tokens.len() + output.tokens[index].len() - 1;
                let room = max_positions.min(block_table.len() * self.spec.block_size);
                if output.tokens[index].len() < *count
                    && position < room
                    && (token as usize) < width
                {
                    let slice = (&[token][..], position, position);
                    self.add_slice(&mut batch, slice, block_table, LogitRows::Last);
                    next.push((index, position, token));
                }
            }
            if next.is_empty() {
                break;
            }
            rows = self.draft.step(&batch)?.logits;
            for (index, position, token) in &next {
                self.written.note(&tasks[*index].block_table, *position, &[*token]);
            }
            active = next.into_iter().map(|(index, ..)| index).collect();
            output.passes += 1;
        }
        if output.passes > 0 {
            output.later = begun.elapsed();
        }
        Ok(output)
    }

    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        time: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        self.model.encode(image, time)
    }

    fn sampling_threads(&self) -> usize {
        self.model.sampling_threads()
    }

    fn discard_blocks(&mut self, blocks: &[BlockId]) {
        self.model.discard_blocks(blocks);
        self.draft.discard_blocks(blocks);
        blocks.iter().for_each(|block| self.written.forget(*block));
    }

    /// The format of both models together.
    fn kv_format(&self) -> Option<KvFormat> {
        let (own, other) = (self.model.kv_format()?, self.draft.kv_format()?);
        let description = format!("{}; draft model: {}", own.description(), other.description());
        Some(KvFormat::new(description, move || {
            let mut fingerprint =
                blake3::Hasher::new_derive_key("stolon 2026 KV with a draft model");
            fingerprint.update(&own.fingerprint()?).update(&other.fingerprint()?);
            Ok(*fingerprint.finalize().as_bytes())
        }))
    }

    /// A block has the bytes of the model, those of the draft model, and the tokens for which the
    /// draft model has computed its part. If it has not computed the whole block, its part is zero.
    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        check_read(&self.spec, blocks, to.len())?;
        let (model_bytes, both_bytes) = (self.model_bytes(), self.both_bytes());
        for (block, to) in blocks.iter().zip(to.chunks_exact_mut(self.spec.block_bytes)) {
            let (both, tokens) = to.split_at_mut(both_bytes);
            let (own, other) = both.split_at_mut(model_bytes);
            self.model.read_blocks(&[*block], own)?;
            if self.written.is_complete(*block) {
                self.draft.read_blocks(&[*block], other)?;
                self.written.store(*block, tokens);
            } else {
                other.fill(0);
                tokens.fill(0xff);
            }
        }
        Ok(())
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        check_write(&self.spec, blocks, from)?;
        let (model_bytes, both_bytes) = (self.model_bytes(), self.both_bytes());
        blocks.iter().for_each(|block| self.written.forget(*block));
        let own: Vec<&[u8]> = from.iter().map(|bytes| &bytes[..model_bytes]).collect();
        self.model.write_blocks(blocks, &own)?;
        let other: Vec<&[u8]> = from.iter().map(|bytes| &bytes[model_bytes..both_bytes]).collect();
        self.draft.write_blocks(blocks, &other)?;
        for (block, bytes) in blocks.iter().zip(from) {
            self.written.restore(*block, &bytes[both_bytes..]);
        }
        Ok(())
    }
}

/// Size of a token id in stored blocks.
const TOKEN_BYTES: usize = size_of::<u32>();

/// The mark of a position that the draft model has not written. No token has this id.
const NOTHING: u32 = u32::MAX;

/// The tokens for which the draft model has written the positions of its KV store.
#[derive(Debug)]
struct Written {
    block_size: usize,
    /// `[block_count, block_size]`: a token id, or [`NOTHING`].
    tokens: Vec<u32>,
}

impl Written {
    fn new(block_count: usize, block_size: usize) -> Self {
        Self { block_size, tokens: vec![NOTHING; block_count * block_size] }
    }

    fn of(&self, block: BlockId) -> &[u32] {
        &self.tokens[block.0 as usize * self.block_size..][..self.block_size]
    }

    fn of_mut(&mut self, block: BlockId) -> &mut [u32] {
        &mut self.tokens[block.0 as usize * self.block_size..][..self.block_size]
    }

    /// Number of leading positions of a sequence that were written for its tokens.
    fn known(&self, table: &[BlockId], tokens: &[u32]) -> usize {
        let mut known = 0;
        for (tokens, block) in tokens.chunks(self.block_size).zip(table) {
            let equal = tokens.iter().zip(self.of(*block)).take_while(|(a, b)| a == b).count();
            known += equal;
            if equal < self.block_size {
                break;
            }
        }
        known
    }

    /// Notes that the positions of `tokens`, which begin at `start`, were written.
    fn note(&mut self, table: &[BlockId], start: usize, tokens: &[u32]) {
        for (position, token) in (start..).zip(tokens) {
            let index = position % self.block_size;
            self.of_mut(table[position / self.block_size])[index] = *token;
        }
    }

    /// Forgets the positions of a sequence from `start` on. Those after a token that was rejected
    /// were computed for other tokens before them.
    fn forget_from(&mut self, table: &[BlockId], start: usize) {
        let (first, index) = (start / self.block_size, start % self.block_size);
        for (number, block) in table.iter().enumerate().skip(first) {
            let kept = if number == first { index } else { 0 };
            self.of_mut(*block)[kept..].fill(NOTHING);
        }
    }

    fn forget(&mut self, block: BlockId) {
        self.of_mut(block).fill(NOTHING);
    }

    fn is_complete(&self, block: BlockId) -> bool {
        !self.of(block).contains(&NOTHING)
    }

    /// Writes the tokens of a block to `to`.
    fn store(&self, block: BlockId, to: &mut [u8]) {
        for (token, to) in self.of(block).iter().zip(to.as_chunks_mut::<TOKEN_BYTES>().0) {
            *to = token.to_le_bytes();
        }
    }

    /// The reverse of [`Written::store`].
    fn restore(&mut self, block: BlockId, from: &[u8]) {
        for (token, from) in self.of_mut(block).iter_mut().zip(from.as_chunks::<TOKEN_BYTES>().0) {
            *token = u32::from_le_bytes(*from);
        }
    }
}
