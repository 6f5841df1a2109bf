//! Computes the updates of experts by adapters. The rows of an expert are the rows of the batch
//! that use it.

use std::mem::take;

use stolon_checkpoint::adapter::{ExpertSite, LoraWeights, SiteWeights};
use stolon_kernels::{LowRank, Path};

use super::{AdapterRows, Group, Place, RowUpdates, Task, multiply};
use crate::workers::Workers;

/// Index of an expert that the batch uses, and the rows that use it.
pub(in crate::decoder) type ExpertRow<'a> = (usize, &'a [u32]);

/// `scale * A x` of a layer's experts at one of their sites.
#[derive(Debug, Default)]
pub(super) struct ExpertRows {
    /// For each row of each expert, the index of its values in `lowered`; `None` if the row has no
    /// adapter that changes the expert. Empty if no row has such an adapter.
    starts: Vec<Option<usize>>,
    lowered: Vec<f32>,
}

/// The updates of an expert of layer `layer`. The indices of rows are indices within the expert.
#[derive(Clone, Copy, Debug)]
pub(in crate::decoder) struct ExpertUpdates<'a> {
    adapters: &'a AdapterRows,
    layer: usize,
    site: ExpertSite,
    expert: ExpertRow<'a>,
    /// Index of the expert's first row in [`ExpertRows::starts`].
    first: usize,
}

impl Group {
    fn expert(&self, layer: usize, expert: usize, site: ExpertSite) -> Option<&SiteWeights> {
        self.adapter.weights::<LoraWeights>()?.expert(layer, expert, site)
    }
}

impl AdapterRows {
    /// Whether an adapter of the step has weights for one of `experts` at a site.
    pub(in crate::decoder) fn has_experts(
        &self,
        (layer, site): (usize, ExpertSite),
        experts: &[ExpertRow<'_>],
    ) -> bool {
        let has = |group: &Group| {
            experts.iter().any(|(expert, _)| group.expert(layer, *expert, site).is_some())
        };
        self.groups.iter().any(has)
    }

    /// Computes `A x` for a site of experts. `read` gets the index of an expert in `experts` and
    /// the index of a row within this expert, and writes the input of this row.
    pub(in crate::decoder) fn lower_experts(
        &mut self,
        (layer, site): (usize, ExpertSite),
        experts: &[ExpertRow<'_>],
        (path, workers): (Path, &Workers),
        read: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let ExpertRows { mut starts, mut lowered } = take(&mut self.experts[site as usize]);
        let mut inputs = take(&mut self.inputs);
        starts.clear();
        // Index of an expert in `experts`, the weights of an adapter for it, and the rows within
        // the expert that use them.
        let mut all: Vec<(usize, &SiteWeights, Vec<u32>)> = Vec::new();
        let mut end = 0;
        let used = if self.has_experts((layer, site), experts) { experts } else { &[] };
        for (index, (expert, rows)) in used.iter().enumerate() {
            let first = starts.len();
            starts.resize(first + rows.len(), None);
            let mut of_groups = vec![Vec::new(); self.groups.len()];
            for (at, row) in (0..).zip(*rows) {
                let place = self.places[*row as usize];
                place.iter().for_each(|place| of_groups[place.group as usize].push(at));
            }
            for (group, rows) in self.groups.iter().zip(of_groups) {
                let weights = group.expert(layer, *expert, site).filter(|_| !rows.is_empty());
                let Some(weights) = weights else { continue };
                for at in &rows {
                    starts[first + *at as usize] = Some(end);
                    end += weights.scales.len();
                }
                all.push((index, weights, rows));
            }
        }
        lowered.resize(end, 0.0);
        let tasks = all.iter().map(|(_, site, rows)| Task { site, head: 0, rows });
        let tasks: Vec<Task<'_>> = tasks.collect();
        if end > 0 {
            multiply(&mut inputs, &mut lowered, &tasks, (path, workers), |task, row, out| {
                read(all[task].0, tasks[task].rows[row] as usize, out);
            });
        }
        self.inputs = inputs;
        self.experts[site as usize] = ExpertRows { starts, lowered };
    }

    /// The updates that [`Self::lower_experts`] has prepared, one entry for each of `experts`.
    pub(in crate::decoder) fn expert_updates<'a>(
        &'a self,
        (layer, site): (usize, ExpertSite),
        experts: &[ExpertRow<'a>],
    ) -> Vec<ExpertUpdates<'a>> {
        let mut first = 0;
        let updates = experts.iter().map(|expert| {
            first += expert.1.len();
            ExpertUpdates {
                adapters: self,
                layer,
                site,
                expert: *expert,
                first: first - expert.1.len(),
            }
        });
        updates.collect()
    }
}

impl RowUpdates for ExpertUpdates<'_> {
    fn of(&self, part: usize, row: usize) -> Option<(&LowRank, &[f32])> {
        let ExpertRows { starts, lowered } = &self.adapters.experts[self.site as usize];
        let start = (*starts.get(self.first + row)?)?;
        let (expert, rows) = self.expert;
        let Place { group, .. } = self.adapters.places[rows[row] as usize]?;
        let group = &self.adapters.groups[group as usize];
        let second = group.expert(self.layer, expert, self.site)?.second.get(part)?.as_ref()?;
        Some((&second.matrix, &lowered[start + second.start..][..second.matrix.rank()]))
    }
}
