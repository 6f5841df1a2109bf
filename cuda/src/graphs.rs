//! Decode steps as CUDA graphs.
//!
//! A decode step of a small model takes about as long to launch, kernel by kernel, as to compute. A
//! graph launches all of its kernels at once. It keeps the addresses of what they read and write,
//! so the first step of a size is recorded with its inputs, and later ones of the same size
//! overwrite these inputs. Batches are filled up to a few sizes with copies of one of their
//! sequences, which compute and write the same bits once more.
//!
//! On the CPU, where all of this but the graph is tested, a recorded step is computed again from
//! the inputs that it has kept.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
use stolon_backend::{LogitRows, SequenceSlice, StepBatch, StepOutput};
use stolon_model::DecoderConfig;

use crate::attention::{Attention, Room};
use crate::decoder::Decoder;
use crate::draw::drawn_tokens;
use crate::inputs::StepInputs;
use crate::kv_store::KvStore;
use crate::linear::RowTile;
use crate::plan::{StepPlan, all_spans};
use crate::{CandleOptions, memory};

#[cfg(feature = "cuda-core")]
mod cuda;

/// Maximum number of recorded steps. If there are more, all are dropped.
const RECORDED_MAX: usize = 64;
/// Above this number of sequences, batches are filled up to its multiples, and below to powers of
/// two.
const ROWS_STEP: usize = 8;

/// The recorded steps of a backend.
#[derive(Debug)]
pub(crate) struct Graphs {
    recorded: HashMap<Size, Recorded>,
    /// The logits of the last step, `[most rows, vocab_size]` in f32.
    logits: Tensor,
    /// A step could not be recorded, and none is tried again.
    failed: bool,
}

/// What the shapes of all tensors of a decode step depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Size {
    /// Number of sequences.
    rows: usize,
    room: Room,
}

/// A step, and the tensors at the addresses that it reads and writes.
#[derive(Debug)]
struct Recorded {
    inputs: StepInputs,
    /// The tokens that are drawn, `[rows]` in u32.
    tokens: Tensor,
    /// `None` on the CPU.
    #[cfg(feature = "cuda-core")]
    graph: Option<cuda::Graph>,
}

impl Graphs {
    /// For steps of at most as many sequences as `options` expect.
    pub(crate) fn new(decoder: &Decoder, options: &CandleOptions) -> Result<Self> {
        let shape = (filled_rows(options.step_sequences), decoder.config().vocab_size);
        let logits = Tensor::zeros(shape, DType::F32, decoder.device())?;
        Ok(Self { recorded: HashMap::new(), logits, failed: false })
    }

    /// Number of recorded steps.
    pub(crate) fn count(&self) -> usize {
        self.recorded.len()
    }

    /// Computes `batch`, which the batch checker has accepted. Returns `None` if it cannot be
    /// recorded. Nothing is computed then.
    pub(crate) fn step(
        &mut self,
        batch: &StepBatch,
        decoder: &mut Decoder,
        kv: &mut KvStore,
        attention: Attention,
    ) -> Result<Option<StepOutput>> {
        if self.failed || !decoder.stays_on_device() {
            return Ok(None);
        }
        let Some((size, filled)) = fill(batch, attention) else { return Ok(None) };
        if size.rows > self.logits.dim(0)? {
            return Ok(None);
        }
        let plan = StepPlan::new(&filled, kv.shape().block_size);
        let inputs = decoder.upload(&filled, &plan, kv.shape(), attention, size.room)?;
        let tokens = match self.recorded.get(&size) {
            Some(recorded) => {
                recorded.inputs.assign(&inputs)?;
                recorded.launch(decoder, kv, &self.logits)?;
                recorded.tokens.clone()
            }
            None => self.record(size, inputs, decoder, kv)?,
        };
        let draws = &plan.draws[..batch.sequences.len()];
        let drawn = drawn_tokens(&tokens, draws, &self.logits)?;
        Ok(Some(StepOutput { drawn, ..StepOutput::default() }))
    }

    /// Computes a step of a new size, and records it. Returns the tokens.
    fn record(
        &mut self,
        size: Size,
        inputs: StepInputs,
        decoder: &Decoder,
        kv: &mut KvStore,
    ) -> Result<Tensor> {
        let tokens = Tensor::zeros(size.rows, DType::U32, decoder.device())?;
        let mut recorded = Recorded {
            inputs,
            tokens: tokens.clone(),
            #[cfg(feature = "cuda-core")]
            graph: None,
        };
        self.failed = !recorded.record(decoder, kv, &self.logits)?;
        if self.failed || self.recorded.len() == RECORDED_MAX {
            self.recorded.clear();
        }
        if !self.failed {
            self.recorded.insert(size, recorded);
        }
        Ok(tokens)
    }
}

/// Number of sequences to which `count` sequences are filled up.
fn filled_rows(count: usize) -> usize {
    match count {
        ..ROWS_STEP => count.next_power_of_two(),
        _ => count.next_multiple_of(ROWS_STEP),
    }
}

/// An upper estimate of the memory in bytes of the tensors that recorded steps make, besides that
/// of other steps. Only one of them runs at a time, so all use the same memory.
pub(crate) fn memory_bytes(config: &DecoderConfig, options: &CandleOptions, tile: RowTile) -> u64 {
    let step_tokens = filled_rows(options.step_sequences);
    memory::step_bytes(config, &CandleOptions { step_tokens, ..*options }, tile)
}

/// Fills up a decode step with copies of the sequence with the shortest context. `None` if `batch`
/// is none: a token of each sequence, whose keys and values are written, and from whose logits one
/// is drawn.
fn fill(batch: &StepBatch, attention: Attention) -> Option<(Size, StepBatch)> {
    let decodes = |slice: &SequenceSlice| {
        slice.token_count == 1
            && slice.write_from <= slice.start
            && matches!(slice.logit_rows, LogitRows::Drawn(_))
    };
    if !batch.sequences.iter().all(decodes) {
        return None;
    }
    let rows = filled_rows(batch.sequences.len());
    let (index, shortest) =
        batch.sequences.iter().enumerate().min_by_key(|(_, slice)| slice.start)?;
    let mut filled = batch.clone();
    filled.tokens.resize(rows, batch.tokens[index]);
    filled.sequences.resize(rows, shortest.clone());
    let room = attention.room(&all_spans(&filled))?;
    Some((Size { rows, room }, filled))
}

impl Recorded {
    /// Computes the step for the first time, and records it. Returns whether it was recorded.
    fn record(&mut self, decoder: &Decoder, kv: &mut KvStore, logits: &Tensor) -> Result<bool> {
        #[cfg(feature = "cuda-core")]
        if let candle_core::Device::Cuda(device) = decoder.device() {
            self.graph = cuda::record(device, || self.compute(decoder, kv, logits))?;
            return Ok(self.graph.is_some());
        }
        self.compute(decoder, kv, logits)?;
        Ok(true)
    }

    /// Computes the step from its present inputs.
    fn launch(&self, decoder: &Decoder, kv: &mut KvStore, logits: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda-core")]
        if let Some(graph) = &self.graph {
            return graph.launch();
        }
        self.compute(decoder, kv, logits)
    }

    /// What is recorded. No tensor that it makes outlives it, so a graph frees all the memory that
    /// it allocates.
    fn compute(&self, decoder: &Decoder, kv: &mut KvStore, logits: &Tensor) -> Result<()> {
        if let Some((tokens, rows)) = decoder.compute(&self.inputs, kv)?.drawn() {
            self.tokens.slice_set(tokens, 0, 0)?;
            logits.slice_set(rows, 0, 0)?;
        }
        Ok(())
    }
}
