//! A deterministic backend for tests and simulations. It has no weights, but a KV store whose
//! contents can be verified.
//!
//! In place of a key and a value, each position stores a *mark*: a hash of its token, its position
//! and the mark of the previous position, or of the adapter at position 0. Logits and hidden states
//! are pure functions of all marks of the prefix **as read back through the block table**. A wrong
//! block, a shared block that was overwritten, or a block that was reused too early therefore leads
//! to other tokens than [`expected_next`] returns, or to an error (see [`FakeOptions::strict`]).
//!
//! A test creates the backend from [`FakeOptions`], takes a [`FakeHandle`] from it, and moves the
//! backend to the executor's thread. Through the handle it observes the backend and injects faults
//! from its own thread.

use std::sync::Arc;
use std::time::Duration;

use stolon_kvcache::BlockId;

use crate::{
    AdapterLoader, Backend, BackendError, BackendSpec, BatchChecker, ImageEmbeddings, ImageInput,
    KvFormat, SequenceSlice, StateSpec, StepBatch, StepOutput, check_read, check_write,
};

pub use adapters::fake_adapter;
pub use handle::{FakeFault, FakeHandle, StepHold};
pub use images::image_token;
pub use marks::{expected_hidden, expected_logits, expected_next, expected_next_with};

mod adapters;
mod handle;
mod images;
mod marks;

use images::{FakeEncoder, tokens_with_images};
use marks::{Mark, PrefixDigest, SLOT_BYTES};

/// The simulated duration of a step. All parts are zero by default and are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeLatency {
    /// Added once per step.
    pub fixed: Duration,
    /// Added per token of each slice that has more than one token.
    pub per_prefill_token: Duration,
    /// Added per slice of exactly one token.
    pub per_decode: Duration,
}

/// Sizes and behavior of a [`FakeBackend`].
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Number of token ids, at least 1. Every token id is below it.
    pub vocab_size: usize,
    /// Maximum number of positions of one sequence.
    pub max_positions: usize,
    /// Positions per KV block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Number of blocks in the KV store.
    pub block_count: usize,
    /// Number of values of a hidden state; `None` for a backend that returns logits only.
    pub hidden_size: Option<usize>,
    /// Whether it draws tokens itself.
    pub draws: bool,
    /// See [`Backend::sampling_threads`].
    pub sampling_threads: usize,
    /// The simulated duration of steps.
    pub latency: FakeLatency,
    /// Whether a step fails when it reads a position that was never written, or whose mark does
    /// not continue the previous position's. No correct engine causes that. If false, the step
    /// uses what it reads, as a real backend would, and generates other tokens.
    pub strict: bool,
    /// The recurrent state: number of blocks that a checkpoint takes and number of slots. Each step
    /// then checks that the slots and checkpoints that it reads belong to the prefixes of its
    /// slices.
    pub state: Option<(usize, usize)>,
    /// Number of calls of [`Backend::encode`] that an image takes; 0 if images are not supported.
    pub encode_calls: usize,
    /// Whether the backend keeps a copy of every batch for [`FakeHandle::take_batches`].
    pub record: bool,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            max_positions: 4096,
            block_size: 16,
            block_count: 256,
            hidden_size: Some(16),
            draws: false,
            sampling_threads: 1,
            latency: FakeLatency::default(),
            strict: true,
            state: None,
            encode_calls: 0,
            record: false,
        }
    }
}

/// The deterministic backend. The [module documentation](self) says how it works.
#[derive(Debug)]
pub struct FakeBackend {
    spec: BackendSpec,
    sampling_threads: usize,
    latency: FakeLatency,
    strict: bool,
    checker: BatchChecker,
    /// `[block_count, block_size]`: the mark stored at each position of each block, `None` where
    /// nothing was written.
    slots: Vec<Option<Mark>>,
    /// The recurrent state in each slot: the mark of the last position that it covers, followed by
    /// those of the proposed tokens, after any of which the sequence may continue. Empty where it
    /// is undefined.
    states: Vec<Vec<Mark>>,
    encoder: FakeEncoder,
    handle: FakeHandle,
}

impl FakeBackend {
    /// Creates a backend with an empty KV store.
    #[must_use]
    pub fn new(options: FakeOptions) -> Self {
        let FakeOptions { vocab_size, max_positions, block_size, block_count, .. } = options;
        Self {
            spec: BackendSpec {
                vocab_size,
                max_positions,
                block_size,
                block_count,
                block_bytes: block_size * SLOT_BYTES,
                hidden_size: options.hidden_size,
                draws: options.draws,
                proposals: true,
                state: options.state.map(|(blocks, slots)| StateSpec {
                    bytes: blocks * block_size * SLOT_BYTES,
                    slots,
                }),
                image_width: options.hidden_size.filter(|_| options.encode_calls > 0),
                ..BackendSpec::default()
            },
            sampling_threads: options.sampling_threads,
            latency: options.latency,
            strict: options.strict,
            checker: BatchChecker::new(block_count).with_adapters(),
            slots: vec![None; block_count * block_size],
            states: vec![Vec::new(); options.state.map_or(0, |(_, slots)| slots)],
            encoder: FakeEncoder::new(options.encode_calls),
            handle: FakeHandle::new(options.record),
        }
    }

    /// Returns a handle that observes this backend and injects faults, from any thread.
    #[must_use]
    pub fn handle(&self) -> FakeHandle {
        self.handle.clone()
    }

    /// The index in `slots` of a sequence's position.
    fn slot_index(&self, slice: &SequenceSlice, position: usize) -> usize {
        let block = slice.block_table[position / self.spec.block_size];
        block.0 as usize * self.spec.block_size + position % self.spec.block_size
    }

    /// Reads a position's mark through the block table, as a real backend reads keys and values.
    /// `before` is the previous position's mark.
    fn read(
        &self,
        slice: &SequenceSlice,
        position: usize,
        before: Mark,
    ) -> Result<Mark, BackendError> {
        let found = self.slots[self.slot_index(slice, position)];
        if self.strict && !found.is_some_and(|mark| mark.continues(before, position)) {
            let block = slice.block_table[position / self.spec.block_size].0;
            return Err(BackendError::MalformedBatch(format!(
                "expected the key and value of position {position} in block {block}, got {}",
                match found {
                    None => "a slot that was never written".to_owned(),
                    Some(mark) => format!("{mark:?}, which does not continue the previous one"),
                }
            )));
        }
        Ok(found.unwrap_or_default())
    }

    /// Writes one slice's marks and appends its logits and hidden states.
    fn run_slice(
        &mut self,
        slice: &SequenceSlice,
        tokens: &[u32],
        output: &mut StepOutput,
    ) -> Result<(), BackendError> {
        let foreign = || BackendError::MalformedBatch("an adapter of another backend".to_owned());
        let seed = adapters::seed(slice.adapter.as_ref()).ok_or_else(foreign)?;
        let mut digest = PrefixDigest::of(seed);
        for position in 0..slice.start {
            digest.push(self.read(slice, position, digest.last())?);
        }
        self.resume(slice, digest.last())?;
        for (index, &token) in tokens.iter().enumerate() {
            let position = slice.start + index;
            let own = Mark::after(digest.last(), token, position);
            if position >= slice.write_from {
                let index = self.slot_index(slice, position);
                self.slots[index] = Some(own);
            } else if self.strict && self.read(slice, position, digest.last())? != own {
                return Err(BackendError::MalformedBatch(format!(
                    "position {position} is not written, but its slot does not hold token {token}"
                )));
            }
            digest.push(self.read(slice, position, digest.last())?);
            if slice.logit_rows.logits(tokens.len()).contains(&index) {
                digest.append_logits(self.spec.vocab_size, &mut output.logits);
            }
            if let Some(draw) = slice.logit_rows.draw().filter(|_| index + 1 == tokens.len()) {
                let mut row = Vec::new();
                digest.append_logits(self.spec.vocab_size, &mut row);
                output.drawn.push(draw.of(&row));
            }
            if slice.logit_rows.hidden(tokens.len()).contains(&index) {
                digest.append_hidden(self.spec.hidden_size.unwrap_or(0), &mut output.hidden);
            }
            self.keep_state(slice, position + 1, digest.last());
        }
        Ok(())
    }

    /// Checks that the state with which a slice begins, in its slot or its checkpoint, is the one
    /// after `last`, the mark of the position before.
    fn resume(&self, slice: &SequenceSlice, last: Mark) -> Result<(), BackendError> {
        let Some(state) = &slice.state else { return Ok(()) };
        let found = match &state.resume {
            _ if slice.start == 0 => vec![last],
            Some(blocks) => {
                let mut marks = blocks.iter().map(|block| self.slots[self.first_slot(*block)]);
                let first = marks.next().flatten();
                first.filter(|first| marks.all(|mark| mark == Some(*first))).into_iter().collect()
            }
            None => self.states[state.slot as usize].clone(),
        };
        if found.contains(&last) || !self.strict {
            return Ok(());
        }
        Err(BackendError::MalformedBatch(format!(
            "expected the state after {} positions in slot {}, or the checkpoint {:?}, got {found:?}",
            slice.start, state.slot, state.resume
        )))
    }

    /// Stores the state after `len` positions, the last of which has the mark `last`, in the
    /// slice's slot and its checkpoint of that length.
    fn keep_state(&mut self, slice: &SequenceSlice, len: usize, last: Mark) {
        let Some(state) = &slice.state else { return };
        let states = &mut self.states[state.slot as usize];
        if len <= slice.start + slice.token_count - state.proposed {
            states.clear();
        }
        states.push(last);
        let checkpoints = state.checkpoints.iter().filter(|checkpoint| checkpoint.len == len);
        for block in checkpoints.flat_map(|checkpoint| &checkpoint.blocks) {
            let first = self.first_slot(*block);
            self.slots[first..][..self.spec.block_size].fill(Some(last));
        }
    }

    /// The index in `slots` of a block's first position.
    fn first_slot(&self, block: BlockId) -> usize {
        block.0 as usize * self.spec.block_size
    }

    /// Clears every position that the batch should have written, as a step that fails may leave
    /// them.
    fn clear_written(&mut self, batch: &StepBatch) {
        for slice in &batch.sequences {
            for position in slice.write_from..slice.start + slice.token_count {
                let index = self.slot_index(slice, position);
                self.slots[index] = None;
            }
            let Some(state) = &slice.state else { continue };
            self.states[state.slot as usize].clear();
            for block in state.checkpoints.iter().flat_map(|checkpoint| &checkpoint.blocks) {
                let first = self.first_slot(*block);
                self.slots[first..][..self.spec.block_size].fill(None);
            }
        }
    }

    fn sleep(&self, batch: &StepBatch) {
        let FakeLatency { fixed, per_prefill_token, per_decode } = self.latency;
        let mut total = fixed;
        for slice in &batch.sequences {
            total += match slice.token_count {
                1 => per_decode,
                count => per_prefill_token * count as u32,
            };
        }
        if !total.is_zero() {
            std::thread::sleep(total);
        }
    }
}

impl Backend for FakeBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn sampling_threads(&self) -> usize {
        self.sampling_threads
    }

    fn adapters(&self) -> Option<Arc<dyn AdapterLoader>> {
        Some(Arc::new(adapters::FakeLoader))
    }

    /// # Panics
    /// If a test injected [`FakeFault::Panic`] for this step.
    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let rows = self.checker.check(batch, &self.spec)?;
        match self.handle.enter(batch) {
            None => {}
            Some(FakeFault::Stall(time)) => std::thread::sleep(time),
            Some(FakeFault::Fail) => {
                self.clear_written(batch);
                return Err(BackendError::Failed("an error was injected".to_owned()));
            }
            Some(FakeFault::Panic) => {
                self.clear_written(batch);
                panic!("a panic was injected");
            }
        }
        self.sleep(batch);
        let logits = Vec::with_capacity(rows * self.spec.vocab_size);
        let mut output = StepOutput { logits, ..StepOutput::default() };
        let mut rest = batch.tokens.as_slice();
        for slice in &batch.sequences {
            let (tokens, others) = rest.split_at(slice.token_count);
            rest = others;
            self.run_slice(slice, &tokens_with_images(slice, tokens), &mut output)?;
        }
        Ok(output)
    }

    fn encode(
        &mut self,
        image: &Arc<ImageInput>,
        _time: Duration,
    ) -> Result<Option<ImageEmbeddings>, BackendError> {
        self.handle.enter_encoding()?;
        self.encoder.advance(image, self.spec.hidden_size.unwrap_or(0))
    }

    fn discard_blocks(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            let first = self.first_slot(*block);
            self.slots[first..][..self.spec.block_size].fill(None);
        }
    }

    /// The fingerprint names the block size only: marks depend on nothing else.
    fn kv_format(&self) -> Option<KvFormat> {
        let mut fingerprint = [0; 32];
        fingerprint[..8].copy_from_slice(b"fake kv ");
        fingerprint[8..16].copy_from_slice(&(self.spec.block_size as u64).to_le_bytes());
        let description = format!("fake, blocks of {}", self.spec.block_size);
        Some(KvFormat::new(description, move || Ok(fingerprint)))
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        check_read(&self.spec, blocks, to.len())?;
        self.handle.enter_copy()?;
        let block_size = self.spec.block_size;
        for (block, to) in blocks.iter().zip(to.chunks_exact_mut(self.spec.block_bytes)) {
            let slots = &self.slots[block.0 as usize * block_size..][..block_size];
            for (slot, to) in slots.iter().zip(to.as_chunks_mut::<SLOT_BYTES>().0) {
                *to = marks::slot_to_bytes(*slot);
            }
        }
        Ok(())
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        check_write(&self.spec, blocks, from)?;
        self.handle.enter_copy()?;
        let block_size = self.spec.block_size;
        for (block, from) in blocks.iter().zip(from) {
            let slots = &mut self.slots[block.0 as usize * block_size..][..block_size];
            for (slot, from) in slots.iter_mut().zip(from.as_chunks::<SLOT_BYTES>().0) {
                *slot = marks::slot_from_bytes(from);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
