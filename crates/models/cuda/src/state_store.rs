//! The recurrent states of running sequences on the device, in f32.
//!
//! Each sequence occupies one of the *slots*. The state of a recurrent layer consists of the last
//! inputs of its convolution, `[taps - 1, channels]`, followed by a matrix for each head, `[heads,
//! key_dim, value_dim]`. Before a step computes anything, [`StateStore::begin`] sets the slots of
//! its slices to the states at the start of the slices. The layers then overwrite their parts.
//!
//! Checkpoints are copies of states in blocks of the KV store, which never leave the device.

use candle_core::{DType, Device, Result, Tensor};
use stolon_backend::StateSpec;
use stolon_checkpoint::DecoderConfig;

use crate::bits;
use crate::kv_store::{KvStore, StoreShape};
use crate::kv_write;
use crate::state_inputs::{Checkpoints, Resumed, StateInputs};

/// Minimum number of positions whose blocks other tiers store together.
const STORED_POSITIONS: usize = 64;

/// The sizes of the states of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StateShape {
    /// Number of recurrent layers.
    layers: usize,
    /// Number of values of the state of a layer.
    layer_len: usize,
}

impl StateShape {
    /// The sizes for the layers of `config`; without recurrent layers, all are 0.
    pub(crate) fn of(config: &DecoderConfig) -> Self {
        let layer_len = config
            .recurrent_shape()
            .map_or(0, |shape| shape.inputs_len() + shape.heads * shape.key_dim * shape.value_dim);
        Self { layers: config.recurrent_layers(), layer_len }
    }

    /// Number of values of the state of a sequence.
    fn len(self) -> usize {
        self.layers * self.layer_len
    }

    /// Size in bytes of the state of a sequence.
    pub(crate) fn bytes(self) -> usize {
        self.len() * size_of::<f32>()
    }

    /// The size of a checkpoint, and the number of slots; `None` if sequences have no state. A
    /// checkpoint consists of whole blocks, and their number is a multiple of the blocks that other
    /// tiers store together.
    pub(crate) fn spec(self, shape: &StoreShape, slots: usize) -> Option<StateSpec> {
        let together = shape.block_bytes() * (STORED_POSITIONS / shape.block_size()).max(1);
        let bytes = self.bytes();
        (bytes > 0).then(|| StateSpec { bytes: bytes.next_multiple_of(together), slots })
    }
}

/// The KV store and the states of a backend.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) kv: KvStore,
    pub(crate) states: StateStore,
}

impl Stores {
    /// Reserves both, with `slots` slots.
    pub(crate) fn new(
        kv: StoreShape,
        (states, slots): (StateShape, usize),
        device: &Device,
    ) -> Result<Self> {
        let states = StateStore::new(states, slots, device)?;
        Ok(Self { kv: KvStore::new(kv, device)?, states })
    }
}

/// The states of all slots.
#[derive(Debug)]
pub(crate) struct StateStore {
    shape: StateShape,
    /// The states of each layer, `[slots, layer_len]`.
    layers: Vec<Tensor>,
}

impl StateStore {
    /// Reserves the states of `slots` sequences, all zero.
    pub(crate) fn new(shape: StateShape, slots: usize, device: &Device) -> Result<Self> {
        let layer = |_| Tensor::zeros((slots, shape.layer_len), DType::F32, device);
        Ok(Self { shape, layers: (0..shape.layers).map(layer).collect::<Result<_>>()? })
    }

    /// The states of a layer, `[slots, layer_len]`. `index` counts the recurrent layers.
    pub(crate) fn layer(&self, index: usize) -> &Tensor {
        &self.layers[index]
    }

    /// Overwrites the states of a layer in `slots` with `states`, `[slots, layer_len]`.
    pub(crate) fn write(&self, index: usize, states: &Tensor, slots: &Tensor) -> Result<()> {
        kv_write::write(&self.layers[index], states, slots)
    }

    /// Sets the slots of all slices to the states before their first token.
    pub(crate) fn begin(&self, inputs: &StateInputs, kv: &KvStore) -> Result<()> {
        if let Some(slots) = &inputs.new_slots {
            let zeros = (slots.dim(0)?, self.shape.layer_len);
            let zeros = Tensor::zeros(zeros, DType::F32, slots.device())?;
            for index in 0..self.layers.len() {
                self.write(index, &zeros, slots)?;
            }
        }
        if let Some(Resumed { count, slots, blocks }) = &inputs.resumed {
            let bytes = kv.gather_blocks(blocks)?.reshape((*count, ()))?;
            let bytes = bytes.narrow(1, 0, self.shape.bytes())?;
            let states = bits::from_bytes(&bytes, DType::F32)?;
            for index in 0..self.layers.len() {
                let own = states.narrow(1, index * self.shape.layer_len, self.shape.layer_len)?;
                self.write(index, &own, slots)?;
            }
        }
        Ok(())
    }

    /// Writes the checkpoints of a step. `states` has the states of each layer at all checkpoints,
    /// `[checkpoints, layer_len]`.
    pub(crate) fn write_checkpoints(
        &self,
        states: &[Tensor],
        checkpoints: &Checkpoints,
        kv: &KvStore,
    ) -> Result<()> {
        let bytes = bits::to_bytes(&Tensor::cat(states, 1)?)?;
        let count = checkpoints.blocks.dim(0)?;
        let whole = count / bytes.dim(0)? * kv.shape().block_bytes();
        let bytes = bytes.pad_with_zeros(1, 0, whole - bytes.dim(1)?)?;
        kv.scatter_blocks(&checkpoints.blocks, &bytes.reshape((count, ()))?)
    }

    /// The bytes of the state in the first slot.
    pub(crate) fn first_slot_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.shape.bytes());
        for layer in &self.layers {
            let state = layer.get(0)?.to_vec1::<f32>()?;
            bytes.extend(state.into_iter().flat_map(f32::to_le_bytes));
        }
        Ok(bytes)
    }
}
