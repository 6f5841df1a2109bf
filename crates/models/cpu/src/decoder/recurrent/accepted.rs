//! Tokens that were proposed: their projections are kept until it is known how many of them were
//! accepted, and these are added to the state, with the bits of tokens that were certain.

use stolon_checkpoint::config::RecurrentShape;
use stolon_kernels::Path;

use super::recur::StateCopies;
use super::{FinishRow, Recurrent, RecurrentBuffers};
use crate::decoder::plan::SliceRows;
use crate::state_store::LayerProposals;
use crate::workers::Workers;

/// The projections of a row, in the order in which they are kept, with their widths.
fn parts<'a>(
    shape: &RecurrentShape,
    buffers: &'a mut RecurrentBuffers,
) -> [(&'a mut Vec<f32>, usize); 3] {
    let RecurrentBuffers { projected, strengths, steps, .. } = buffers;
    [(projected, shape.channels), (strengths, shape.heads), (steps, shape.decay_width())]
}

impl Recurrent {
    /// Adds the tokens of the last step that were accepted to `states`.
    pub(super) fn add_accepted(
        &self,
        path: Path,
        buffers: &mut RecurrentBuffers,
        (states, proposals): (&mut [&mut [f32]], &[LayerProposals<'_>]),
        finish: &FinishRow<'_>,
        workers: &Workers,
    ) {
        let with_accepted = states.iter_mut().zip(proposals).filter(|(_, of)| of.accepted > 0);
        let (mut states, proposals): (Vec<&mut [f32]>, Vec<_>) =
            with_accepted.map(|(state, of)| (&mut **state, of)).unzip();
        let mut rows = 0;
        let mut slices = Vec::with_capacity(states.len());
        for LayerProposals { accepted: tokens, .. } in proposals.iter().copied() {
            let (tokens, checkpoints) = (*tokens, Vec::new());
            slices.push(SliceRows { first: rows, tokens, certain: tokens, checkpoints });
            rows += tokens;
        }
        if rows == 0 {
            return;
        }
        let mut own = buffers.accepted.take().unwrap_or_default();
        own.reserve(&self.shape, rows);
        for (slice, LayerProposals { rows: kept, .. }) in slices.iter().zip(proposals) {
            let mut kept = &kept[..];
            for row in slice.first..slice.first + slice.tokens {
                for (part, width) in parts(&self.shape, &mut own) {
                    let (values, rest) = kept.split_at(width);
                    part[row * width..][..width].copy_from_slice(values);
                    kept = rest;
                }
            }
        }
        self.prepare(path, &mut own, (&slices, &states), finish, workers);
        let mut copies = StateCopies::new(&slices, self.shape.state_len());
        self.recur(path, &mut own, &slices, (&mut states, &mut copies), workers);
        self.keep_inputs(&own, &slices, &mut states);
        buffers.accepted = Some(own);
    }

    /// Keeps the projections of the tokens that are only proposed.
    pub(super) fn keep_proposed(
        &self,
        buffers: &mut RecurrentBuffers,
        slices: &[SliceRows<'_>],
        proposals: &mut [LayerProposals<'_>],
    ) {
        for (slice, LayerProposals { rows: kept, .. }) in slices.iter().zip(proposals) {
            kept.clear();
            for row in slice.first + slice.certain..slice.first + slice.tokens {
                for (part, width) in parts(&self.shape, buffers) {
                    kept.extend_from_slice(&part[row * width..][..width]);
                }
            }
        }
    }
}
