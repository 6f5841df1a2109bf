//! The operations between the GEMMs: biases, norms, rotary embedding, gates and residuals. Most are
//! fused into the GEMM's epilogue, which processes results while they are in the cache. Norms of
//! whole rows are separate passes.

use std::time::Duration;

use stolon_checkpoint::config::{
    DecoderConfig, GateFunction, NormKind, NormWeights, QkNorm, QueryScaling,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, AttentionArgs, AttentionSequence, Epilogue, HeadNorm, LayerNorm, Operands,
    Path, Product, RowSums, Sink, Threads,
};

use super::adapters::{RowUpdates, Updates};
use super::linear::{Linear, Loader};
use super::plan::BatchRows;
use super::rope::{RopeTable, Rotation};
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a norm: the fields of [`NormWeights`].
#[derive(Debug)]
pub(super) struct NormVectors {
    /// The offset of the weights is added.
    weight: Vec<f32>,
    /// The bias of a layer norm, zeroes if the model has none; `None` for an RMS norm.
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl NormVectors {
    pub(super) fn load(spec: &NormWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let NormWeights { kind, eps, offset, weight, bias } = spec;
        let mut weight = loader.vector(weight)?;
        weight.iter_mut().for_each(|weight| *weight += offset);
        let bias = match kind {
            NormKind::Rms | NormKind::Layer => loader.optional_vector(bias.as_ref())?,
            NormKind::LayerWithoutBias => Some(vec![0.0; weight.len()]),
        };
        Ok(Self { weight, bias, eps: *eps })
    }

    /// The RMS norm before a router, whose weights files store times the square root of
    /// `hidden_size`.
    pub(super) fn of_router(self) -> Self {
        let factor = (self.weight.len() as f32).powf(-0.5);
        Self { weight: self.weight.into_iter().map(|weight| weight * factor).collect(), ..self }
    }

    /// Normalizes the rows of `x` with this RMS norm.
    pub(super) fn apply_in_place(&self, path: Path, x: &mut [f32]) {
        kernels::rms_norm_in_place(path, x, &self.weight, self.eps, 0.0);
    }

    /// The same as [`Self::load`], if there is a norm.
    pub(super) fn optional(
        spec: Option<&NormWeights>,
        loader: &mut Loader<'_>,
    ) -> Result<Option<Self>, ModelError> {
        spec.map(|spec| Self::load(spec, loader)).transpose()
    }
}

/// Grows a buffer to at least `len` elements.
pub(super) fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

/// Packs rows of `width` elements that `read` computes one by one.
pub(super) fn pack_rows(
    rows: &mut Operands,
    threads: &Threads,
    width: usize,
    read: impl Fn(usize, &mut [f32]) + Sync,
) {
    rows.fill(threads, |_, first, block| {
        (first..).zip(block.chunks_exact_mut(width)).for_each(|(row, out)| read(row, out));
    });
}

/// A norm over rows of the residual stream. Without weights, it copies rows unchanged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<'a> {
    vectors: Option<&'a NormVectors>,
    /// Number of elements of a row.
    width: usize,
    path: Path,
}

impl<'a> Norm<'a> {
    pub(super) fn of(width: usize, vectors: Option<&'a NormVectors>, path: Path) -> Self {
        Self { vectors, width, path }
    }

    /// Normalizes the rows of `x` and packs them into `out`.
    pub(super) fn pack(&self, x: &[f32], out: &mut Operands, workers: &Workers) {
        let width = self.width;
        out.fill(workers.for_pass(x.len() / width, width), |_, first, rows| {
            self.apply(&x[first * width..][..rows.len()], rows);
        });
    }

    /// Normalizes the rows of `x` into `out`.
    pub(super) fn rows(&self, x: &[f32], out: &mut [f32], workers: &Workers) {
        let chunk = workers.chunk_rows(x.len() / self.width, self.width) * self.width;
        workers.run(x.chunks(chunk).zip(out.chunks_mut(chunk)), |(x, out)| self.apply(x, out));
    }

    /// Normalizes the rows of `x` into `out` on the calling thread.
    pub(super) fn apply(&self, x: &[f32], out: &mut [f32]) {
        match self.vectors {
            Some(NormVectors { weight, bias: Some(bias), eps }) => {
                kernels::layer_norm(self.path, x, &LayerNorm { weight, bias, eps: *eps }, out);
            }
            Some(NormVectors { weight, bias: None, eps }) => {
                kernels::rms_norm(self.path, x, weight, *eps, 0.0, out);
            }
            None => out.copy_from_slice(x),
        }
    }
}

/// The epilogue parameters that are the same for all heads of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads<'a> {
    path: Path,
    head_dim: usize,
    eps: f32,
    norm_offset: f32,
    /// Whether the norms normalize each head, or all heads of a position together.
    norm: Option<QkNorm>,
    /// The factor of queries that depends on the position.
    query_scaling: Option<QueryScaling>,
    /// The rotary embedding; `None` if heads are not rotated.
    rope: Option<&'a RopeTable>,
    /// The plan of the step, with the position and the rotation of each row.
    plan: &'a BatchRows,
}

impl<'a> Heads<'a> {
    /// The parameters of a layer whose heads have `head_dim` elements, without norms and without
    /// factors of queries.
    pub(super) fn of(
        config: &DecoderConfig,
        path: Path,
        head_dim: usize,
        rope: Option<&'a RopeTable>,
        plan: &'a BatchRows,
    ) -> Self {
        let (eps, norm_offset) = (config.norms.eps, config.norms.offset);
        Self { path, head_dim, eps, norm_offset, norm: None, query_scaling: None, rope, plan }
    }

    /// The same parameters with norms and with a factor of queries that depends on the position.
    pub(super) fn with(self, norm: Option<QkNorm>, query_scaling: Option<QueryScaling>) -> Self {
        Self { norm, query_scaling, ..self }
    }

    /// The epilogue of queries and keys. It adds the bias, normalizes each head and applies the
    /// rotary embedding. If all heads of a position are normalized together, it only adds the bias,
    /// and the caller has to call [`Self::norm_positions`] afterwards.
    pub(super) fn apply(&self, linear: Option<&Linear>, norm: Option<&[f32]>, sums: RowSums<'_>) {
        linear.iter().for_each(|linear| linear.add_bias(self.path, sums.feature, sums.first));
        if self.norm == Some(QkNorm::Position) {
            return;
        }
        let (eps, offset) = (self.eps, self.norm_offset);
        let norm = norm.map(|weight| HeadNorm { weight, eps, offset });
        let rotation = self.rotation(self.plan.rotations[sums.row]);
        kernels::norm_and_rope(self.path, sums.first, self.head_dim, norm, rotation);
    }

    /// The epilogue of queries: [`Self::apply`], and the multiplication by the factor that depends
    /// on the position.
    pub(super) fn apply_to_queries(
        &self,
        linear: &Linear,
        norm: Option<&[f32]>,
        sums: RowSums<'_>,
    ) {
        let RowSums { row, feature, first, second } = sums;
        self.apply(Some(linear), norm, RowSums { row, feature, first: &mut *first, second });
        if let Some(scaling) = self.query_scaling {
            kernels::scale(self.path, first, scaling.factor(self.plan.positions[row] as usize));
        }
    }

    /// The epilogue of values. It adds the bias and, if there are weights `norm`, normalizes each
    /// head with them. The configuration's offset of norms is not added to these weights.
    pub(super) fn apply_to_values(
        &self,
        linear: Option<&Linear>,
        norm: Option<&[f32]>,
        sums: RowSums<'_>,
    ) {
        linear.iter().for_each(|linear| linear.add_bias(self.path, sums.feature, sums.first));
        if let Some(weight) = norm {
            kernels::rms_norm_in_place(self.path, sums.first, weight, self.eps, 0.0);
        }
    }

    /// Normalizes all heads of each position together and applies the rotary embedding. `x` is
    /// `[rows, heads, head_dim]`, with as many rows as there are rotations.
    pub(super) fn norm_positions(&self, x: &mut [f32], weight: &[f32], workers: &Workers) {
        let width = weight.len();
        let rotations = &self.plan.rotations;
        let chunk = workers.chunk_rows(rotations.len(), width);
        let parts = x.chunks_mut(chunk * width).zip(rotations.chunks(chunk));
        workers.run(parts, |(rows, rotations)| {
            kernels::rms_norm_in_place(self.path, rows, weight, self.eps, self.norm_offset);
            for (row, &rotation) in rows.chunks_exact_mut(width).zip(rotations) {
                let rotation = self.rotation(rotation);
                kernels::norm_and_rope(self.path, row, self.head_dim, None, rotation);
            }
        });
    }

    /// Applies the rotary embedding to the heads of a row, `[heads, head_dim]`.
    pub(super) fn rotate(&self, row: usize, x: &mut [f32]) {
        let rotation = self.rotation(self.plan.rotations[row]);
        kernels::norm_and_rope(self.path, x, self.head_dim, None, rotation);
    }

    /// The cosines and sines of a row; empty if heads are not rotated.
    fn rotation(&self, rotation: Rotation) -> (&'a [f32], &'a [f32]) {
        self.rope.map_or_else(Default::default, |rope| rope.at(rotation))
    }
}

/// Applies the function of a gate to `gate` and multiplies it with `other`.
pub(super) fn apply_gate(function: GateFunction, path: Path, gate: &mut [f32], other: &[f32]) {
    match function {
        GateFunction::Silu => kernels::silu_mul(path, gate, other),
        GateFunction::GeluTanh => kernels::gelu_tanh_mul(path, gate, other),
        GateFunction::ClampedSwiglu { alpha, limit } => {
            kernels::clamped_swiglu(path, gate, other, alpha, limit);
        }
    }
}

/// Factor by which an output is multiplied when it is added to the residual stream; `None` for 1.
/// `own` is the output factor of the mixer or the MLP.
pub(super) fn output_scale(config: &DecoderConfig, own: f32) -> Option<f32> {
    Some(config.residual_scale.unwrap_or(1.0) * own).filter(|factor| *factor != 1.0)
}

/// A projection whose result is added to the residual stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Residual<'a> {
    pub(super) path: Path,
    pub(super) linear: &'a Linear,
    /// The RMS norm of the result before it is added.
    pub(super) own_norm: Option<&'a NormVectors>,
    /// The updates of the projection by adapters; `None` if adapters cannot change this projection.
    pub(super) updates: Option<Updates<'a>>,
    /// Factor by which the result is multiplied; `None` for 1.
    pub(super) scale: Option<f32>,
}

impl Residual<'_> {
    /// Adds the projection of `rows` to `x`, `[rows, hidden_size]`. With `own_norm`, the projection
    /// is first written to `projected` and normalized. Returns the time of the addition if it was
    /// fused into the GEMM, else zero.
    pub(super) fn add(
        &self,
        rows: &Operands,
        x: &mut [f32],
        projected: &mut [f32],
        workers: &Workers,
    ) -> Duration {
        let Some(norm) = self.own_norm else {
            return self.multiply(rows, Sink::Add(x), workers);
        };
        let projected = &mut projected[..x.len()];
        self.multiply(rows, Sink::Rows(projected), workers);
        add_normed(self.path, (norm, self.scale), [x, projected], workers);
        Duration::ZERO
    }

    /// Writes the projection of `rows` to `sink`. Without `own_norm`, the projection is multiplied
    /// by `scale`. Returns the time of the epilogue if it was fused into the GEMM, else zero.
    pub(super) fn multiply(&self, rows: &Operands, sink: Sink<'_>, workers: &Workers) -> Duration {
        let (linear, path) = (self.linear, self.path);
        let finish = |sums: RowSums<'_>| {
            linear.add_bias(path, sums.feature, sums.first);
            if let (Some(factor), None) = (self.scale, self.own_norm) {
                kernels::scale(path, sums.first, factor);
            }
        };
        let matrices = [&linear.matrix];
        let updated = self.updates.map(|updates| updates.then([0], finish));
        let epilogue = updated.as_ref().map_or(&finish as Epilogue<'_>, |updated| updated);
        let epilogue = Some(epilogue);
        let product = Product { group: 0, matrices: &matrices, step: 1, epilogue, sink };
        let threads = workers.for_products(&matrices, rows.rows());
        kernels::multiply(path, threads, rows, &mut [product])
    }
}

/// Normalizes the rows of `other` with the RMS norm `norm`, multiplies them by `scale`, and adds
/// them to `x`.
pub(super) fn add_normed(
    path: Path,
    (norm, scale): (&NormVectors, Option<f32>),
    [x, other]: [&mut [f32]; 2],
    workers: &Workers,
) {
    let width = norm.weight.len();
    let chunk = workers.chunk_rows(x.len() / width, 2 * width);
    let parts = x.chunks_mut(chunk * width).zip(other.chunks_mut(chunk * width));
    workers.run(parts, |(x, other)| {
        norm.apply_in_place(path, other);
        if let Some(factor) = scale {
            kernels::scale(path, other, factor);
        }
        kernels::add(path, x, other);
    });
}

/// Scales and soft-caps `logits` if the configuration says so.
pub(super) fn finish_logits(
    config: &DecoderConfig,
    path: Path,
    logits: &mut [f32],
    workers: &Workers,
) {
    let (scale, cap) = (config.logit_scale, config.logit_softcap);
    if scale.is_none() && cap.is_none() {
        return;
    }
    let chunk = workers.chunk_rows(logits.len(), 1);
    workers.run(logits.chunks_mut(chunk), |logits| {
        if let Some(factor) = scale {
            kernels::scale(path, logits, factor);
        }
        if let Some(cap) = cap {
            kernels::soft_cap(path, logits, cap);
        }
    });
}

/// Paged attention of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerAttention<'a> {
    pub(super) path: Path,
    pub(super) kv: &'a KvStore,
    /// Index in the KV store of the keys and values that the layer reads.
    pub(super) kept: usize,
    /// Number of query heads.
    pub(super) heads: usize,
    /// Number of key heads and of value heads.
    pub(super) kv_heads: usize,
    /// Number of elements of a head.
    pub(super) head_dim: usize,
    /// Factor by which scores are multiplied.
    pub(super) scale: f32,
    /// Soft cap of the scores; `None` if they are not capped.
    pub(super) softcap: Option<f32>,
    /// Number of positions that a query attends to; `None` for all.
    pub(super) sliding_window: Option<usize>,
    /// Logits of the attention sinks, `[heads]`.
    pub(super) sinks: Option<&'a [f32]>,
}

impl LayerAttention<'_> {
    /// The same as [`Self::run`] without the positions before `first`. Unless `first` is 0, each
    /// sequence must have one row, at a position from `first` on.
    pub(super) fn run_from(
        &self,
        first: usize,
        q: &[f32],
        sequences: &[AttentionSequence<'_>],
        out: &mut [f32],
        workers: &Workers,
    ) {
        if first == 0 {
            return self.run(q, sequences, out, workers);
        }
        let width = self.heads * self.head_dim;
        let rows = q.chunks_exact(width).zip(out.chunks_exact_mut(width));
        for (sequence, (q, out)) in sequences.iter().zip(rows) {
            let AttentionSequence { start, count, .. } = *sequence;
            assert!(count == 1 && start >= first, "{count} rows at {start}, expected one");
            let seen = start + 1 - first;
            let sliding_window = Some(self.sliding_window.map_or(seen, |window| window.min(seen)));
            let own = Self { sliding_window, ..*self };
            own.run(q, std::slice::from_ref(sequence), out, workers);
        }
    }

    /// Computes attention of the queries `q` into `out`. Both are `[rows, heads, head_dim]`.
    fn run(
        &self,
        q: &[f32],
        sequences: &[AttentionSequence<'_>],
        out: &mut [f32],
        workers: &Workers,
    ) {
        let Self { path, kv, kept, heads, kv_heads, head_dim, .. } = *self;
        let Self { scale, softcap, sliding_window, sinks, .. } = *self;
        let seen = |sequence: &AttentionSequence<'_>| {
            let context = sequence.start + sequence.count;
            sequence.count * sliding_window.map_or(context, |window| window.min(context))
        };
        let pairs = sequences.iter().map(seen).sum::<usize>();
        let products = pairs * heads * head_dim;
        let args = AttentionArgs {
            path,
            q,
            sequences,
            keys: kv.keys(kept),
            key_layout: kv.shape().attention_layers[kept].key_layout,
            values: kv.values(kept),
            block_size: kv.shape().block_size,
            heads,
            kv_heads,
            head_dim,
            scale,
            softcap,
            sliding_window,
            window_after: None,
            bias: None,
            sinks,
        };
        kernels::attention(workers.for_work(2 * products), &args, out);
    }
}
