//! A draft head, which guesses the tokens after the next one: the model's own head for multi-token
//! prediction (MTP), an EAGLE-3 head, or an assistant of Gemma 4.
//!
//! The head computes from the hidden state of position `i` and the token at `i + 1` which token
//! follows at `i + 2`. It has one layer of attention, over all such pairs of the sequence. The keys
//! and values of a pair are stored in the slot of position `i + 1`, so that they depend on the
//! tokens up to this position only, as those of all other layers do. Blocks can therefore be shared,
//! evicted, stored and loaded without further rules. Position 0 has no pair, and is not read.
//!
//! The hidden state of a position is the model's after its last norm, or with EAGLE-3 a projection of
//! its states after several layers.
//!
//! 1. [`DraftHead::extend`] runs after every step of the model. It stores the hidden states of all
//!    rows, and the keys and values of their pairs. That is all that a prompt needs of the head:
//!    these projections, but no attention and no MLP.
//! 2. [`DraftHead::guess`] runs before a step in which tokens are to be proposed. The pair of the last
//!    token is complete, because its hidden state is stored. Every further guess reads the hidden
//!    state that the head itself has computed for the one before. The slots after the last token are
//!    written meanwhile. The model's step writes them again.
//!
//! The hidden states are stored for every position, in the type of the inputs of convolutions, and
//! always read from there. So the keys and values of a pair have the same bits whether its hidden
//! state was computed in the same step or in an earlier one.
//!
//! An assistant of Gemma 4 stores no keys and values. It attends to the model's, at all positions
//! before that of the last token. All its guesses have the position of the last token, so
//! it reads the hidden state of the position that the last token was sampled from, and no other one.
//! Only positions with logits store theirs. So the rows of a prompt that the model computes are the
//! same as without the assistant.

use std::time::Instant;

use stolon_backend::{DraftOutput, DraftTask, LogitRows, SequenceSlice, StepBatch};
use stolon_checkpoint::config::DecoderConfig;
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::KvShape;
use stolon_checkpoint::{DraftHead as LoadedHead, Weights};
use stolon_kernels::{self as kernels, KvLayout, KvRows, Path, SlotMapping};
use stolon_kvcache::BlockId;

use crate::decoder::linear::Loader;
use crate::decoder::{Decoder, StepState, output_count, slot_of};
use crate::kv_store::KvStore;
use crate::state_store::StateStore;
use crate::workers::Workers;

/// A head and its KV store, whose blocks have the ids of the model's. See the
/// [module documentation](self).
#[derive(Debug)]
pub(crate) struct DraftHead {
    decoder: Decoder,
    /// The keys and values of pairs, and the hidden states as the inputs of a convolution.
    kv: KvStore,
    /// Empty: the head has no recurrent layers.
    states: StateStore,
    path: Path,
    /// The slots of the rows of a step.
    slots: SlotMapping,
    /// The model's id of each token that can be guessed, if they are not the same.
    token_ids: Option<Vec<u32>>,
    /// Number of values of a hidden state.
    width: usize,
    /// Whether attention reads the keys and values of the model.
    reads_model: bool,
}

impl DraftHead {
    /// Packs the weights of a head for `model` and reserves its KV store, of `block_count` blocks.
    /// `loader` returns a loader of weights.
    ///
    /// # Errors
    /// [`ModelError`] if a tensor is missing or has the wrong shape or type, or if there is not
    /// enough memory.
    pub(crate) fn load<'a>(
        mut head: LoadedHead,
        model: &mut Decoder,
        (shape, block_count): (KvShape, usize),
        (path, loader): (Path, impl FnOnce(Weights) -> Loader<'a>),
    ) -> Result<Self, ModelError> {
        let states = StateStore::new(&head.config, 0)?;
        let token_ids = head.token_ids.take();
        let width = head.kind.state_width(&head.config);
        let reads_model = head.kind.reads_model_kv();
        let decoder = model.load_head(head, loader)?;
        let kv = KvStore::new(shape, block_count)?;
        let slots = SlotMapping::default();
        Ok(Self { decoder, kv, states, path, slots, token_ids, width, reads_model })
    }

    /// Size of the packed matrices in bytes, without those that are the model's.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    /// The head's part of the model's KV blocks.
    pub(crate) fn kv(&self) -> &KvStore {
        &self.kv
    }

    /// The same for writing.
    pub(crate) fn kv_mut(&mut self) -> &mut KvStore {
        &mut self.kv
    }

    /// Stores what the positions of a step of the model leave behind in the head. `states` are the
    /// hidden states that the model has recorded ([`Decoder::row_states`]).
    pub(crate) fn extend(&mut self, batch: &StepBatch, states: &[f32], workers: &Workers) {
        let (width, size) = (self.width, self.kv.shape().block_size);
        let rows = batch.sequences.iter().flat_map(|slice| {
            let count = if self.reads_model { output_count(slice) } else { slice.token_count };
            let end = slice.start + slice.token_count;
            (end - count..end).map(move |position| (slice, position))
        });
        self.slots.fill(rows.clone().map(|(slice, position)| {
            let is_written = position >= slice.write_from;
            is_written.then(|| slot_of(&slice.block_table, position, size))
        }));
        let states = self.decoder.states_of(states, workers);
        let plane = self.kv.inputs_mut(0).slice_mut();
        let mut kept = KvRows::new(self.path, plane, KvLayout::Rows, &self.slots, width, 1);
        let states = states.chunks_exact(width).enumerate();
        states.for_each(|(row, state)| kept.write_row(row, state));
        if self.reads_model {
            return;
        }
        let before = self.states_before(rows.map(|(slice, at)| (&slice.block_table[..], at)));
        let own = |slice: &SequenceSlice| SequenceSlice {
            logit_rows: LogitRows::None,
            state: None,
            // Adapters change the model only.
            adapter: None,
            ..slice.clone()
        };
        let sequences = batch.sequences.iter().map(own).collect();
        let batch = StepBatch { tokens: batch.tokens.clone(), sequences };
        self.forward(&batch, before, None, workers);
    }

    /// Guesses the tokens of `tasks`, which the caller has checked. `model_kv` has the keys and values
    /// of the model. See [`Backend::draft`](stolon_backend::Backend::draft).
    pub(crate) fn guess(
        &mut self,
        tasks: &[DraftTask],
        budget: usize,
        choose: &mut dyn FnMut(usize, &mut [f32]) -> Option<u32>,
        (model_kv, workers): (&mut KvStore, &Workers),
    ) -> DraftOutput {
        let DecoderConfig { vocab_size, max_positions, .. } = *self.decoder.config();
        let (width, size) = (self.width, self.kv.shape().block_size);
        // An assistant attends to the positions before that of the token.
        let before = usize::from(self.reads_model);
        let logit_count = self.decoder.logit_count();
        // The logits of a row for the vocabulary of the model.
        let mut all = vec![f32::NEG_INFINITY; self.token_ids.as_ref().map_or(0, |_| vocab_size)];
        let mut output = DraftOutput::default();
        output.tokens.resize(tasks.len(), Vec::new());
        // The first token of a sequence has no pair.
        let is_asked = |task: &DraftTask| task.count > 0 && task.tokens.len() > 1;
        let asked = tasks.iter().enumerate().filter(|(_, task)| is_asked(task)).take(budget);
        let mut rows: Vec<Row> = asked
            .map(|(task, DraftTask { tokens, .. })| Row {
                task,
                token: tokens[tokens.len() - 1],
                position: tokens.len() - 1,
            })
            .collect();
        let tables = rows.iter().map(|row| (&tasks[row.task].block_table[..], row.position));
        let mut states = self.states_before(tables);
        let mut begun = Instant::now();
        while !rows.is_empty() {
            let mut batch = StepBatch::default();
            for row in &rows {
                row.add_to(&mut batch, &tasks[row.task].block_table, size, before);
            }
            let of_rows = std::mem::take(&mut states);
            let mut logits = self.forward(&batch, of_rows, Some(&mut *model_kv), workers);
            let own = self.decoder.output_states(rows.len(), workers);
            if output.first_tokens == 0 {
                (output.first_tokens, output.first) = (rows.len(), begun.elapsed());
                begun = Instant::now();
            } else {
                output.passes += 1;
            }
            let results = logits.chunks_exact_mut(logit_count).zip(own.chunks_exact(width));
            let mut next = Vec::new();
            for (row, (logits, state)) in rows.iter().zip(results) {
                let (task, position) = (row.task, row.position + 1 - before);
                let logits = match &self.token_ids {
                    Some(ids) => {
                        all.fill(f32::NEG_INFINITY);
                        ids.iter().zip(&*logits).for_each(|(id, logit)| all[*id as usize] = *logit);
                        &mut all[..]
                    }
                    None => logits,
                };
                let Some(token) = choose(task, logits) else { continue };
                output.tokens[task].push(token);
                let DraftTask { tokens, block_table, count, .. } = &tasks[task];
                let room = max_positions.min(block_table.len() * size);
                let guessed = output.tokens[task].len();
                if guessed < *count && tokens.len() - 1 + guessed < room {
                    next.push(Row { task, token, position });
                    states.extend_from_slice(state);
                }
            }
            rows = next;
        }
        if output.passes > 0 {
            output.later = begun.elapsed();
        }
        output
    }

    /// Computes a batch and returns its logits. `states` has the hidden state of the position before
    /// each row.
    fn forward(
        &mut self,
        batch: &StepBatch,
        states: Vec<f32>,
        model_kv: Option<&mut KvStore>,
        workers: &Workers,
    ) -> Vec<f32> {
        self.decoder.set_states(states);
        let kv = model_kv.filter(|_| self.reads_model).unwrap_or(&mut self.kv);
        let step = StepState { kv, states: &mut self.states };
        self.decoder.forward(batch, step, workers).logits
    }

    /// The stored hidden states of the positions before these, `[positions, width]`; zeros before position 0. Each position comes with the block table of its sequence.
    fn states_before<'a>(
        &self,
        positions: impl Iterator<Item = (&'a [BlockId], usize)>,
    ) -> Vec<f32> {
        let (width, size) = (self.width, self.kv.shape().block_size);
        let slots: Vec<Option<usize>> = positions
            .map(|(table, position)| Some(slot_of(table, position.checked_sub(1)?, size)))
            .collect();
        let mut states = vec![0.0; slots.len() * width];
        // A convolution with one tap and the factor 1 copies its input.
        let ones = vec![1.0; width];
        for (slot, state) in slots.chunks(1).zip(states.chunks_exact_mut(width)) {
            kernels::convolution(self.path, self.kv.inputs(0), slot, &ones, &ones, state);
        }
        states
    }
}

/// A token for which the head computes a row of logits.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Index of the task.
    task: usize,
    token: u32,
    position: usize,
}

impl Row {
    /// Adds the row to `batch`, for a sequence with this block table. It attends to the positions up
    /// to its own, without the last `before` of them.
    fn add_to(
        &self,
        batch: &mut StepBatch,
        block_table: &[BlockId],
        block_size: usize,
        before: usize,
    ) {
        let start = self.position - before;
        batch.tokens.push(self.token);
        batch.sequences.push(SequenceSlice {
            token_count: 1,
            start,
            write_from: self.position,
            block_table: block_table[..=start / block_size].to_vec(),
            logit_rows: LogitRows::Last,
            ..SequenceSlice::default()
        });
    }
}
