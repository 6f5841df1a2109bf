//! A deterministic backend for tests and simulations: no weights, but a KV store that tells.
//!
//! Each position it writes stores a *mark*: a hash of its token, its position and the mark of the
//! position before. Logits are a pure function of all marks of the prefix **as read back through
//! the block table**, so a wrong block, a shared block that somebody overwrote, or a block reused
//! too early gives different tokens than [`expected_next`] says, or is refused outright
//! (see [`FakeOptions::strict`]).
//!
//! Life: made from [`FakeOptions`], moved to the executor's thread; a [`FakeHandle`] taken before
//! watches it and injects faults from the test's own thread.

use std::time::Duration;

use crate::{
    Backend, BackendError, BackendSpec, BatchChecker, LogitRows, SequenceSlice, StepBatch,
    StepOutput,
};

pub use handle::{FakeFault, FakeHandle, StepHold};
pub use marks::{expected_logits, expected_next};

mod handle;
mod marks;

use marks::{Mark, PrefixDigest};

/// How long a step pretends to take. Zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FakeLatency {
    /// For every step.
    pub fixed: Duration,
    /// For every token of a slice of more than one token.
    pub per_prefill_token: Duration,
    /// For every slice of one token.
    pub per_decode: Duration,
}

/// Sizes and behaviour of a [`FakeBackend`].
#[derive(Clone, Debug)]
pub struct FakeOptions {
    /// Token ids are below it; at least 1.
    pub vocab_size: usize,
    /// Most positions of a sequence.
    pub max_positions: usize,
    /// Positions a block, a power of two from 1 to 256.
    pub block_size: usize,
    /// Blocks in the store.
    pub block_count: usize,
    /// How long steps take.
    pub latency: FakeLatency,
    /// Whether a context that no correct engine could have made (a position never written, of
    /// another position, or not continuing the one before) is an error. When false the step goes
    /// on with what stands there, as a real backend would, and other tokens come out.
    pub strict: bool,
    /// Whether the handle keeps a copy of every batch.
    pub record: bool,
}

impl Default for FakeOptions {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            max_positions: 4096,
            block_size: 16,
            block_count: 256,
            latency: FakeLatency::default(),
            strict: true,
            record: false,
        }
    }
}

/// The deterministic backend. See the module's documentation.
#[derive(Debug)]
pub struct FakeBackend {
    spec: BackendSpec,
    latency: FakeLatency,
    strict: bool,
    checker: BatchChecker,
    /// `[block_count, block_size]`: what stands at each place, `None` where nothing was written.
    slots: Vec<Option<Mark>>,
    handle: FakeHandle,
}

impl FakeBackend {
    /// Makes a backend with an empty store.
    #[must_use]
    pub fn new(options: FakeOptions) -> Self {
        let FakeOptions { vocab_size, max_positions, block_size, block_count, .. } = options;
        Self {
            spec: BackendSpec {
                vocab_size,
                max_positions,
                block_size,
                block_count,
                block_bytes: block_size * size_of::<Option<Mark>>(),
            },
            latency: options.latency,
            strict: options.strict,
            checker: BatchChecker::new(block_count),
            slots: vec![None; block_count * block_size],
            handle: FakeHandle::new(options.record),
        }
    }

    /// A handle that watches this backend and injects faults, from any thread.
    #[must_use]
    pub fn handle(&self) -> FakeHandle {
        self.handle.clone()
    }

    /// The place in `slots` of a sequence's position.
    fn place(&self, slice: &SequenceSlice, position: usize) -> usize {
        let block = slice.block_table[position / self.spec.block_size];
        block.0 as usize * self.spec.block_size + position % self.spec.block_size
    }

    /// Reads a position's mark as a real backend reads keys and values: whatever stands there.
    fn read(
        &self,
        slice: &SequenceSlice,
        position: usize,
        before: Mark,
    ) -> Result<Mark, BackendError> {
        let found = self.slots[self.place(slice, position)];
        if self.strict && !found.is_some_and(|mark| mark.continues(before, position)) {
            let block = slice.block_table[position / self.spec.block_size].0;
            return Err(BackendError::MalformedBatch(format!(
                "expected the key and value of position {position} in block {block}, got {}",
                match found {
                    None => "a place never written".to_owned(),
                    Some(mark) => format!("{mark:?}, which does not continue the one before"),
                }
            )));
        }
        Ok(found.unwrap_or_default())
    }

    /// Writes one slice's marks and appends its logits.
    fn run_slice(
        &mut self,
        slice: &SequenceSlice,
        tokens: &[u32],
        logits: &mut Vec<f32>,
    ) -> Result<(), BackendError> {
        let mut digest = PrefixDigest::default();
        for position in 0..slice.start {
            digest.push(self.read(slice, position, digest.last())?);
        }
        for (index, &token) in tokens.iter().enumerate() {
            let position = slice.start + index;
            let own = Mark::after(digest.last(), token, position);
            if position >= slice.write_from {
                let place = self.place(slice, position);
                self.slots[place] = Some(own);
            } else if self.strict && self.read(slice, position, digest.last())? != own {
                return Err(BackendError::MalformedBatch(format!(
                    "position {position} is not written, but token {token} is not what stands there"
                )));
            }
            digest.push(self.read(slice, position, digest.last())?);
            let wanted = match slice.logit_rows {
                LogitRows::None => false,
                LogitRows::Last => index + 1 == tokens.len(),
                LogitRows::All => true,
            };
            if wanted {
                digest.append_logits(self.spec.vocab_size, logits);
            }
        }
        Ok(())
    }

    /// Spoils everything the batch was to write: what a failed step leaves behind.
    fn spoil(&mut self, batch: &StepBatch) {
        for slice in &batch.sequences {
            for position in slice.write_from..slice.start + slice.token_count {
                let place = self.place(slice, position);
                self.slots[place] = None;
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

    /// # Panics
    /// Where a test asked for it with [`FakeFault::Panic`].
    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let rows = self.checker.check(batch, &self.spec)?;
        match self.handle.enter(batch) {
            None => {}
            Some(FakeFault::Stall(time)) => std::thread::sleep(time),
            Some(FakeFault::Fail) => {
                self.spoil(batch);
                return Err(BackendError::Failed("a fault was injected".to_owned()));
            }
            Some(FakeFault::Panic) => {
                self.spoil(batch);
                panic!("a panic was injected");
            }
        }
        self.sleep(batch);
        let mut logits = Vec::with_capacity(rows * self.spec.vocab_size);
        let mut rest = batch.tokens.as_slice();
        for slice in &batch.sequences {
            let (tokens, others) = rest.split_at(slice.token_count);
            rest = others;
            self.run_slice(slice, tokens, &mut logits)?;
        }
        Ok(StepOutput { logits })
    }
}

#[cfg(test)]
mod tests;
