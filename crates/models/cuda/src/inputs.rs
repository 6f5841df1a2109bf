//! The inputs of a step on the device, in addition to the weights and the KV store.
//!
//! All of them are uploaded before anything is computed. A decode step therefore copies nothing
//! between host and device while it computes, as a CUDA graph requires.

use candle_core::{Device, Result, Tensor};
use stolon_backend::StepBatch;
use stolon_checkpoint::DecoderConfig;

use crate::adapters::AdapterRows;
use crate::attention::{Attentions, Padding, Plans};
use crate::draw;
use crate::plan::{BatchRows, all_spans, indices, output_spans};
use crate::rope::Rotations;
use crate::state_inputs::{StateInputs, TapSlots};

/// The inputs of a step.
#[derive(Debug)]
pub(crate) struct StepInputs {
    /// Tokens of the rows, `[rows]` in u32.
    pub(crate) tokens: Tensor,
    /// Positions of the rows, `[rows]` in u32.
    pub(crate) positions: Tensor,
    /// The tables of all rotary embeddings, with all positions up to the largest one of the step.
    pub(crate) rotations: Vec<Rotations>,
    /// The rows whose keys and values are written, and their slots in the KV store in u32; `None`
    /// if none are written.
    pub(crate) written: Option<(Selection, Tensor)>,
    pub(crate) attention: Plans,
    /// For each tap of the convolutions in the KV store, the oldest position first, the positions
    /// that it reads; empty if the model has no such convolutions.
    pub(crate) taps: Vec<TapSlots>,
    /// The inputs of recurrent layers, if the model has any.
    pub(crate) states: Option<StateInputs>,
    /// The rows with an adapter.
    pub(crate) adapters: AdapterRows,
    /// `None` if no row is returned.
    pub(crate) outputs: Option<OutputInputs>,
}

/// The inputs of the rows that are returned.
#[derive(Debug)]
pub(crate) struct OutputInputs {
    /// The indices of these rows, and the attention of their queries; `None` if all rows are
    /// returned.
    pub(crate) rows: Option<(Tensor, Plans)>,
    /// The rows with an adapter, among those that are returned.
    pub(crate) adapters: AdapterRows,
    /// The rows, among those that are returned, whose hidden states are returned; `None` if there
    /// are none.
    pub(crate) hidden: Option<Selection>,
    /// The rows, among those that are returned, that get logits: first the rows whose logits are
    /// returned, then the rows from which a token is drawn. `None` if there are none.
    pub(crate) logits: Option<Selection>,
    /// The rows with an adapter, among those that get logits.
    pub(crate) logit_adapters: AdapterRows,
    /// The parameters of the tokens that are drawn, see [`draw::upload`]; `None` if none are drawn.
    pub(crate) draws: Option<Tensor>,
}

/// Rows of a tensor.
#[derive(Debug)]
pub(crate) enum Selection {
    All,
    /// The rows with these indices, in u32.
    Rows(Tensor),
}

impl StepInputs {
    /// Uploads the inputs of `batch`, whose plan is `plan`. `rotations` has at least
    /// `plan.position_count()` positions.
    pub(crate) fn new(
        config: &DecoderConfig,
        (batch, plan): (&StepBatch, &BatchRows),
        rotations: Vec<Rotations>,
        (attentions, block_size, padding): (&Attentions, usize, Padding),
        device: &Device,
    ) -> Result<Self> {
        let rows = plan.positions.len();
        let adapters = AdapterRows::new(batch, device)?;
        let of_outputs = adapters.select(&plan.output_rows, device)?;
        let logit_rows = [plan.logit_rows.as_slice(), &plan.drawn_rows].concat();
        let outputs = match plan.output_rows.as_slice() {
            [] => None,
            outputs => Some(OutputInputs {
                rows: match Selection::new(outputs, rows, device)? {
                    Selection::All => None,
                    Selection::Rows(rows) => {
                        let spans = output_spans(batch);
                        Some((rows, attentions.prepare(&spans, block_size, padding, device)?))
                    }
                },
                hidden: Selection::some(&plan.hidden_rows, outputs.len(), device)?,
                logits: Selection::some(&logit_rows, outputs.len(), device)?,
                logit_adapters: of_outputs.select(&logit_rows, device)?,
                adapters: of_outputs,
                draws: match plan.draws.as_slice() {
                    [] => None,
                    draws => Some(draw::upload(draws, device)?),
                },
            }),
        };
        Ok(Self {
            tokens: indices(&batch.tokens, device)?,
            positions: indices(&plan.positions, device)?,
            rotations,
            written: match Selection::some(&plan.written_rows, rows, device)? {
                None => None,
                Some(rows) => Some((rows, indices(&plan.slots, device)?)),
            },
            taps: match config.convolution() {
                Some(convolution) => TapSlots::new(batch, convolution.taps, block_size, device)?,
                None => Vec::new(),
            },
            states: match config.recurrent_shape() {
                Some(shape) => Some(StateInputs::new(batch, shape.taps, device)?),
                None => None,
            },
            adapters,
            attention: attentions.prepare(&all_spans(batch), block_size, padding, device)?,
            outputs,
        })
    }

    /// The tensors whose contents change from step to step, for a decode step in which every row is
    /// written and gets a token. Their number and shapes depend only on the number of rows and the
    /// padding.
    fn of_decode(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.tokens, &self.positions];
        tensors.extend(self.written.as_ref().map(|(_, slots)| slots));
        tensors.extend(self.outputs.as_ref().and_then(|outputs| outputs.draws.as_ref()));
        tensors.extend(self.attention.of_decode());
        tensors
    }

    /// Overwrites the inputs of a decode step with the inputs of another one of the same size, at
    /// the same addresses. The rotations are not changed.
    pub(crate) fn assign(&self, other: &Self) -> Result<()> {
        let (to, from) = (self.of_decode(), other.of_decode());
        to.into_iter().zip(from).try_for_each(|(to, from)| to.slice_set(from, 0, 0))
    }
}

impl Selection {
    /// Selects the rows `rows` of a tensor of `count` rows.
    pub(crate) fn new(rows: &[u32], count: usize, device: &Device) -> Result<Self> {
        if rows.iter().copied().eq(0..count as u32) {
            return Ok(Self::All);
        }
        indices(rows, device).map(Self::Rows)
    }

    /// The same as [`Selection::new`]; `None` if there are no rows.
    pub(crate) fn some(rows: &[u32], count: usize, device: &Device) -> Result<Option<Self>> {
        if rows.is_empty() { Ok(None) } else { Self::new(rows, count, device).map(Some) }
    }

    /// The selected rows of `x`, in order.
    pub(crate) fn of(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::All => Ok(x.clone()),
            Self::Rows(rows) => x.index_select(rows, 0),
        }
    }
}
