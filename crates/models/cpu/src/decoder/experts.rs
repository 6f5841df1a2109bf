//! A mixture of experts. The rows of a batch are grouped by expert, so that the weights of an
//! expert are read once per step, however many rows use it.
//!
//! One call of [`kernels::multiply`] computes the gate and up projections of all groups, and one
//! call of [`kernels::accumulate`] their down projections, so there are two parallel loops in total
//! instead of two per expert. The shared expert is one more group, which contains all rows.
//!
//! **Invariant: batch invariance.** The experts of a row and their weights depend on the row only,
//! and their outputs are added to the row in ascending order of the experts' indices.

use stolon_checkpoint::adapter::{ExpertSite, Site};
use stolon_checkpoint::config::{
    DenseAndExpertsWeights, ExpertsConfig, ExpertsWeights, SharedExpertWeights,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, Epilogue, Matrix, Operands, Path, Product, RowSums, Sink, Term,
};

use super::adapters::{AdapterRows, ExpertRow, ExpertUpdates, RowUpdates};
use super::linear::{Linear, Loader};
use super::mlp::Mlp;
use super::passes::{Norm, NormVectors};
use super::profile::{Profile, Stage};
use super::routing::{ExpertGroup, Routing};
use crate::workers::Workers;

/// The weights of a layer's mixture of experts.
#[derive(Debug)]
pub(crate) struct Experts {
    config: ExpertsConfig,
    /// The norm of the router's input; `None` if the router reads the input of the experts.
    router_norm: Option<NormVectors>,
    /// `[experts, hidden_size]`.
    router: Linear,
    /// The bias of each expert's score. It affects only which experts are chosen.
    bias: Option<Vec<f32>>,
    /// A factor for the weight of each expert.
    factors: Option<Vec<f32>>,
    /// The experts, followed by the shared expert if there is one.
    experts: Vec<Mlp>,
    /// The projection to the score of the shared expert, `[1, hidden_size]`; `None` if it has no
    /// score.
    shared_gate: Option<Linear>,
}

impl Experts {
    /// Loads the experts that `spec` describes.
    pub(crate) fn load(spec: &ExpertsWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let ExpertsWeights { config, router_norm, router, bias, factors, experts, shared } = spec;
        let router_norm = NormVectors::optional(router_norm.as_ref(), loader)?;
        let router_norm = router_norm.map(NormVectors::of_router);
        let router = loader.linear(router)?;
        let bias = loader.optional_vector(bias.as_ref())?;
        let factors = loader.optional_vector(factors.as_ref())?;
        let mut experts: Vec<_> =
            experts.iter().map(|expert| Mlp::load(expert, loader)).collect::<Result<_, _>>()?;
        if config.shifted {
            experts.iter_mut().for_each(|expert| expert.shift(1.0));
        }
        let mut shared_gate = None;
        if let Some(SharedExpertWeights { mlp, gate }) = shared {
            experts.push(Mlp::load(mlp, loader)?);
            shared_gate = gate.as_ref().map(|gate| loader.linear(gate)).transpose()?;
        }
        let config = *config;
        Ok(Self { config, router_norm, router, bias, factors, experts, shared_gate })
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let gate = self.shared_gate.as_ref().map_or(0, Linear::bytes);
        self.router.bytes() + gate + self.experts.iter().map(Mlp::bytes).sum::<usize>()
    }

    /// Adds the outputs of the experts to the rows of `x`, `[rows, hidden_size]`, which the experts read
    /// as they are, without adapters. The others are buffers.
    pub(crate) fn add_to(
        &self,
        x: &mut [f32],
        [normed, inner]: [&mut Operands; 2],
        routing: &mut Routing,
        (path, workers): (Path, &Workers),
    ) {
        let width = self.router.matrix.in_features();
        let pass =
            ExpertsPass { width, residual_scale: 1.0, path, workers, experts: self, index: 0 };
        let (mut adapters, mut profile) = (AdapterRows::default(), Profile::new());
        pass.route(Norm::of(width, None, path), x, normed, routing, &mut adapters);
        pass.add(x, [normed, inner], routing, &mut adapters, &mut profile);
    }
}

/// An MLP and a mixture of experts next to each other: the fields of [`DenseAndExpertsWeights`].
#[derive(Debug)]
pub(super) struct DenseAndExperts {
    pub(super) mlp: Mlp,
    pub(super) mlp_output_norm: NormVectors,
    pub(super) experts_input_norm: NormVectors,
    pub(super) experts: Experts,
    pub(super) experts_output_norm: NormVectors,
}

impl DenseAndExperts {
    /// Loads both.
    pub(super) fn load(
        spec: &DenseAndExpertsWeights,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let DenseAndExpertsWeights {
            mlp,
            mlp_output_norm,
            experts_input_norm,
            experts,
            experts_output_norm,
        } = spec;
        Ok(Self {
            mlp: Mlp::load(mlp, loader)?,
            mlp_output_norm: NormVectors::load(mlp_output_norm, loader)?,
            experts_input_norm: NormVectors::load(experts_input_norm, loader)?,
            experts: Experts::load(experts, loader)?,
            experts_output_norm: NormVectors::load(experts_output_norm, loader)?,
        })
    }
}

/// The forward pass of a layer's mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertsPass<'a> {
    /// Number of elements of a row.
    pub(super) width: usize,
    /// The factor of what is added to a row.
    pub(super) residual_scale: f32,
    pub(super) path: Path,
    pub(super) workers: &'a Workers,
    pub(super) experts: &'a Experts,
    /// Index of the layer.
    pub(super) index: usize,
}

impl ExpertsPass<'_> {
    /// Computes the experts that [`Self::route`] has chosen for each row, and adds their outputs to
    /// the rows of `x`, `[rows, hidden_size]`. `adapters` has the adapters of these rows. `normed`
    /// and `inner` are buffers.
    pub(super) fn add(
        &self,
        x: &mut [f32],
        [normed, inner]: [&mut Operands; 2],
        routing: &Routing,
        adapters: &mut AdapterRows,
        profile: &mut Profile,
    ) {
        let groups: Vec<(&ExpertGroup, &Mlp)> = routing
            .groups
            .iter()
            .map(|group| (group, &self.experts.experts[group.expert]))
            .collect();
        let rows = |group| routing.rows(group).len();
        normed.reset_groups(groups.iter().map(|(group, mlp)| (rows(group), mlp.inputs())));
        inner.reset_groups(groups.iter().map(|(group, mlp)| (rows(group), [&mlp.down.matrix])));
        self.gather(&groups, routing, normed);
        let used: Vec<ExpertRow<'_>> =
            groups.iter().map(|(group, _)| (group.expert, routing.rows(group))).collect();
        let (at, hidden) = ((self.index, ExpertSite::GateUp), self.width);
        adapters.lower_experts(at, &used, (self.path, self.workers), |expert, row, out| {
            let row = used[expert].1[row] as usize;
            out.copy_from_slice(&routing.normed[row * hidden..][..hidden]);
        });
        profile.mark(Stage::Route);

        let updates = adapters.expert_updates(at, &used);
        let at = (self.index, ExpertSite::Down);
        let is_read = adapters.has_experts(at, &used);
        let operands = (&*normed, &mut *inner);
        let inner_rows =
            self.multiply_inputs((&groups, routing), &updates, operands, is_read, profile);
        let width = |expert: usize| groups[expert].1.down.matrix.in_features();
        adapters.lower_experts(at, &used, (self.path, self.workers), |expert, row, out| {
            out.copy_from_slice(&inner_rows[expert][row * width(expert)..][..width(expert)]);
        });
        self.add_down((&groups, routing), &adapters.expert_updates(at, &used), inner, x);
        profile.mark(Stage::Down);
    }

    /// Computes the inner activations of the experts, and packs them for the down projections. If
    /// adapters read them (`is_read`), also returns them for each expert, `[rows, width]`.
    fn multiply_inputs(
        &self,
        (groups, routing): (&[(&ExpertGroup, &Mlp)], &Routing),
        updates: &[ExpertUpdates<'_>],
        (normed, inner): (&Operands, &mut Operands),
        is_read: bool,
        profile: &mut Profile,
    ) -> Vec<Vec<f32>> {
        let inputs: Vec<Vec<&Matrix>> = groups.iter().map(|(_, mlp)| mlp.inputs()).collect();
        let gates = groups.iter().zip(updates).map(|((_, mlp), updates)| {
            updates.then([0, 1], |sums: RowSums<'_>| mlp.activate(self.path, sums))
        });
        let gates: Vec<_> = gates.collect();
        let width = |mlp: &Mlp| mlp.down.matrix.in_features();
        let rows_of =
            |(group, mlp): &(&ExpertGroup, &Mlp)| vec![0.0; routing.rows(group).len() * width(mlp)];
        let read = if is_read { groups } else { &[] };
        let mut inner_rows: Vec<Vec<f32>> = read.iter().map(rows_of).collect();
        let sinks: Vec<Sink<'_>> = match is_read {
            true => inner_rows.iter_mut().map(|rows| Sink::Rows(rows)).collect(),
            false => inner.groups_mut().into_iter().map(Sink::Operands).collect(),
        };
        let sinks = sinks.into_iter().zip(&inputs).zip(&gates).enumerate();
        let mut products: Vec<Product<'_>> = sinks
            .map(|(group, ((sink, matrices), gate))| {
                let epilogue = Some(gate as Epilogue<'_>);
                Product { group, matrices, step: 1, epilogue, sink }
            })
            .collect();
        let threads = self.workers.for_work(2 * work(groups, routing));
        let epilogue_time = kernels::multiply(self.path, threads, normed, &mut products);
        drop(products);
        if is_read {
            let elements = inner_rows.iter().map(Vec::len).sum();
            inner.fill(self.workers.for_pass(elements, 1), |group, first, block| {
                let from = first * width(groups[group].1);
                block.copy_from_slice(&inner_rows[group][from..][..block.len()]);
            });
        }
        profile.mark_with(Stage::GateUp, epilogue_time, Stage::Gate);
        inner_rows
    }

    /// Packs the rows of each group.
    fn gather(&self, groups: &[(&ExpertGroup, &Mlp)], routing: &Routing, normed: &mut Operands) {
        let hidden = self.width;
        let total: usize = groups.iter().map(|(group, _)| routing.rows(group).len()).sum();
        normed.fill(self.workers.for_pass(total, hidden), |group, first, block| {
            let rows = &routing.rows(groups[group].0)[first..];
            for (row, block) in rows.iter().zip(block.chunks_exact_mut(hidden)) {
                block.copy_from_slice(&routing.normed[*row as usize * hidden..][..hidden]);
            }
        });
    }

    /// Computes the down projections of `inner` and adds their weighted results to the rows of `x`.
    fn add_down(
        &self,
        (groups, routing): (&[(&ExpertGroup, &Mlp)], &Routing),
        updates: &[ExpertUpdates<'_>],
        inner: &Operands,
        x: &mut [f32],
    ) {
        let weighted: Vec<_> = groups
            .iter()
            .zip(updates)
            .map(|((group, mlp), updates)| {
                let weights = routing.weights(group);
                updates.then([0], move |sums: RowSums<'_>| {
                    mlp.down.add_bias(self.path, sums.feature, sums.first);
                    let weight = weights[sums.row] * self.residual_scale;
                    sums.first.iter_mut().for_each(|sum| *sum *= weight);
                })
            })
            .collect();
        let terms: Vec<Term<'_>> = groups
            .iter()
            .zip(&weighted)
            .map(|((group, mlp), epilogue)| Term {
                matrix: &mlp.down.matrix,
                epilogue,
                rows: routing.rows(group),
            })
            .collect();
        let threads = self.workers.for_work(work(groups, routing));
        kernels::accumulate(self.path, threads, inner, &terms, x);
    }

    /// Normalizes the rows of `x` and chooses the experts of each row. `adapters` has the adapters
    /// of these rows. `normed` is a buffer.
    pub(super) fn route(
        &self,
        norm: Norm<'_>,
        x: &[f32],
        normed: &mut Operands,
        routing: &mut Routing,
        adapters: &mut AdapterRows,
    ) {
        let Experts { config, router_norm, router, shared_gate, .. } = self.experts;
        let hidden = self.width;
        let rows = x.len() / hidden;
        routing.reset(config, rows, hidden);
        norm.rows(x, &mut routing.normed, self.workers);
        let gates = [Some(router), shared_gate.as_ref()].into_iter().flatten();
        let readers: Vec<&Matrix> = gates.map(|gate| &gate.matrix).collect();
        normed.reset(rows, &readers);
        match router_norm {
            Some(own) => Norm::of(hidden, Some(own), self.path).pack(x, normed, self.workers),
            None => normed.pack(self.workers.for_pass(rows, hidden), &routing.normed),
        }
        let at = (self.index, Site::Routers);
        adapters.lower(at, self.path, self.workers, |row, out| {
            out.copy_from_slice(&routing.normed[row * hidden..][..hidden]);
        });
        let sinks = [&mut routing.scores, &mut routing.shared_scores];
        let add_bias = |sums: RowSums<'_>| router.add_bias(self.path, sums.feature, sums.first);
        let scores = adapters.updates(self.index, Site::Routers).then([0], add_bias);
        let shared_score = adapters.updates(self.index, Site::Routers).then([1], |_| {});
        let epilogues = [Some(&scores as Epilogue<'_>), Some(&shared_score as Epilogue<'_>)];
        let mut products: Vec<Product<'_>> = readers
            .iter()
            .zip(sinks)
            .zip(epilogues)
            .map(|((reader, sink), epilogue)| Product {
                group: 0,
                matrices: std::slice::from_ref(reader),
                step: 1,
                epilogue,
                sink: Sink::Rows(sink),
            })
            .collect();
        let threads = self.workers.for_products(&readers, rows);
        kernels::multiply(self.path, threads, normed, &mut products);
        drop(products);
        let Experts { bias, factors, .. } = self.experts;
        routing.choose(config, [bias.as_deref(), factors.as_deref()], self.workers);
    }
}

/// Number of multiply-adds of one projection of all experts, for the rows that use them.
fn work(groups: &[(&ExpertGroup, &Mlp)], routing: &Routing) -> usize {
    groups.iter().map(|(group, mlp)| routing.rows(group).len() * mlp.work()).sum()
}
