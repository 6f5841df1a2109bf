//! The LoRA adapters of a step. `A x` is computed for the rows with an adapter, and its product
//! with `B` is added to the model's projections in their epilogues.
//!
//! Rows are grouped by adapter. One call of [`kernels::multiply`] computes `A x` of all adapters,
//! so an adapter's `A` is read once per step, however many rows use it. `B` is applied row by row
//! ([`LowRank::add`](stolon_kernels::LowRank::add)), to results that are in the cache.
//!
//! **Invariant: batch invariance.** The update of a row depends on the row and its adapter only.
//! Rows without an adapter are computed as if there were none in the batch.

mod experts;

use std::ops::Range;

use stolon_backend::{Adapter, StepBatch};
use stolon_checkpoint::adapter::{LoraWeights, Site, SiteWeights};
use stolon_kernels::{
    self as kernels, Epilogue, Finish, LowRank, Matrix, Operands, Path, Product, RowSums, Sink,
};

use crate::workers::Workers;
use experts::ExpertRows;
pub(super) use experts::{ExpertRow, ExpertUpdates};

/// The rows of a step that have an adapter, and `A x` for these rows. The buffers are reused
/// between steps.
#[derive(Debug, Default)]
pub(super) struct AdapterRows {
    /// The adapters of the step.
    groups: Vec<Group>,
    /// For each row, its place in a group; `None` if the row has no adapter. Empty if no row has
    /// one.
    places: Vec<Option<Place>>,
    /// The inputs of the rows, packed for the matrices `A`.
    inputs: Operands,
    /// `scale * A x` at each site, for the layer that was computed last: `[rows, width]` for each
    /// group that has weights at the site, one group after the other.
    lowered: [Vec<f32>; Site::COUNT],
    /// `scale * A x` of experts, at each [`ExpertSite`](stolon_checkpoint::adapter::ExpertSite).
    experts: [ExpertRows; 2],
}

/// The rows of one adapter.
#[derive(Debug)]
struct Group {
    adapter: Adapter,
    /// Indices of the rows, in ascending order.
    rows: Vec<u32>,
    /// Index of the group's first element in [`AdapterRows::lowered`] at each site.
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

    /// Removes all adapters.
    pub(super) fn clear(&mut self) {
        self.groups.clear();
        self.places.clear();
    }

    /// Keeps only the rows `rows`, in this order. They are counted from 0 again.
    pub(super) fn keep(&mut self, rows: &[usize]) {
        if self.groups.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.places);
        self.groups.iter_mut().for_each(|group| group.rows.clear());
        rows.iter().for_each(|row| self.push(before[*row].map(|place| place.group)));
    }

    /// The index of the group of `adapter`, which is added if there is none.
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

    /// Adds the adapter's update of the embedding of `token` to `x`, `[hidden_size]`. `token` is
    /// the token of row `row`.
    pub(super) fn embed(&self, row: usize, token: u32, x: &mut [f32]) {
        let Some(Some(Place { group, .. })) = self.places.get(row) else { return };
        let adapter = &self.groups[*group as usize].adapter;
        let weights = adapter.weights::<LoraWeights>().and_then(LoraWeights::embedding);
        weights.iter().for_each(|weights| weights.add(token, x));
    }

    /// Computes `A x` for a site. `read` writes the input of a row to a slice, `[in]`.
    pub(super) fn lower(
        &mut self,
        at: (usize, Site),
        path: Path,
        workers: &Workers,
        read: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        self.lower_heads(at, 1, (path, workers), |row, _, out| read(row, out));
    }

    /// The same as [`Self::lower`] for a site where each row has one input for each of `heads`
    /// heads. The second argument of `read` is the index of the head.
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
        lowered.resize(end, 0.0);
        let tasks = groups.iter().flat_map(|group| {
            let task = move |site, head| Task { site, head, rows: &group.rows };
            let weights = group.site(layer, site).into_iter();
            weights.flat_map(move |site| (0..heads).map(move |head| task(site, head)))
        });
        let tasks: Vec<Task<'_>> = tasks.collect();
        multiply(inputs, lowered, &tasks, (path, workers), |task, row, out| {
            let Task { rows, head, .. } = tasks[task];
            read(rows[row] as usize, head, out);
        });
    }

    /// [`Self::updates`] if an adapter of the step has weights at this site, else `None`.
    pub(super) fn some_updates(&self, layer: usize, site: Site) -> Option<Updates<'_>> {
        self.has(layer, site).then(|| self.updates(layer, site))
    }

    /// The updates that [`Self::lower`] has prepared for a site. They are added to the site's
    /// projections.
    pub(super) fn updates(&self, layer: usize, site: Site) -> Updates<'_> {
        Updates { rows: self, layer, site }
    }
}

/// Rows that are multiplied with a matrix `A`.
#[derive(Clone, Copy, Debug)]
struct Task<'a> {
    site: &'a SiteWeights,
    /// Index of the head that the matrix belongs to.
    head: usize,
    rows: &'a [u32],
}

/// Computes `scale * A x` of `tasks` and writes the results to `lowered`, one task after the other.
/// `read` gets the index of a task and the index of a row in it, and writes the input of this row.
/// `inputs` is a buffer.
fn multiply(
    inputs: &mut Operands,
    lowered: &mut [f32],
    tasks: &[Task<'_>],
    (path, workers): (Path, &Workers),
    read: impl Fn(usize, usize, &mut [f32]) + Sync,
) {
    let matrices: Vec<[&Matrix; 1]> =
        tasks.iter().map(|task| [task.site.first(task.head)]).collect();
    let columns = |task: usize| matrices[task][0].in_features();
    inputs.reset_groups(tasks.iter().zip(&matrices).map(|(task, m)| (task.rows.len(), m)));
    let work = |task: usize| tasks[task].rows.len() * columns(task);
    let threads = workers.for_pass((0..tasks.len()).map(work).sum(), 1);
    inputs.fill(threads, |task, first, block| {
        let rows = (first..).zip(block.chunks_exact_mut(columns(task)));
        rows.for_each(|(row, out)| read(task, row, out));
    });
    let scale = |site: &'_ SiteWeights, sums: RowSums<'_>| {
        let scales = &site.scales[sums.feature..];
        sums.first.iter_mut().zip(scales).for_each(|(sum, scale)| *sum *= scale);
    };
    let epilogues: Vec<_> =
        tasks.iter().map(|task| move |sums: RowSums<'_>| scale(task.site, sums)).collect();
    let work = (0..tasks.len()).map(|task| work(task) * tasks[task].site.scales.len()).sum();
    let mut rest = lowered;
    let mut products = Vec::with_capacity(tasks.len());
    for (group, (task, epilogue)) in tasks.iter().zip(&epilogues).enumerate() {
        let (own, others) = rest.split_at_mut(task.rows.len() * task.site.scales.len());
        rest = others;
        let (matrices, epilogue) = (&matrices[group][..], Some(epilogue as Epilogue<'_>));
        products.push(Product { group, matrices, step: 1, epilogue, sink: Sink::Rows(own) });
    }
    kernels::multiply(path, workers.for_work(work), inputs, &mut products);
}

/// The updates of the projections of a site.
#[derive(Clone, Copy, Debug)]
pub(super) struct Updates<'a> {
    rows: &'a AdapterRows,
    layer: usize,
    site: Site,
}

impl RowUpdates for Updates<'_> {
    /// At a site where rows have an input for each head, `part` is the index of the head.
    fn of(&self, part: usize, row: usize) -> Option<(&LowRank, &[f32])> {
        let Place { group, index } = (*self.rows.places.get(row)?)?;
        let (group, at) = (&self.rows.groups[group as usize], self.site as usize);
        let site = group.site(self.layer, self.site)?;
        let second = site.second.get(part)?.as_ref()?;
        // The rows of all heads follow each other, head by head.
        let row = self.site.head(part) * group.rows.len() + index as usize;
        let start = group.starts[at] + row * site.scales.len() + second.start;
        let lowered = &self.rows.lowered[at][start..][..second.matrix.rank()];
        Some((&second.matrix, lowered))
    }
}

/// Updates of projections that adapters add, row by row.
pub(super) trait RowUpdates: Sized + Sync {
    /// The matrix `B` of projection `part` for a row, and the vector that it is multiplied with,
    /// `scale * A x`. `None` if the row has no adapter that changes the projection.
    fn of(&self, part: usize, row: usize) -> Option<(&LowRank, &[f32])>;

    /// An epilogue that adds the updates of the projections `parts` to the results, and then calls
    /// `then`. `parts` has one entry for each matrix of a product.
    fn then<const N: usize, F: Fn(RowSums<'_>) + Sync>(
        self,
        parts: [usize; N],
        then: F,
    ) -> Updated<Self, N, F> {
        Updated { updates: self, parts, then }
    }
}

/// An epilogue that adds the updates of adapters before it calls `then`.
pub(super) struct Updated<U, const N: usize, F> {
    updates: U,
    parts: [usize; N],
    then: F,
}

impl<U: RowUpdates, const N: usize, F: Fn(RowSums<'_>) + Sync> Finish for Updated<U, N, F> {
    fn finish(&self, sums: RowSums<'_>) {
        let RowSums { row, feature, first, second } = sums;
        for (part, sums) in self.parts.into_iter().zip([&mut *first, &mut *second]) {
            if let Some((matrix, lowered)) = self.updates.of(part, row) {
                matrix.add(feature, lowered, sums);
            }
        }
        (self.then)(RowSums { row, feature, first, second });
    }

    /// Prefetches the matrices `B` that the rows need. Successive rows with the same adapter read
    /// the same matrix, which is prefetched once.
    fn prepare(&self, rows: Range<usize>, features: Range<usize>) {
        for part in self.parts {
            let mut before: Option<&LowRank> = None;
            for (matrix, _) in rows.clone().filter_map(|row| self.updates.of(part, row)) {
                if !before.replace(matrix).is_some_and(|before| std::ptr::eq(before, matrix)) {
                    matrix.prefetch(features.start, features.len());
                }
            }
        }
    }
}
