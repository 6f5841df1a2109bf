//! Packing of weights: panels of 16 output features, from the rows of a file.

use crate::lanes::LANES;
use crate::quant;
use crate::tensor_type::TensorType;

/// The layout of the panels of a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelLayout {
    /// Type of the weights.
    pub(super) dtype: TensorType,
    /// Number of bytes of a row in a file.
    pub(super) row_bytes: usize,
    /// Number of bytes of a packed panel.
    pub(super) panel_bytes: usize,
}

impl PanelLayout {
    /// The layout of panels with `padded_inner` weights per row. A row of a file has `inner`
    /// weights.
    pub(super) fn new(dtype: TensorType, inner: usize, padded_inner: usize) -> PanelLayout {
        let bytes = |inner: usize| inner / dtype.block_len() * dtype.block_bytes();
        PanelLayout { dtype, row_bytes: bytes(inner), panel_bytes: bytes(padded_inner) * LANES }
    }

    /// Packs at most 16 rows into a panel that is all zeroes.
    pub(super) fn pack(&self, rows: &[u8], panel: &mut [u8]) {
        match self.dtype {
            TensorType::F32 | TensorType::Bf16 => self.pack_units::<4>(rows, panel),
            TensorType::F16 => self.pack_units::<2>(rows, panel),
            _ => quant::pack(self.dtype, self.row_bytes, rows, panel),
        }
    }

    /// Copies the row in lane `lane` of a panel to `row`, in the form that it has in a file.
    pub(super) fn unpack(&self, panel: &[u8], lane: usize, row: &mut [u8]) {
        match self.dtype {
            TensorType::F32 | TensorType::Bf16 => unpack_units::<4>(panel, lane, row),
            TensorType::F16 => unpack_units::<2>(panel, lane, row),
            _ => quant::unpack(self.dtype, panel, lane, row),
        }
    }

    /// Packs rows as `[inner][16]` units. A unit is one weight, or a pair of bf16 weights.
    fn pack_units<const UNIT: usize>(&self, rows: &[u8], panel: &mut [u8]) {
        /// Number of units of a row that are copied before the next row, so that the cache lines
        /// that are written stay in the L1 cache.
        const UNITS_PER_RUN: usize = 128;
        for start in (0..self.row_bytes).step_by(UNITS_PER_RUN * UNIT) {
            for (lane, row) in rows.chunks_exact(self.row_bytes).enumerate() {
                let run = &row[start..self.row_bytes.min(start + UNITS_PER_RUN * UNIT)];
                let (units, rest) = run.as_chunks::<UNIT>();
                let to = panel[start * LANES..].as_chunks_mut::<UNIT>().0;
                for (unit, to) in units.iter().zip(to.iter_mut().skip(lane).step_by(LANES)) {
                    *to = *unit;
                }
                if !rest.is_empty() {
                    to[units.len() * LANES + lane][..rest.len()].copy_from_slice(rest);
                }
            }
        }
    }
}

/// Reverses [`PanelLayout::pack_units`] for one row.
fn unpack_units<const UNIT: usize>(panel: &[u8], lane: usize, row: &mut [u8]) {
    let units = panel.as_chunks::<UNIT>().0.iter().skip(lane).step_by(LANES);
    for (unit, to) in units.zip(row.chunks_mut(UNIT)) {
        to.copy_from_slice(&unit[..to.len()]);
    }
}
