//! What a step needs on the device besides the weights and the KV store.
//!
//! All of it is uploaded before anything is computed. So a decode step copies nothing between host
//! and device while it computes, which a CUDA graph needs.

use candle_core::{Device, Result, Tensor};
use stolon_backend::StepBatch;

use crate::attention::{Attention, Padding, Prepared};
use crate::draw;
use crate::kv_store::KvShape;
use crate::plan::{BatchRows, all_spans, indices, output_spans};
use crate::rope::Rotations;

/// The inputs of a step.
#[derive(Debug)]
pub(crate) struct StepInputs {
    /// Tokens of the rows, `[rows]` in u32.
    pub(crate) tokens: Tensor,
    /// Positions of the rows, `[rows]` in u32.
    pub(crate) positions: Tensor,
    /// One per rotary embedding, of all positions up to the largest.
    pub(crate) rotations: Vec<Rotations>,
    /// The rows whose keys and values are written, and the slots that they are written to, in u32;
    /// `None` if none is.
    pub(crate) written: Option<(Selection, Tensor)>,
    pub(crate) attention: Prepared,
    /// `None` if no row is returned.
    pub(crate) outputs: Option<OutputInputs>,
}

/// The inputs of the rows that are returned.
#[derive(Debug)]
pub(crate) struct OutputInputs {
    /// These rows and the attention of their queries; `None` for all rows.
    pub(crate) rows: Option<(Tensor, Prepared)>,
    /// Those of the returned rows whose hidden states are returned; `None` if none is.
    pub(crate) hidden: Option<Selection>,
    /// Those that get logits: first those that are returned whole, then those from which a token is
    /// drawn; `None` if there are none.
    pub(crate) logits: Option<Selection>,
    /// How tokens are drawn; `None` if none is. See [`draw::upload`].
    pub(crate) draws: Option<Tensor>,
}

/// Rows of a tensor.
#[derive(Debug)]
pub(crate) enum Selection {
    All,
    /// Indices of rows in u32.
    Rows(Tensor),
}

impl StepInputs {
    /// Uploads the inputs of `batch`, whose plan is `plan`. `rotations` has at least
    /// `plan.position_count()` positions.
    pub(crate) fn new(
        batch: &StepBatch,
        plan: &BatchRows,
        rotations: Vec<Rotations>,
        (attention, shape, padding): (Attention, &KvShape, Padding),
        device: &Device,
    ) -> Result<Self> {
        let rows = plan.positions.len();
        let outputs = match plan.output_rows.as_slice() {
            [] => None,
            outputs => Some(OutputInputs {
                rows: match Selection::new(outputs, rows, device)? {
                    Selection::All => None,
                    Selection::Rows(rows) => {
                        let spans = output_spans(batch);
                        Some((rows, attention.prepare(&spans, shape, padding, device)?))
                    }
                },
                hidden: Selection::some(&plan.hidden_rows, outputs.len(), device)?,
                logits: Selection::some(
                    &[plan.logit_rows.as_slice(), &plan.drawn_rows].concat(),
                    outputs.len(),
                    device,
                )?,
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
            attention: attention.prepare(&all_spans(batch), shape, padding, device)?,
            outputs,
        })
    }

    /// The tensors that differ from step to step, of a decode step all of whose rows are written
    /// and get a token. Their number and shapes depend on the number of rows and the padding only.
    fn of_decode(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.tokens, &self.positions];
        tensors.extend(self.written.as_ref().map(|(_, slots)| slots));
        tensors.extend(self.outputs.as_ref().and_then(|outputs| outputs.draws.as_ref()));
        tensors.extend(self.attention.of_decode());
        tensors
    }

    /// Overwrites the inputs of a decode step with those of another one of the same size, at the
    /// same addresses. The rotations stay.
    pub(crate) fn assign(&self, other: &Self) -> Result<()> {
        let (to, from) = (self.of_decode(), other.of_decode());
        to.into_iter().zip(from).try_for_each(|(to, from)| to.slice_set(from, 0, 0))
    }
}

impl Selection {
    /// The rows `rows` of a tensor of `count` rows.
    fn new(rows: &[u32], count: usize, device: &Device) -> Result<Self> {
        if rows.iter().copied().eq(0..count as u32) {
            return Ok(Self::All);
        }
        indices(rows, device).map(Self::Rows)
    }

    /// As [`Selection::new`]; `None` if there are no rows.
    fn some(rows: &[u32], count: usize, device: &Device) -> Result<Option<Self>> {
        if rows.is_empty() { Ok(None) } else { Self::new(rows, count, device).map(Some) }
    }

    /// The rows of `x`, in order.
    pub(crate) fn of(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::All => Ok(x.clone()),
            Self::Rows(rows) => x.index_select(rows, 0),
        }
    }
}
