//! Decode steps as CUDA graphs.
//!
//! Launching the kernels of a decode step of a small model one by one can take longer than running
//! them. A graph launches all of them at once. A graph contains the addresses that its kernels read
//! and write. The first step of each size is therefore captured together with its inputs, and a
//! later step of the same size overwrites these inputs and replays the graph. Batches are padded to
//! a few sizes with copies of one of their sequences, which compute and write the same bits once
//! more.
//!
//! On the CPU, which tests everything except the graphs themselves, a replay computes the step
//! again from the inputs that were kept.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
use stolon_backend::{LogitRows, SequenceSlice, StepBatch, StepOutput};
use stolon_checkpoint::{DecoderConfig, MixerConfig};

use crate::attention::{Attentions, Padding};
use crate::decoder::Decoder;
use crate::draw::drawn_tokens;
use crate::inputs::StepInputs;
use crate::linear::RowTile;
use crate::plan::{BatchRows, all_spans};
use crate::state_store::Stores;
use crate::{CandleOptions, memory};

#[cfg(feature = "cuda-core")]
mod cuda;

/// Maximum number of captured steps. When it is exceeded, all captured steps are dropped.
const CAPTURED_MAX: usize = 64;
/// Batches with at least this number of sequences are padded to a multiple of it, and smaller
/// batches to a power of two.
const BATCH_STEP: usize = 8;

/// The captured steps of a backend.
#[derive(Debug)]
pub(crate) struct Graphs {
    captured: HashMap<Size, Captured>,
    /// The logits of the last step, `[padded step_sequences, vocab_size]` in f32.
    logits: Tensor,
    /// Whether capturing a step has failed. No other step is captured after that.
    failed: bool,
}

/// The sizes that determine the shapes of all tensors of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Size {
    /// Number of sequences.
    rows: usize,
    padding: Padding,
}

/// A captured step with the tensors at the addresses that it reads and writes.
#[derive(Debug)]
struct Captured {
    inputs: StepInputs,
    /// The tokens that are drawn, `[rows]` in u32.
    tokens: Tensor,
    /// `None` on the CPU.
    #[cfg(feature = "cuda-core")]
    graph: Option<cuda::Graph>,
}

/// Whether decode steps can be captured at all. They cannot with experts, because the router's
/// scores are copied to the host during the step, with an attention whose tensors have shapes that
/// depend on the contexts, or with convolutions and recurrent layers, whose inputs are not
/// overwritten.
pub(crate) fn are_possible(config: &DecoderConfig, attentions: &Attentions) -> bool {
    let is_attention = |mixer: &MixerConfig| match mixer {
        MixerConfig::Attention(_) | MixerConfig::Latent(_) => true,
        MixerConfig::Convolution(_) | MixerConfig::DeltaNet(_) | MixerConfig::Mamba2(_) => false,
    };
    config.experts().is_none() && config.mixers().all(is_attention) && attentions.can_pad()
}

impl Graphs {
    /// Creates an empty set of graphs for steps of up to `options.step_sequences` sequences.
    pub(crate) fn new(decoder: &Decoder, options: &CandleOptions) -> Result<Self> {
        let shape = (padded_batch(options.step_sequences), decoder.config().vocab_size);
        let logits = Tensor::zeros(shape, DType::F32, decoder.device())?;
        Ok(Self { captured: HashMap::new(), logits, failed: false })
    }

    /// Number of captured steps.
    pub(crate) fn count(&self) -> usize {
        self.captured.len()
    }

    /// Computes `batch`, which the batch checker has accepted. Returns `None`, and computes
    /// nothing, if the step cannot be captured. The caller has checked [`are_possible`].
    pub(crate) fn step(
        &mut self,
        batch: &StepBatch,
        decoder: &mut Decoder,
        stores: &mut Stores,
        attentions: &Attentions,
    ) -> Result<Option<StepOutput>> {
        if self.failed {
            return Ok(None);
        }
        let Some((size, padded)) = pad(batch, attentions) else { return Ok(None) };
        if size.rows > self.logits.dim(0)? {
            return Ok(None);
        }
        let block_size = stores.kv.shape().block_size();
        let plan = BatchRows::new(&padded, block_size);
        let inputs = decoder.upload(&padded, &plan, block_size, attentions, size.padding)?;
        let tokens = match self.captured.get(&size) {
            Some(captured) => {
                captured.inputs.assign(&inputs)?;
                captured.replay(decoder, stores, &self.logits)?;
                captured.tokens.clone()
            }
            None => self.capture(size, inputs, decoder, stores)?,
        };
        let draws = &plan.draws[..batch.sequences.len()];
        let drawn = drawn_tokens(&tokens, draws, &self.logits)?;
        Ok(Some(StepOutput { drawn, ..StepOutput::default() }))
    }

    /// Computes a step of a new size, and captures it. Returns the tokens.
    fn capture(
        &mut self,
        size: Size,
        inputs: StepInputs,
        decoder: &Decoder,
        stores: &mut Stores,
    ) -> Result<Tensor> {
        let tokens = Tensor::zeros(size.rows, DType::U32, decoder.device())?;
        let mut captured = Captured {
            inputs,
            tokens: tokens.clone(),
            #[cfg(feature = "cuda-core")]
            graph: None,
        };
        self.failed = !captured.capture(decoder, stores, &self.logits)?;
        if self.failed || self.captured.len() == CAPTURED_MAX {
            self.captured.clear();
        }
        if !self.failed {
            self.captured.insert(size, captured);
        }
        Ok(tokens)
    }
}

/// Number of sequences to which a batch of `count` sequences is padded.
fn padded_batch(count: usize) -> usize {
    match count {
        ..BATCH_STEP => count.next_power_of_two(),
        _ => count.next_multiple_of(BATCH_STEP),
    }
}

/// An upper estimate of the memory in bytes that graphs allocate for their tensors, in addition to
/// the memory of other steps. Only one graph runs at a time, so all graphs use the same memory.
pub(crate) fn memory_bytes(config: &DecoderConfig, options: &CandleOptions, tile: RowTile) -> u64 {
    let step_tokens = padded_batch(options.step_sequences);
    memory::step_bytes(config, &CandleOptions { step_tokens, ..*options }, tile)
}

/// Pads a decode step with copies of the sequence with the shortest context. Returns `None` if
/// `batch` is not a decode step. In a decode step, each sequence has one token, its keys and values
/// are written, the next token is drawn from its logits, and it has no adapter, whose matrices
/// would be at other addresses in the next step.
fn pad(batch: &StepBatch, attentions: &Attentions) -> Option<(Size, StepBatch)> {
    let decodes = |slice: &SequenceSlice| {
        slice.token_count == 1
            && slice.write_from <= slice.start
            && slice.adapter.is_none()
            && matches!(slice.logit_rows, LogitRows::Drawn(_))
    };
    if !batch.sequences.iter().all(decodes) {
        return None;
    }
    let rows = padded_batch(batch.sequences.len());
    let (index, shortest) =
        batch.sequences.iter().enumerate().min_by_key(|(_, slice)| slice.start)?;
    let mut padded = batch.clone();
    padded.tokens.resize(rows, batch.tokens[index]);
    padded.sequences.resize(rows, shortest.clone());
    let padding = attentions.padding(&all_spans(&padded))?;
    Some((Size { rows, padding }, padded))
}

impl Captured {
    /// Computes the step for the first time, and captures it. Returns whether it was captured.
    fn capture(&mut self, decoder: &Decoder, stores: &mut Stores, logits: &Tensor) -> Result<bool> {
        #[cfg(feature = "cuda-core")]
        if let candle_core::Device::Cuda(device) = decoder.device() {
            self.graph =
                cuda::capture_after_first_run(device, || self.compute(decoder, stores, logits))?;
            return Ok(self.graph.is_some());
        }
        self.compute(decoder, stores, logits)?;
        Ok(true)
    }

    /// Computes the step from the current contents of its inputs.
    fn replay(&self, decoder: &Decoder, stores: &mut Stores, logits: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda-core")]
        if let Some(graph) = &self.graph {
            return graph.launch();
        }
        self.compute(decoder, stores, logits)
    }

    /// The work that is captured. All tensors that it creates are dropped before it returns, so a
    /// graph frees all the memory that it allocates.
    fn compute(&self, decoder: &Decoder, stores: &mut Stores, logits: &Tensor) -> Result<()> {
        if let Some((tokens, rows)) = decoder.compute(&self.inputs, stores)?.drawn() {
            self.tokens.slice_set(tokens, 0, 0)?;
            logits.slice_set(rows, 0, 0)?;
        }
        Ok(())
    }
}
