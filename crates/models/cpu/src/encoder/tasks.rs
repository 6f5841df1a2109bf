//! The matrices of single tasks (jina-embeddings-v3 and -v5): `scale * B (A x)` is added to the
//! results of projections, and to the embeddings of tokens, by the task of each row.
//!
//! `A x` is computed for all tasks in one product, because the matrices are small. `B` is applied to
//! the results of the row's own task in the epilogue of the projection.
//!
//! **Invariant**: rows without a task have the bits that they have in a model without tasks.

use stolon_backend::StepBatch;
use stolon_checkpoint::encoder::{EncoderConfig, LayerTaskWeights, TaskWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, KernelError, LowRank, Matrix, Operands, Path, Product, RowSums, Sink,
    TensorType,
};

use crate::decoder::linear::Loader;
use crate::workers::Workers;

/// The matrices for the projections of a layer.
#[derive(Debug)]
pub(super) struct LayerTasks {
    pub(super) qkv: TaskMatrices,
    pub(super) output: TaskMatrices,
    pub(super) up: TaskMatrices,
    pub(super) down: TaskMatrices,
}

/// The matrices for projections with the same input.
#[derive(Debug)]
pub(super) struct TaskMatrices {
    /// The matrices `A` of all tasks, `[tasks * parts * rank, in]`.
    pub(super) first: Matrix,
    /// Number of matrices `A` of a task: one for all projections, or one for each.
    parts: usize,
    /// For each projection, the matrix `B` of each task.
    second: Vec<Vec<LowRank>>,
    scale: f32,
}

/// The matrices for a table of embeddings.
#[derive(Debug)]
pub(super) struct TableTasks {
    /// The rows of all tasks, `[tasks, rows, rank]`.
    first: Vec<f32>,
    /// The matrix `B` of each task.
    second: Vec<LowRank>,
    rows: usize,
    scale: f32,
}

/// The tasks of the rows of a step.
#[derive(Debug, Default)]
pub(super) struct RowTasks {
    /// The index of each row's task; empty if no row has one.
    rows: Vec<Option<usize>>,
    /// `scale * A x` of each row for the projections that were computed last, `[rows, tasks * parts *
    /// rank]`.
    lowered: Vec<f32>,
}

/// The updates of a projection for the rows of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Updates<'a>(Option<(&'a TaskMatrices, &'a RowTasks)>);

/// A token of a prompt, as [`BackendSpec::token_types`](stolon_backend::BackendSpec) numbers them.
#[derive(Clone, Copy, Debug)]
pub(super) struct TypedToken {
    pub(super) id: usize,
    pub(super) token_type: usize,
    /// The index of its task, if it has one.
    pub(super) task: Option<usize>,
}

impl TypedToken {
    pub(super) fn of(config: &EncoderConfig, token: u32) -> Self {
        let (kind, id) = (token as usize / config.vocab_size, token as usize % config.vocab_size);
        let types = config.token_types.max(1);
        Self { id, token_type: kind % types, task: (kind / types).checked_sub(1) }
    }
}

impl LayerTasks {
    pub(super) fn load(
        weights: &LayerTaskWeights,
        config: &EncoderConfig,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let LayerTaskWeights { qkv, output, up, down } = weights;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let inner = [config.inner_size; 2];
        let mut load = |weights, parts: &[usize]| TaskMatrices::load(weights, parts, loader);
        Ok(Self {
            qkv: load(qkv, &[queries, keys, keys])?,
            output: load(output, &[config.hidden_size])?,
            up: load(up, &inner[..if config.activation.is_gated() { 2 } else { 1 }])?,
            down: load(down, &[config.hidden_size])?,
        })
    }
}

impl TaskMatrices {
    /// Packs the matrices of projections to `parts` features, whose rows follow each other in `B`.
    fn load(
        weights: &TaskWeights,
        parts: &[usize],
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let TaskWeights { first, second, scale } = weights;
        let (rows, columns) = (first.shape[0] * first.shape[1], first.shape[2]);
        let packed = Matrix::pack(
            TensorType::F32,
            rows,
            columns,
            &bytes(&loader.vector(first)?),
            loader.path,
        );
        let values = loader.vector(second)?;
        let (outputs, rank) = (second.shape[1], second.shape[2]);
        let first_parts = first.shape[1] / rank;
        let mut start = 0;
        let mut pack = |part: &usize| {
            let own = start * rank..(start + part) * rank;
            start += part;
            let tasks = values.chunks_exact(outputs * rank);
            let pack = |task: &[f32]| low_rank(*part, rank, &task[own.clone()], loader.path);
            tasks.map(pack).collect::<Result<Vec<_>, _>>()
        };
        let second = parts.iter().map(&mut pack).collect::<Result<Vec<_>, _>>();
        let unpackable = |error| ModelError::Unpackable { tensor: first.name.clone(), error };
        let (first, second) = (packed.map_err(unpackable)?, second.map_err(unpackable)?);
        Ok(Self { first, parts: first_parts, second, scale: *scale })
    }
}

impl TableTasks {
    pub(super) fn load(weights: &TaskWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let TaskWeights { first, second, scale } = weights;
        let (rank, width) = (second.shape[1], second.shape[2]);
        let values = loader.vector(second)?;
        let transposed = |task: &[f32]| -> Vec<f32> {
            (0..width).flat_map(|column| task[column..].iter().step_by(width)).copied().collect()
        };
        let pack = |task| low_rank(width, rank, &transposed(task), loader.path);
        let packed = values.chunks_exact(rank * width).map(pack).collect::<Result<_, _>>();
        let unpackable = |error| ModelError::Unpackable { tensor: second.name.clone(), error };
        Ok(Self {
            second: packed.map_err(unpackable)?,
            rows: first.shape[1],
            scale: *scale,
            first: loader.vector(first)?,
        })
    }

    /// Adds the update of row `row` of the table to `x`, `[hidden_size]`.
    pub(super) fn add(&self, task: usize, row: usize, x: &mut [f32]) {
        let second = &self.second[task];
        let values = &self.first[(task * self.rows + row) * second.rank()..][..second.rank()];
        let values: Vec<f32> = values.iter().map(|value| self.scale * value).collect();
        second.add(0, &values, x);
    }
}

impl RowTasks {
    /// Replaces the contents by the tasks of the tokens of `batch`.
    pub(super) fn fill(&mut self, config: &EncoderConfig, batch: &StepBatch) {
        self.rows.clear();
        if config.tasks.is_some() {
            let tasks = batch.tokens.iter().map(|token| TypedToken::of(config, *token).task);
            self.rows.extend(tasks);
        }
        if self.rows.iter().all(Option::is_none) {
            self.rows.clear();
        }
    }

    /// The matrices of `tasks` if a row has a task.
    pub(super) fn used<'a>(&self, tasks: Option<&'a LayerTasks>) -> Option<&'a LayerTasks> {
        tasks.filter(|_| !self.rows.is_empty())
    }

    /// Computes `scale * A x` for the rows `x`, of which `matrices.first` is a reader.
    pub(super) fn lower<'a>(
        &'a mut self,
        matrices: Option<&'a TaskMatrices>,
        x: &Operands,
        (path, workers): (Path, &Workers),
    ) -> Updates<'a> {
        let Some(matrices) = matrices else { return Updates(None) };
        let TaskMatrices { first, scale, .. } = matrices;
        self.lowered.resize(self.rows.len() * first.out_features(), 0.0);
        let scaled = |sums: RowSums<'_>| sums.first.iter_mut().for_each(|sum| *sum *= scale);
        let readers = [first];
        let product = Product {
            group: 0,
            matrices: &readers,
            step: 1,
            epilogue: Some(&scaled),
            sink: Sink::Rows(&mut self.lowered),
        };
        kernels::multiply(path, workers.for_products(&readers, x.rows()), x, &mut [product]);
        Updates(Some((matrices, self)))
    }
}

impl Updates<'_> {
    /// Adds the updates of a row to results of the projection `part`, and to those of the next one if
    /// both are computed together.
    pub(super) fn add(&self, part: usize, sums: &mut RowSums<'_>) {
        let Some((matrices, tasks)) = self.0 else { return };
        let Some(task) = tasks.rows[sums.row] else { return };
        let row = &tasks.lowered[sums.row * matrices.first.out_features()..];
        for (part, sums_of) in [(part, &mut *sums.first), (part + 1, &mut *sums.second)] {
            if !sums_of.is_empty() {
                let second = &matrices.second[part][task];
                let first = task * matrices.parts + part % matrices.parts;
                second.add(sums.feature, &row[first * second.rank()..][..second.rank()], sums_of);
            }
        }
    }
}

fn low_rank(rows: usize, rank: usize, values: &[f32], path: Path) -> Result<LowRank, KernelError> {
    LowRank::pack(TensorType::F32, rows, rank, &bytes(values), path)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
