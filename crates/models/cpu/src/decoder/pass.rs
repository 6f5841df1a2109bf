//! The inputs and outputs of a mixer in a step, in addition to its weights, its buffers and the
//! data that is kept of positions.
//!
//! A layer calls its mixers twice, in this order:
//!
//! 1. `project` computes the projections of the layer's normalized input. The results that later
//!    positions need are written to the KV store or the states.
//! 2. `mix` mixes positions and packs the result for the output projection.
//!
//! Between the two calls, the buffers of a mixer keep the projections. Layers run one after the
//! other, so all layers share the buffers of a kind of mixer.

use stolon_backend::StepBatch;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::DecoderConfig;
use stolon_kernels::{Matrix, Operands, Path};

use super::adapters::AdapterRows;
use super::passes;
use super::plan::BatchRows;
use super::profile::Profile;
use super::rope::RopeTable;
use crate::kv_store::KvStore;
use crate::state_store::StateStore;
use crate::workers::Workers;

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Pass<'a> {
    /// Index of the layer.
    pub(super) index: usize,
    pub(super) config: &'a DecoderConfig,
    pub(super) path: Path,
    /// The rows of the step.
    pub(super) plan: &'a BatchRows,
    /// The tables of all rotary embeddings.
    pub(super) ropes: &'a [RopeTable],
    /// The normalized input of the layer, packed for the projections.
    pub(super) normed: &'a Operands,
    /// The result, packed for the output projection.
    pub(super) mixed: &'a mut Operands,
    pub(super) adapters: &'a mut AdapterRows,
    pub(super) profile: &'a mut Profile,
    pub(super) workers: &'a Workers,
    /// The first position that attention reads: 0, or 1 in a head for multi-token prediction, whose
    /// position 0 has no token before it.
    pub(super) first: usize,
}

impl<'a> Pass<'a> {
    /// The table of a rotary embedding; `None` if positions are not rotated.
    pub(super) fn rope(&self, rope: Option<usize>) -> Option<&'a RopeTable> {
        rope.map(|rope| &self.ropes[rope])
    }

    /// Packs `rows` rows, which `row_of` computes one by one, for the projection `output` and for
    /// the adapters at `site`. `work` is the number of operations of a row.
    pub(super) fn pack_result(
        &mut self,
        (output, site): (&Matrix, Site),
        (rows, work): (usize, usize),
        row_of: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let (path, workers, width) = (self.path, self.workers, output.in_features());
        self.mixed.reset(rows, &[output]);
        passes::pack_rows(self.mixed, workers.for_pass(rows, work), width, &row_of);
        self.adapters.lower((self.index, site), path, workers, row_of);
    }
}

/// The data of earlier positions, which steps read and write.
#[derive(Debug)]
pub(crate) struct StepState<'a> {
    /// The keys and values of all positions.
    pub(crate) kv: &'a mut KvStore,
    /// The recurrent states of the running sequences.
    pub(crate) states: &'a mut StateStore,
}

/// The slices of a step, and the data that is kept of positions.
#[derive(Debug)]
pub(super) struct Kept<'a, 'b> {
    /// The slices of the step.
    pub(super) batch: &'a StepBatch,
    /// The data that is kept of positions.
    pub(super) step: &'a mut StepState<'b>,
}

/// The projections of a layer's input that are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inputs {
    /// All projections.
    All,
    /// The projections that later positions need: keys and values, the inputs of the convolution,
    /// or the inputs of the state.
    Kept,
    /// The projections that only rows with an output need: queries or gates.
    Own,
}

impl Inputs {
    pub(super) fn kept(self) -> bool {
        self != Self::Own
    }

    pub(super) fn own(self) -> bool {
        self != Self::Kept
    }
}
