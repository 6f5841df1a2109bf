//! The LoRA adapters of a step. The rows of each adapter are multiplied with its matrices, and the
//! results are added to the products with the model's matrices.
//!
//! **Invariant: batch invariance.** The products have the row tile of all products, so the update
//! of a row depends on the row and its adapter only. Rows without an adapter keep their bits: the
//! sum has the type of the model's product, and nothing is added to them.

use candle_core::{D, DType, Device, Result, Tensor};
use stolon_backend::{Adapter, StepBatch};
use stolon_checkpoint::adapter::{ExpertSite, LoraWeights, Site};

use crate::adapter_weights::{OnDevice, SiteWeights};
use crate::inputs::Selection;

/// The rows of a step that have an adapter.
#[derive(Debug, Default)]
pub(crate) struct AdapterRows {
    /// Empty if no row of the step has an adapter.
    groups: Vec<Group>,
    /// For each row, the index of its group; `None` if the row has no adapter. Empty if no row has
    /// one.
    places: Vec<Option<usize>>,
}

/// The rows of one adapter.
#[derive(Debug)]
struct Group {
    adapter: Adapter,
    /// `None` if there are none.
    rows: Option<Selection>,
}

/// Projections with the same input.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At {
    /// Of a layer. The output matrix is at [`Site::Inputs`] of an additional layer.
    Layer(usize, Site),
    /// Of an expert of a layer.
    Expert(usize, usize, ExpertSite),
}

/// The updates of the results of projections with the same input.
#[derive(Debug)]
pub(crate) struct Updates<'a> {
    /// The rows of each adapter that changes one of the projections, and what is added to them.
    groups: Vec<(&'a Selection, Tensor)>,
}

impl AdapterRows {
    /// The rows of `batch`.
    pub(crate) fn new(batch: &StepBatch, device: &Device) -> Result<Self> {
        let mut adapters: Vec<&Adapter> = Vec::new();
        let mut places = Vec::new();
        for slice in &batch.sequences {
            let place = slice.adapter.as_ref().map(|adapter| {
                let known = adapters.iter().position(|known| *known == adapter);
                known.unwrap_or_else(|| {
                    adapters.push(adapter);
                    adapters.len() - 1
                })
            });
            places.extend(std::iter::repeat_n(place, slice.token_count));
        }
        if adapters.is_empty() {
            return Ok(Self::default());
        }
        Self::group(adapters.into_iter(), places, device)
    }

    /// The rows `rows` of these, in this order.
    pub(crate) fn select(&self, rows: &[u32], device: &Device) -> Result<Self> {
        if self.groups.is_empty() {
            return Ok(Self::default());
        }
        let places = rows.iter().map(|row| self.places[*row as usize]).collect();
        Self::group(self.groups.iter().map(|group| &group.adapter), places, device)
    }

    /// Groups rows by adapter. `places` has the index of the adapter of each row.
    fn group<'a>(
        adapters: impl Iterator<Item = &'a Adapter>,
        places: Vec<Option<usize>>,
        device: &Device,
    ) -> Result<Self> {
        let groups = adapters.enumerate().map(|(index, adapter)| {
            let own = (0..).zip(&places).filter(|(_, place)| **place == Some(index));
            let rows: Vec<u32> = own.map(|(row, _)| row).collect();
            let rows = Selection::some(&rows, places.len(), device)?;
            Ok(Group { adapter: adapter.clone(), rows })
        });
        let groups = groups.collect::<Result<_>>()?;
        Ok(Self { groups, places })
    }

    /// Adds the updates of the embeddings of `tokens`, `[rows]`, to the embeddings `x`, `[rows,
    /// hidden_size]` in f32.
    pub(crate) fn embed(&self, tokens: &Tensor, x: Tensor) -> Result<Tensor> {
        let mut groups = Vec::new();
        for (weights, rows) in self.weights() {
            if let Some(embedding) = weights.embedding() {
                groups.push((rows, embedding.of(&rows.of(tokens)?)?));
            }
        }
        Updates { groups }.add(0, x)
    }

    /// The updates of the projections `at` with the input `x`, which has one row for each row of
    /// these, and perhaps others after them.
    pub(crate) fn updates(&self, at: At, x: &Tensor) -> Result<Updates<'_>> {
        let mut groups = Vec::new();
        for (weights, rows) in self.weights() {
            if let Some(site) = at.of(weights) {
                groups.push((rows, site.of(&rows.of(&x.contiguous()?)?)?));
            }
        }
        Ok(Updates { groups })
    }

    /// The weights of each adapter, and its rows.
    fn weights(&self) -> impl Iterator<Item = (&LoraWeights<OnDevice>, &Selection)> {
        let weights = self.groups.iter().map(|Group { adapter, rows }| {
            // The backend has refused adapters of other types.
            Some((adapter.weights::<LoraWeights<OnDevice>>()?, rows.as_ref()?))
        });
        weights.flatten()
    }
}

impl At {
    fn of(self, weights: &LoraWeights<OnDevice>) -> Option<&SiteWeights> {
        match self {
            Self::Layer(layer, site) => weights.site(layer, site),
            Self::Expert(layer, expert, site) => weights.expert(layer, expert, site),
        }
    }
}

impl Updates<'_> {
    /// Adds the updates to `y`, the results of some of the projections, in the type of `y`. The
    /// first column of `y` is the column `first` of the results of all projections.
    pub(crate) fn add(&self, first: usize, y: Tensor) -> Result<Tensor> {
        if self.groups.is_empty() {
            return Ok(y);
        }
        let dtype = y.dtype();
        let mut sum = y.to_dtype(DType::F32)?.contiguous()?;
        for (rows, update) in &self.groups {
            let update = update.narrow(D::Minus1, first, sum.dim(D::Minus1)?)?.contiguous()?;
            sum = match rows {
                Selection::All => (sum + update)?,
                Selection::Rows(rows) => sum.index_add(rows, &update, 0)?,
            };
        }
        sum.to_dtype(dtype)
    }
}
