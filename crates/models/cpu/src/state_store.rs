//! The recurrent states of running sequences, in f32.
//!
//! Each sequence occupies one of the *slots*. The state of a slot consists of the states of all
//! recurrent layers, one after the other, in the layout of
//! [`RecurrentShape`](stolon_checkpoint::config::RecurrentShape). Before a step computes anything,
//! [`StateStore::begin`] sets the slots of its slices to the states at the start of the slices. The
//! layers then change their parts of the state.
//!
//! A state cannot go back to an earlier position, so the tokens that were proposed in a step do not
//! change it. Their projections, which are much smaller than the state, are kept with the slot
//! ([`LayerProposals`]). The layers of the next step first add those that were accepted, which is
//! known from the start of its slice.
//!
//! Memory is reserved at creation in a new zeroed mapping and becomes resident where slots are
//! used. Dropping the store releases it.

use stolon_backend::{BackendError, SequenceSlice, StateSpec, StepBatch};
use stolon_checkpoint::config::DecoderConfig;
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::kv::KvShape;
use stolon_checkpoint::memory::out_of_memory;
use stolon_kernels::Buffer;
use stolon_kvcache::BlockId;

use crate::kv_store::KvStore;
use crate::workers::Workers;

/// Size in bytes of a value.
const VALUE_BYTES: usize = size_of::<f32>();

/// The states of all slots. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct StateStore {
    /// `[slots, layers, layer_len]`.
    values: Buffer,
    slots: usize,
    /// Number of recurrent layers.
    layers: usize,
    /// Number of values of the state of a layer.
    layer_len: usize,
    /// The tokens that were proposed in the last step of each slot.
    proposals: Vec<SlotProposals>,
}

/// What a slot contains, and the tokens that were proposed to follow.
#[derive(Debug, Default)]
struct SlotProposals {
    /// Number of positions that the state in the slot covers.
    len: usize,
    /// Number of tokens that were proposed to follow these positions.
    count: usize,
    /// Number of tokens proposed in the step before that the layers of this step add to their
    /// states.
    accepted: usize,
    /// Their projections, one vector for each recurrent layer.
    rows: Vec<Vec<f32>>,
}

/// The proposed tokens of a slice in one recurrent layer.
#[derive(Debug)]
pub(crate) struct LayerProposals<'a> {
    /// Number of tokens that were proposed in the last step and have been accepted. The layer has
    /// to add the first rows of `rows` to its state before the tokens of the slice.
    pub(crate) accepted: usize,
    /// The projections of the tokens proposed in the last step, which the layer replaces by those
    /// of this step. Their width is the layer's own.
    pub(crate) rows: &'a mut Vec<f32>,
}

/// The size of a sequence's state, which includes recurrent layers and windows, and the number of
/// slots; `None` if sequences have no state.
pub(crate) fn state_spec(
    config: &DecoderConfig,
    shape: &KvShape,
    slots: usize,
) -> Option<StateSpec> {
    let bytes = recurrent_bytes(config).saturating_add(shape.window_bytes());
    (bytes > 0).then_some(StateSpec { bytes, slots })
}

/// Size in bytes of the states of all recurrent layers of one sequence.
pub(crate) fn recurrent_bytes(config: &DecoderConfig) -> usize {
    let len = config.recurrent_shape().map_or(0, |shape| shape.state_len());
    config.recurrent_layers().saturating_mul(len * VALUE_BYTES)
}

impl StateStore {
    /// Reserves the states of `slots` sequences, all zero. Without recurrent layers, they are empty.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`].
    pub(crate) fn new(config: &DecoderConfig, slots: usize) -> Result<Self, ModelError> {
        let bytes = recurrent_bytes(config);
        let layer_len = config.recurrent_shape().map_or(0, |shape| shape.state_len());
        let values = (bytes / VALUE_BYTES).checked_mul(slots).and_then(Buffer::try_zeroed::<f32>);
        let values = values.ok_or_else(|| {
            out_of_memory("the recurrent states", (bytes as u64).saturating_mul(slots as u64))
        })?;
        let layers = (bytes / VALUE_BYTES).checked_div(layer_len).unwrap_or(0);
        let proposal =
            || SlotProposals { rows: vec![Vec::new(); layers], ..SlotProposals::default() };
        let proposals = std::iter::repeat_with(proposal).take(slots).collect();
        Ok(Self { values, slots, layers, layer_len, proposals })
    }

    /// Size of the states of all slots in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.byte_len()
    }

    /// Number of values of the state of a slot.
    fn slot_len(&self) -> usize {
        self.layers * self.layer_len
    }

    /// Checks that each slice continues where the state in its slot ends, or after some of the
    /// tokens that were proposed to follow.
    ///
    /// # Errors
    /// [`BackendError::MalformedBatch`].
    pub(crate) fn check_slices(&self, batch: &StepBatch) -> Result<(), BackendError> {
        for SequenceSlice { start, state, .. } in &batch.sequences {
            let Some(state) = state.as_ref().filter(|state| state.resume.is_none()) else {
                continue;
            };
            let Some(slot) = self.proposals.get(state.slot as usize) else { continue };
            let SlotProposals { len, count, .. } = *slot;
            if self.layers > 0 && *start > 0 && !(len..=len + count).contains(start) {
                let message = format!(
                    "expected a slice that begins in {len}..={}, where the state in slot {} ends, \
                     got {start}",
                    len + count,
                    state.slot
                );
                return Err(BackendError::MalformedBatch(message));
            }
        }
        Ok(())
    }

    /// Sets the slots of all slices to the states before their first token, apart from accepted
    /// tokens ([`LayerProposals::accepted`]).
    pub(crate) fn begin(&mut self, batch: &StepBatch, kv: &mut KvStore, workers: &Workers) {
        let bytes = self.slot_len() * VALUE_BYTES;
        kv.resume_windows(batch, bytes);
        if bytes == 0 {
            return;
        }
        let mut slots: Vec<Option<&mut [u8]>> =
            self.values.slice_mut::<u8>().chunks_exact_mut(bytes).map(Some).collect();
        let mut fills: Vec<(&mut [u8], Option<&[BlockId]>)> = Vec::new();
        for slice in &batch.sequences {
            let Some(state) = &slice.state else { continue };
            let continues = slice.start > 0 && state.resume.is_none();
            if let Some(slot) = self.proposals.get_mut(state.slot as usize) {
                slot.accepted = if continues { slice.start.saturating_sub(slot.len) } else { 0 };
                slot.len = slice.start + slice.token_count - state.proposed;
                slot.count = state.proposed;
            }
            if continues {
                continue;
            }
            // The batch checker has refused slots that do not exist or are used twice.
            if let Some(slot) = slots.get_mut(state.slot as usize).and_then(Option::take) {
                fills.push((slot, state.resume.as_deref()));
            }
        }
        let store = &*kv;
        workers.run(fills.into_iter(), |(slot, resume)| match resume {
            Some(blocks) => store.read_bytes(blocks, 0, slot),
            None => slot.fill(0),
        });
    }

    /// Completes the checkpoints of a step, after the layers have written their states to them.
    pub(crate) fn finish(&self, batch: &StepBatch, kv: &mut KvStore) {
        kv.finish_checkpoints(batch, self.slot_len() * VALUE_BYTES);
    }

    /// The states of a recurrent layer, one for each of `slices`, in their order, with the proposed
    /// tokens. `layer` is an index among the recurrent layers.
    ///
    /// # Panics
    /// If there is no such layer, or a slice has no slot of its own.
    pub(crate) fn layer_mut<'a>(
        &'a mut self,
        layer: usize,
        slices: &[SequenceSlice],
    ) -> (Vec<&'a mut [f32]>, Vec<LayerProposals<'a>>) {
        assert!(layer < self.layers, "expected a layer below {}, got {layer}", self.layers);
        let (slot_len, layer_len) = (self.slot_len(), self.layer_len);
        let slots = self.values.slice_mut::<f32>().chunks_exact_mut(slot_len);
        let states = slots.map(|slot| &mut slot[layer * layer_len..][..layer_len]);
        let proposals = self.proposals.iter_mut().map(|slot| {
            let SlotProposals { accepted, rows, .. } = slot;
            LayerProposals { accepted: *accepted, rows: &mut rows[layer] }
        });
        let mut slots: Vec<Option<_>> = states.zip(proposals).map(Some).collect();
        let slot = |slice: &SequenceSlice| slice.state.as_ref().map(|state| state.slot as usize);
        let states = slices.iter().map(|slice| slots.get_mut(slot(slice)?)?.take());
        states.map(|state| state.expect("the batch checker requires a slot of its own")).unzip()
    }

    /// Offset in bytes of the state of a layer in a checkpoint.
    pub(crate) fn offset_bytes(&self, layer: usize) -> usize {
        layer * self.layer_len * VALUE_BYTES
    }

    /// The bytes of the state in `slot`.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(crate) fn slot_bytes(&self, slot: usize) -> &[u8] {
        assert!(slot < self.slots, "expected a slot below {}, got {slot}", self.slots);
        let bytes = self.slot_len() * VALUE_BYTES;
        &self.values.slice::<u8>()[slot * bytes..][..bytes]
    }
}
