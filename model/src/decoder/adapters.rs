//! The LoRA adapters of a step: `A x` of the rows that have one, and its product with `B`, which is
//! added to the projections of the model in their epilogues.
//!
//! Rows are grouped by adapter, so one call of [`kernels::multiply`] computes `A x` of all
//! adapters, and an adapter's `A` is read once per step, however many rows use it. `B` is applied
//! row by row ([`LowRank::add`](stolon_kernels::LowRank::add)), to the results that are in the
//! cache.
//!
//! **Invariant: batch invariance.** What is added to a row depends on the row and its adapter only.
//! Rows without an adapter are computed as if there were none in the batch.

use stolon_backend::{Adapter, StepBatch};
use stolon_kernels::{self as kernels, Epilogue, Matrix, Operands, Path, Product, RowSums, Sink};

use super::Decoder;
use crate::adapter::{LoraWeights, Site, SiteWeights};
use crate::workers::Workers;

/// The rows of a step that have an adapter, and `A x` for these rows. The buffers are reused between
/// steps.
#[derive(Debug, Default)]
pub(super) struct AdapterRows {
    /// The adapters of the step.
    groups: Vec<Group>,
    /// For each row its place; empty if no row has an adapter.
    places: Vec<Option<Place>>,
    /// The inputs of the rows, packed for the matrices `A`.
    inputs: Operands,
    /// `scale * A x` at each site, in the layer where it was computed last: `[rows, width]` for each
    /// group that has weights there.
    lowered: [Vec<f32>; Site::COUNT],
}

/// The rows of one adapter.
#[derive(Debug)]
struct Group {
    adapter: Adapter,
    /// Indices of the rows, in ascending order.
    rows: Vec<u32>,
    /// Where the group begins in [`AdapterRows::lowered`] at each site.
    starts: [usize; Site::COUNT],
}

/// The place of a row in its group.
#[derive(Clone, Copy, Debug)]
struct Place {
    group: u32,
    index: u32,
}

impl Group {
    fn site(&self, layer: usize, site: Site) -> Option<&SiteWeights> {
        self.adapter.weights::<LoraWeights>()?.site(layer, site)
    }
}

impl AdapterRows {
    /// Replaces the contents by the rows of `batch`.
    pub(super) fn fill(&mut self, batch: &StepBatch) {
        self.clear();
        if batch.sequences.iter().all(|slice| slice.adapter.is_none()) {
            return;
        }
        for slice in &batch.sequences {
            let group = slice.adapter.as_ref().map(|adapter| self.group_of(adapter));
            for _ in 0..slice.token_count {
                self.push(group);
            }
        }
    }

    /// Holds no adapter any more.
    pub(super) fn clear(&mut self) {
        self.groups.clear();
        self.places.clear();
    }

    /// Keeps only these rows, in their order, which get the indices from 0 on.
    pub(super) fn keep(&mut self, rows: &[usize]) {
        if self.groups.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.places);
        self.groups.iter_mut().for_each(|group| group.rows.clear());
        rows.iter().for_each(|row| self.push(before[*row].map(|place| place.group)));
    }

    /// The index of the group of `adapter`.
    fn group_of(&mut self, adapter: &Adapter) -> u32 {
        let known = self.groups.iter().position(|group| group.adapter == *adapter);
        let index = known.unwrap_or_else(|| {
            let starts = [0; Site::COUNT];
            self.groups.push(Group { adapter: adapter.clone(), rows: Vec::new(), starts });
            self.groups.len() - 1
        });
        index as u32
    }

    /// Adds the next row.
    fn push(&mut self, group: Option<u32>) {
        let row = self.places.len() as u32;
        let place = group.map(|group| {
            let rows = &mut self.groups[group as usize].rows;
            rows.push(row);
            Place { group, index: rows.len() as u32 - 1 }
        });
        self.places.push(place);
    }

    /// Whether an adapter of the step has weights at this site.
    pub(super) fn has(&self, layer: usize, site: Site) -> bool {
        self.groups.iter().any(|group| group.site(layer, site).is_some())
    }

    /// Adds the update of the embedding of `token`, which is that of row `row`, to `x`,
    /// `[hidden_size]`.
    pub(super) fn embed(&self, row: usize, token: u32, x: &mut [f32]) {
        let Some(Some(Place { group, .. })) = self.places.get(row) else { return };
        let adapter = &self.groups[*group as usize].adapter;
        let weights = adapter.weights::<LoraWeights>().and_then(LoraWeights::embedding);
        weights.iter().for_each(|weights| weights.add(token, x));
    }

    /// Computes `A x` for a site. `read` writes the input of a row, `[in]`, to the given memory.
    pub(super) fn lower(
        &mut self,
        at: (usize, Site),
        path: Path,
        workers: &Workers,
        read: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.lower_heads(at, 1, (path, workers), |row, _, out| read(row, out));
    }

    /// As [`Self::lower`] where each row has an input for each of `heads` heads, whose index is the
    /// second argument of `read`.
    pub(super) fn lower_heads(
        &mut self,
        (layer, site): (usize, Site),
        heads: usize,
        (path, workers): (Path, &Workers),
        read: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let Self { groups, inputs, lowered, .. } = self;
        let lowered = &mut lowered[site as usize];
        let mut end = 0;
        for group in groups.iter_mut() {
            group.starts[site as usize] = end;
            let width = group.site(layer, site).map_or(0, |weights| weights.scales.len());
            end += heads * group.rows.len() * width;
        }
        if end == 0 {
            return;
        }
        let of_site = |group| Some((group, Group::site(group, layer, site)?));
        let active = groups.iter().filter_map(of_site);
        let of_heads = |(group, site)| (0..heads).map(move |head| (group, site, head));
        let active: Vec<(&Group, &SiteWeights, usize)> = active.flat_map(of_heads).collect();
        let matrices: Vec<[&Matrix; 1]> =
            active.iter().map(|(_, site, head)| [site.first(*head)]).collect();
        let columns = matrices[0][0].in_features();
        inputs.reset_groups(active.iter().zip(&matrices).map(|((g, ..), m)| (g.rows.len(), m)));
        let rows = inputs.rows();
        inputs.fill(workers.for_pass(rows, columns), |index, first, block| {
            let (group, _, head) = active[index];
            for (row, out) in group.rows[first..].iter().zip(block.chunks_exact_mut(columns)) {
                read(*row as usize, head, out);
            }
        });
        let scale = |site: &'_ SiteWeights, sums: RowSums<'_>| {
            let scales = &site.scales[sums.feature..];
            sums.first.iter_mut().zip(scales).for_each(|(sum, scale)| *sum *= scale);
        };
        let epilogues: Vec<_> =
            active.iter().map(|(_, site, _)| move |sums: RowSums<'_>| scale(site, sums)).collect();
        lowered.resize(end, 0.0);
        let mut rest = &mut lowered[..];
        let mut products = Vec::with_capacity(active.len());
        for (index, ((group, site, _), epilogue)) in active.iter().zip(&epilogues).enumerate() {
            let (own, others) = rest.split_at_mut(group.rows.len() * site.scales.len());
            rest = others;
            let (matrices, epilogue) = (&matrices[index][..], Some(epilogue as Epilogue<'_>));
            let sink = Sink::Rows(own);
            products.push(Product { group: index, matrices, step: 1, epilogue, sink });
        }
        kernels::multiply(path, workers.for_work(end * columns), inputs, &mut products);
    }

    /// [`Self::updates`], if an adapter of the step has weights at this site.
    pub(super) fn some_updates(&self, layer: usize, site: Site) -> Option<Updates<'_>> {
        self.has(layer, site).then(|| self.updates(layer, site))
    }

    /// What [`Self::lower`] has computed for a site, to be added to the site's projections.
    pub(super) fn updates(&self, layer: usize, site: Site) -> Updates<'_> {
        Updates { rows: self, layer, site }
    }
}

/// The updates of the projections of a site.
#[derive(Clone, Copy, Debug)]
pub(super) struct Updates<'a> {
    rows: &'a AdapterRows,
    layer: usize,
    site: Site,
}

impl Decoder {
    /// Releases the adapters of the last step, so that their memory can be used for others.
    pub(crate) fn release_adapters(&mut self) {
        self.adapters.clear();
    }
}

impl Updates<'_> {
    /// Adds the update of projection `part` of the site to the results `sums` of row `row`, which
    /// are the output features from `feature` on. Where rows have an input for each head, `part` is
    /// the head.
    pub(super) fn add(&self, part: usize, row: usize, feature: usize, sums: &mut [f32]) {
        let AdapterRows { groups, places, lowered, .. } = self.rows;
        let Some(Some(Place { group, index })) = places.get(row) else { return };
        let group = &groups[*group as usize];
        let Some(site) = group.site(self.layer, self.site) else { return };
        let Some(second) = site.second.get(part).and_then(Option::as_ref) else { return };
        let lowered = &lowered[self.site as usize];
        // The rows of each head follow those of the one before.
        let row = self.site.head(part) * group.rows.len() + *index as usize;
        let start = group.starts[self.site as usize] + row * site.scales.len() + second.start;
        second.matrix.add(feature, &lowered[start..][..second.matrix.rank()], sums);
    }
}
